"""Durable storage behind one small protocol: an S3 bucket or a directory that every node sees.

Objects are immutable once written: names are written whole or not at all, and `if_none_match` lets
one writer win.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from recovery.cancellation import pause
from recovery.storage.errors import StorageError
from recovery.storage.payload import Buffer, Payload


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Limits on the load that transfers put on a storage; every field bounds something."""

    concurrency: int = 8
    """Requests in flight for one transfer.

    About 15 connections fill 10 Gb/s (AWS performance guidelines).
    """
    part_bytes: int = 16 << 20
    """Bytes of one multipart part or one ranged GET (AWS: 8 to 16 MB).

    An upload's memory: concurrency x part_bytes.
    """
    max_bytes_per_s: float | None = None
    """Bandwidth of all transfers of this storage object together; None: unlimited."""
    attempts: int = 5
    """Tries of one request before its error is raised."""
    backoff_s: float = 0.2
    """Wait before the second try; doubles each time, with jitter."""
    request_timeout_s: float = 60.0
    """Deadline of one request, its tries and backoffs included."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.attempts < 1 or self.part_bytes < 1:
            raise ValueError("concurrency, attempts and part_bytes must be at least 1")
        if self.max_bytes_per_s is not None and self.max_bytes_per_s <= 0:
            raise ValueError("max_bytes_per_s must be positive, or None for no limit")


@dataclass(frozen=True)
class ObjectInfo:
    """Name, size and time of one stored object.

    `modified_s` is by the storage's own clock (Unix time).
    """

    name: str
    size: int
    modified_s: float


class Storage(Protocol):
    """Store of immutable bytes by name.

    All methods may be called from several threads. All raise StorageError only (and Cancelled, if
    `until` was used).
    """

    @property
    def uri(self) -> str: ...

    @property
    def options(self) -> StorageOptions: ...

    def put(self, name: str, data: Buffer | Payload, *, if_none_match: bool = False) -> None:
        """Store the object, whole or not at all, durable on return.

        Raises:
            ObjectExists: `if_none_match` and the name is taken.
        """
        ...

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes [start, start + length) of the object, to its end by default.

        Raises ObjectMissing.
        """
        ...

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `start`: one request.

        Raises ObjectMissing, ObjectTruncated.
        """
        ...

    def size(self, name: str) -> int | None:
        """Bytes of the object; None when there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose name starts with `prefix`, sorted by name."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; names that do not exist are passed over."""
        ...

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """Abort unfinished puts of this package under `prefix` that are older than this.

        Returns how many. Unfinished puts of others stay.
        """
        ...

    def now(self) -> float:
        """Return Unix time by the storage's own clock, the one that `modified_s` uses."""
        ...

    def until(self, cancelled: threading.Event) -> Storage:
        """Return the same storage for a caller that may cancel.

        Once the event is set, every call ends with Cancelled, within about 0.1 s and whatever the
        storage does. A request that is in flight then is left to its own deadline, and not retried.
        The result shares the client and bandwidth of this storage, and only this storage has to be
        closed.
        """
        ...

    def patient(
        self,
        patience_s: float,
        on_wait: Callable[[StorageError], None] | None = None,
        until: threading.Event | None = None,
    ) -> Storage:
        """Return the same storage for background work, with more retries.

        What the store throttles, fails or does not answer is retried for `patience_s` seconds,
        request by request. It logs once that requests wait, and once that they are answered again;
        `on_wait` is called at the first of the two, by the waiting thread. Once `until` is set, no
        request waits any more: each ends with its next try. The result shares the client and
        bandwidth of this storage, and only this storage has to be closed.
        """
        ...

    def close(self) -> None: ...


class BandwidthLimit:
    """Token bucket that threads share: `take` returns when that many bytes may pass."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int, cancelled: threading.Event | None = None) -> None:
        """Wait until `num_bytes` may pass; raise Cancelled if `cancelled` is set before."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            wait_s = max(0.0, self._free_at - now)
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
        pause(cancelled, wait_s, "a turn within the bandwidth limit")
