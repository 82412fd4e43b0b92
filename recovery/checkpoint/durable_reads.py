"""Reads of durable storage in a restore, with shared resources.

All readers share one client, one pool of requests and one lease per step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from torch import Tensor

from recovery.cancellation import ChildEvent
from recovery.checkpoint.manifest import Manifest
from recovery.checkpoint.read import READ_MEMORY_BYTES, read_shards
from recovery.checkpoint.retention import reading_checkpoint
from recovery.errors import Cancelled
from recovery.state.layout import ShardId
from recovery.storage.protocol import Storage

READERS = 4  # that may read ahead at once: `recovery.transfer.restore` fetches in as many threads


class DurableReads:
    """A `recovery.transfer.tiers.ReadDurable` for any number of threads.

    It contacts nothing before the first read. At most `storage.options.concurrency` requests are in
    flight for all threads together. `close` ends reads, leases and threads; the storage is its
    owner's. Once `cancelled` is set, every read ends with Cancelled and `close` waits for no answer
    of the storage. A storage that throttles or fails is retried for `patience_s` seconds.
    """

    def __init__(
        self,
        storage: Storage,
        cancelled: threading.Event | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._cancelled = cancelled
        self.ended = ChildEvent(cancelled)
        """Set by `close`, and with `cancelled`."""
        self._storage = storage.patient(patience_s, until=self.ended) if patience_s else storage
        self._read_from = self._storage.until(self.ended)
        self._lock = threading.Lock()
        self._leases = ExitStack()
        self._manifest_by_step: dict[int, Manifest] = {}
        self._requests = ThreadPoolExecutor(
            storage.options.concurrency, thread_name_prefix="shard-read"
        )

    def __call__(
        self,
        uri: str,
        step: int,
        shards: Sequence[ShardId],
        into: Mapping[ShardId, memoryview] | None = None,
    ) -> Iterator[tuple[ShardId, Tensor]]:
        """Yield shards of the checkpoint of `step`, as `read_shards` does, with its errors."""
        memory_bytes = READ_MEMORY_BYTES // READERS
        manifest = self.manifest(step)
        yield from read_shards(
            self._read_from,
            manifest,
            shards,
            max_memory_bytes=memory_bytes,
            requests=self._requests,
            into=into,
        )

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of `step`, under a lease that retention respects until `close`.

        It is read once.
        """
        with self._lock:
            if step not in self._manifest_by_step:
                reading = reading_checkpoint(self._storage, step, cancelled=self._cancelled)
                self._manifest_by_step[step] = self._leases.enter_context(reading)
                if (
                    self.ended.is_set()
                ):  # `close` may have ended the leases before this one was there
                    self._leases.close()
                    raise Cancelled(f"reading step {step}")
            return self._manifest_by_step[step]

    def close(self) -> None:
        """Close without waiting for late reads that are not wanted any more. Idempotent.

        Leases end within the storage's deadlines.
        """
        self.ended.set()
        self._requests.shutdown(wait=True, cancel_futures=True)
        self._leases.close()
        self._manifest_by_step.clear()

    def __enter__(self) -> DurableReads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
