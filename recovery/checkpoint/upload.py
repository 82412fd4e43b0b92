"""Background upload of a worker's shards during training."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from recovery.checkpoint.errors import UploadFailed
from recovery.checkpoint.write import (
    MAX_FILE_BYTES,
    CheckpointPart,
    WorkerReceipt,
    step_prefix,
    write_views,
)
from recovery.errors import RecoveryError
from recovery.local.snapshot import SnapshotLease
from recovery.state.borrowed import BorrowedState
from recovery.state.layout import Layout, ShardId
from recovery.state.slices import shard_views
from recovery.storage.errors import StorageError, StorageMisplaced, StorageTimeout
from recovery.storage.protocol import Storage

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
"""Pauses in seconds between two tries of one upload: the first, and the limit of the doubling."""

UploadProgress = Callable[[int, int, int], None]
"""progress(step, done_bytes, total_bytes), called on the uploader's thread."""


class UploaderBusy(RecoveryError):
    """An upload is still on its way; its memory is not free.

    Wait for it, or skip this checkpoint.
    """

    def __init__(self, step: int, busy_with: int) -> None:
        super().__init__(step, busy_with)
        self.step = step
        self.busy_with = busy_with

    def __str__(self) -> str:
        return (
            f"checkpoint of step {self.step} is not started: step {self.busy_with} is still being"
            " uploaded"
        )


@dataclass(frozen=True)
class _Task:
    step: int
    worker: str
    borrowed: BorrowedState | SnapshotLease
    layout: Layout
    ids: Collection[ShardId]
    proof: str | None = None


class Uploader:
    """Background upload of one checkpoint's shards at a time, by one thread that this object owns.

    Call order in the training loop: `submit(s, state)` after the update of step s, forward and
    backward of step s + 1 while the thread copies, `wait_copied()`, the next update. An update that
    does not wait is detected: the tensors' version counters differ, and the upload fails.

    Memory: a copy of the shards this worker writes (not of all it holds; none with a lease), plus
    concurrency x part_bytes of the storage. Bandwidth: the storage's `max_bytes_per_s`. `wait`
    gives the receipt or raises the upload's error; `close` joins the thread.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        progress: UploadProgress | None = None,
        patience_s: float = 0.0,
        on_failure: Callable[[int, str], None] | None = None,
        on_written: Callable[[Storage, WorkerReceipt], None] | None = None,
    ) -> None:
        """Start the thread; retry failed requests, and the whole upload, for `patience_s` seconds.

        Pauses between retries double. `on_failure(step, reason)` is called when a request begins to
        wait, and for each failure after which the upload is retried. `on_written(storage, receipt)`
        is called once all files are durable; a StorageError of it is one of the upload's.
        """
        self._storage = storage
        self._patience_s = patience_s
        self._on_failure = on_failure
        self._on_written = on_written
        self._abandoned = threading.Event()
        self._max_file_bytes = max_file_bytes
        self._progress = progress
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._busy_with: int | None = None
        self._copied = True
        self._outcome: WorkerReceipt | Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while an upload is in flight."""
        return self._busy_with is not None

    def submit(
        self,
        step: int,
        worker: str,
        state: Mapping[str, torch.Tensor] | SnapshotLease,
        layout: Layout,
        ids: Collection[ShardId],
        proof: str | None = None,
    ) -> None:
        """Start to write `ids` of `state` (see `write_shards`) and return.

        The tensors must not change until `wait_copied` returns. With a lease of the step's
        snapshot, the snapshot is read instead, nothing is copied, and the tensors may change at
        once; the lease is released in the end.

        `proof` names an object that the storage is known to have. Files count as written only if
        they are seen there afterwards together with it: an empty directory may lie in the place of
        a file system that is not mounted.

        Raises:
            UploaderBusy: the previous upload is not done: nothing was started.
        """
        with self._changed:
            assert not self._closed, "submit after close"
            if self._busy_with is not None:
                raise UploaderBusy(step, self._busy_with)
            self._abandoned.clear()
            self._busy_with = step
            self._outcome = None
            self._copied = isinstance(state, SnapshotLease)
            borrowed = state if isinstance(state, SnapshotLease) else BorrowedState(state)
            # Under the lock: nothing that comes behind the end that `close` puts is done.
            self._tasks.put(_Task(step, worker, borrowed, layout, ids, proof))

    def abandon(self) -> None:
        """Stop retrying the upload in flight once its current try has failed.

        A later upload is worth more.
        """
        self._abandoned.set()

    def wait_copied(self, timeout_s: float = 60.0) -> None:
        """Block until the tensors given to `submit` may change; at once if there are none.

        Raises:
            StorageTimeout: not within `timeout_s`. If they change now, the upload fails.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._copied, timeout_s):
                raise StorageTimeout(
                    self._storage.uri,
                    f"step {self._busy_with} is not copied after {timeout_s:.3g} s",
                )

    def wait(self, timeout_s: float) -> WorkerReceipt:
        """Block until the upload is done; return its receipt. Any thread may call it, repeatedly.

        Raises:
            StorageTimeout: not done within `timeout_s`; the upload continues. StorageError: it
            failed.
        """
        with self._changed:
            assert self._busy_with is not None or self._outcome is not None, "wait without submit"
            if not self._changed.wait_for(lambda: self._busy_with is None, timeout_s):
                reason = f"step {self._busy_with} is not uploaded after {timeout_s:.3g} s"
                raise StorageTimeout(
                    self._storage.uri, reason, "raise the deadline, or checkpoint less often"
                )
            outcome = self._outcome
        if isinstance(outcome, WorkerReceipt):
            return outcome
        raise outcome or UploadFailed("the uploader was closed before the upload was done")

    def wait_free(self, timeout_s: float) -> None:
        """Block until no upload is on its way, whatever came of the last one.

        Raises:
            StorageTimeout: not within `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._busy_with is None, timeout_s):
                reason = f"step {self._busy_with} is still being uploaded after {timeout_s:.3g} s"
                raise StorageTimeout(self._storage.uri, reason)

    def poll(self) -> WorkerReceipt | None:
        """Return the receipt if the upload is done, None while it is in flight.

        Raises as `wait` does.
        """
        if self.busy:
            return None
        return self.wait(0)

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish the upload that is on its way and join the thread; idempotent.

        Raises:
            StorageTimeout: the thread still works after `timeout_s`; it is a daemon and dies with
            the process.
        """
        with self._changed:
            if not self._closed:
                self._closed = True
                self._abandoned.set()
                self._tasks.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise StorageTimeout(self._storage.uri, f"an upload still runs after {timeout_s:.3g} s")

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return

            outcome: WorkerReceipt | Exception
            try:
                outcome = self._write(task)
            except RecoveryError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001
                outcome = UploadFailed(
                    f"upload of step {task.step} failed: {type(error).__name__}: {error}"
                )
            # Frees the copies before anybody is told that the memory is free.
            del task
            self._finish(outcome)

    def _write(self, task: _Task) -> WorkerReceipt:
        report = self._progress
        progress: Callable[[int, int], None] | None = None
        if report is not None:
            progress = partial(report, task.step)
        borrowed = task.borrowed

        def write(
            storage: Storage,
            views: Mapping[ShardId, torch.Tensor],
            checksums: Mapping[ShardId, int] | None = None,
        ) -> WorkerReceipt:
            part = CheckpointPart(storage, task.step, task.worker, self._max_file_bytes)
            return write_views(part, views, task.layout.tensors, progress, checksums)

        if isinstance(borrowed, BorrowedState):
            return self._patiently(task, partial(write, views=self._copies(task, borrowed)))
        try:
            kept = borrowed.shards()
            views = {shard: kept[shard] for shard in task.ids}
            checksums = borrowed.checksums()
            return self._patiently(task, partial(write, views=views, checksums=checksums))
        finally:
            borrowed.release()

    def _patiently(self, task: _Task, write: Callable[[Storage], WorkerReceipt]) -> WorkerReceipt:
        """Retry `write`; return the receipt of the first try that succeeds.

        Raises the last error if none succeeds in time.
        """
        step = task.step
        until = time.monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            storage = self._storage.patient(
                max(0.0, until - time.monotonic()),
                lambda error: self._note_failure(step, error),
                self._abandoned,
            )
            try:
                receipt = write(storage)
                _require_written(storage, receipt, task.proof)
                if self._on_written is not None:
                    self._on_written(storage, receipt)
                return receipt
            except StorageError as error:
                if time.monotonic() + pause_s > until or self._abandoned.is_set():
                    raise
                self._note_failure(step, error)
                # Abandoned meanwhile: a later upload waits for this thread.
                if self._abandoned.wait(pause_s):
                    raise
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _note_failure(self, step: int, error: StorageError) -> None:
        if self._on_failure is not None:
            self._on_failure(step, str(error))

    @torch.no_grad()
    def _copies(self, task: _Task, borrowed: BorrowedState) -> dict[ShardId, torch.Tensor]:
        """Return the shards in host memory; release the tensors that they come from."""
        try:
            own = task.layout.shards_by_worker[task.worker]
            with borrowed.reading() as state:
                held = shard_views(task.layout.tensors, own, state)
                views = {shard: host_copy(held[shard]) for shard in task.ids}
            if borrowed.changed:
                raise UploadFailed(
                    f"the state of step {task.step} was changed while it was being copied"
                )
            return views
        finally:
            borrowed.release()
            with self._changed:
                self._copied = True
                self._changed.notify_all()

    def _finish(self, outcome: WorkerReceipt | Exception | None) -> None:
        with self._changed:
            self._busy_with = None
            self._outcome = outcome
            self._changed.notify_all()


def _require_written(storage: Storage, receipt: WorkerReceipt, proof: str | None) -> None:
    """Check that the receipt's files, and `proof`, are in the storage now.

    Raises:
        StorageMisplaced: they are not.
    """
    prefix = step_prefix(receipt.step)
    lost = [
        file.name for file in receipt.files if storage.size(prefix + file.name) != file.num_bytes
    ]
    if proof is not None and storage.size(proof) is None:
        lost.append(proof)
    if lost:
        reason = f"{lost[-1]} is not there, although it was written"
        raise StorageMisplaced(storage.uri, reason, "check that the file system is mounted")


def host_copy(view: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory, never the tensor itself."""
    return view.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
