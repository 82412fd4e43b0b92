"""Snapshots: copies of a worker's state in its node's host memory, off the critical path.

A snapshot is taken after every step. The writer lives in the worker's process and owns one thread.
Two files in a memory file system (`/dev/shm`, or any directory) take the steps in turn, so that the
newest step and the one before are both there. They stay when the worker's process dies. Steps that
are pinned meanwhile (see `recovery.peers.replication_rounds`) keep their file, and another one is
made. Between `start(step)` and the optimizer's next update the tensors do not change: the thread
copies straight from them, no clone is made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recovery.errors import RecoveryError, SnapshotError
from recovery.local.private_files import open_private
from recovery.local.snapshot_buffer import SnapshotBuffer
from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.local.snapshot_files import NUM_BUFFERS, SnapshotFiles
from recovery.local.snapshot_format import (
    RECORD,
    RECORD_OFFSET,
    SUFFIX,
    decode_commit,
    escaped,
    generation_of,
    map_of,
)
from recovery.state.borrowed import BorrowedState
from recovery.state.layout import Layout, ShardId, units_by_tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SnapshotOptions:
    """Options of a snapshot writer.

    Making files costs the kernel a quarter of a second a GB. With `in_background` the thread does
    that before its first snapshot (on a disk: at its first snapshot), and a lack of room is that
    snapshot's error.
    """

    force_to_device: bool = False
    """Commit a snapshot only once its bytes are on the device (files on a disk)."""
    keep_older: bool = False
    """Keep what the worker wrote under older layouts until `release_older` is called."""
    in_background: bool = False
    """Make the files in the thread."""
    only: Collection[ShardId] | None = None
    """Shards of the worker's part that the files are for; None: all."""
    on_commit: Callable[[int, int, float], None] | None = None
    """Called by the thread as (step, num_bytes, seconds) when a snapshot is committed."""


class SnapshotWriter:
    """Copies one worker's local state of each step to host memory, asynchronously.

    Call order in the training loop: `wait_copied()` before the update of step s, the update,
    `start(s, state)`, forward and backward of step s + 1 while the copy runs, `wait_copied()`, ...
    `start` itself waits until the snapshot before is committed, so snapshots are not skipped and
    all workers keep the same steps (but where held steps leave no room for another file). An error
    of the thread is raised once, by the next call. `files` knows which steps are there.
    """

    def __init__(
        self,
        directory: Path | str,
        worker: str,
        layout: Layout,
        generation: int,
        options: SnapshotOptions | None = None,
    ) -> None:
        """Make the files for the worker's part of `layout` in `directory` (created if absent).

        What this worker wrote under older layouts is removed once two snapshots are committed.

        Raises:
            SnapshotError: no room for the files.
        """
        options = options or SnapshotOptions()
        self.directory = Path(directory)
        self.worker = worker
        self.generation = generation
        self._force_to_device = options.force_to_device
        self._on_commit = options.on_commit
        held = layout.shards_by_worker[worker]
        shards = held if options.only is None else held & frozenset(options.only)
        self.whole = len(shards) == len(held)
        """True if the snapshots hold all of the worker's state."""
        self._map = map_of(worker, layout, shards)
        self.closed = False
        self._keep_older = options.keep_older
        self._changed = threading.Condition()
        self.files = SnapshotFiles(self._new_file, units_by_tensor(held), self._changed)
        if not options.in_background:
            self.files.make()
        self._job: tuple[int, BorrowedState | SnapshotLease] | None = None
        self._copied = True
        self._error: RecoveryError | None = None
        self.thread = threading.Thread(target=self._run, name=f"snapshot {worker}", daemon=True)
        self.thread.start()

    def _new_file(self, slot: int) -> SnapshotFileWriter:
        path = self.directory / file_name(self.worker, self.generation, slot)
        return SnapshotFileWriter(path, self._map, self._is_over)

    def _is_over(self) -> bool:
        """Return True if the writer is closed and has no snapshot left to take.

        It needs no more files then.
        """
        return self.closed and self._job is None

    @property
    def busy(self) -> bool:
        """True while a snapshot is in progress."""
        return self._job is not None

    def release_older(self) -> None:
        """Remove snapshots of older layouts at the next commit; they are not needed any more."""
        self._keep_older = False

    def takes(self, step: int) -> bool:
        """Return True if the snapshot of `step` is committed or in progress."""
        with self._changed:
            if self._job is not None:
                in_progress, _ = self._job
                if in_progress == step:
                    return True
            return self.files.has(step)

    def lease(self, step: int) -> SnapshotLease:
        """Lease the snapshot of the step given to the last `start`.

        The snapshot is pinned until the lease is released.
        """
        self.files.add_lease(step)
        return SnapshotLease(self, step)

    def start(
        self, step: int, state: Mapping[str, torch.Tensor] | SnapshotLease, timeout_s: float = 60.0
    ) -> None:
        """Begin the snapshot of `step` and return.

        The tensors must not change until `wait_copied` returns. `state` maps each state name to the
        worker's local tensor, on the CPU or on CUDA (read behind the current stream's work). Or it
        is a lease of the same worker's snapshot in another place, which is copied with its
        checksums and then released.

        Raises:
            SnapshotError: the previous snapshot failed, or is not done after `timeout_s`.
        """
        self.wait(timeout_s)
        with self._changed:
            assert not self.closed, "start() after close()"
            self._copied = isinstance(state, SnapshotLease)
            borrowed = state if isinstance(state, SnapshotLease) else BorrowedState(state)
            self._job = (step, borrowed)
            self._changed.notify_all()

    def wait_copied(self, timeout_s: float = 60.0) -> None:
        """Block until the tensors given to `start` may change. Raises as `start` does."""
        self._wait_until(lambda: self._copied, "copying", timeout_s)

    def wait(self, timeout_s: float = 60.0) -> None:
        """Block until the snapshot given to `start` is committed. Raises as `start` does."""
        self._wait_until(lambda: self._job is None, "committing", timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what was started, join the thread and leave the files; log the last error, if any.

        After `timeout_s` (a disk may hang) the thread is left to finish by itself. The tensors that
        it still reads must not change, or its snapshot is not committed.
        """
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self.thread.join(timeout_s)

    def _wait_until(self, done: Callable[[], bool], doing: str, timeout_s: float) -> None:
        with self._changed:
            is_over = self._changed.wait_for(lambda: done() or self._error is not None, timeout_s)
            if not is_over:
                raise SnapshotError(
                    str(self.directory), f"{self.worker} is still {doing} after {timeout_s:.3g} s"
                )
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def _prepare(self) -> None:
        """Make the files, if the thread is to make them, and map their pages.

        The first copy is then as fast as any.
        """
        if not self.files.are_made and not self._force_to_device:
            # On a disk few generations need files. If there is no room, the first snapshot tries
            # again, and says so.
            with contextlib.suppress(SnapshotError):
                self.files.make()
        self.files.populate(lambda: self.closed or self.busy)

    def _run(self) -> None:
        try:
            self._prepare()
            while self._take_next():
                pass
        finally:
            with self._changed:
                self.files.end()
                if self._error is not None:
                    # Nobody asks any more.
                    logger.warning("%s", self._error)

    def _take_next(self) -> bool:
        """Wait for a snapshot to take, and take it.

        Returns False once there is none and the writer is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None or self.closed)
            if self._job is None:
                return False
            step, borrowed = self._job
        error: RecoveryError | None = None
        buffer: SnapshotBuffer | None = None
        try:
            if not self.files.are_made:
                self.files.make()
            buffer = self.files.free_for(step)
            if buffer is not None:
                self._take(buffer, step, borrowed)
        except Exception as failure:  # noqa: BLE001
            why = failure.reason if isinstance(failure, SnapshotError) else str(failure)
            path = self.directory if buffer is None else buffer.file.path
            error = SnapshotError(str(path), f"step {step} was not taken: {why}")
        borrowed.release()
        with self._changed:
            self._job = None
            self._copied = True
            self._error = error or self._error
            self._changed.notify_all()
        return True

    def _fill(
        self, buffer: SnapshotBuffer, borrowed: BorrowedState | SnapshotLease
    ) -> Sequence[int] | None:
        """Fill the file; return the checksums of its bytes if they are known already."""
        if isinstance(borrowed, SnapshotLease):
            return borrowed.copy_to(buffer)
        checksums = buffer.copy_from(borrowed)
        if borrowed.changed:
            raise SnapshotError(
                str(buffer.file.path), "the state was changed while it was being copied"
            )
        return checksums

    def _take(
        self, buffer: SnapshotBuffer, step: int, borrowed: BorrowedState | SnapshotLease
    ) -> None:
        started = time.monotonic()
        self.files.begin(buffer)
        checksums = self._fill(buffer, borrowed)
        with self._changed:
            self._copied = True
            self._changed.notify_all()

        # On the device before the record that makes it valid, and the record after it.
        if self._force_to_device:
            buffer.file.sync()
        if checksums is None:
            buffer.file.commit(step, self.generation)
        else:
            buffer.file.commit_with(step, self.generation, checksums)
        if self._force_to_device:
            buffer.file.sync()
        self.files.commit(buffer, step)

        if self._on_commit is not None:
            num_bytes = sum(extent.num_bytes for extent in self._map.extents.values())
            self._on_commit(step, num_bytes, time.monotonic() - started)

        # Both files hold this generation's steps now: nothing older is needed.
        if self.files.num_commits >= NUM_BUFFERS and not self._keep_older:
            self._keep_older = True
            remove_older(self.directory, self.worker, self.generation)

    # for leases

    def buffer_of(self, step: int, timeout_s: float) -> SnapshotBuffer:
        """Return the file of a leased step, once it is committed.

        Raises SnapshotError if the snapshot was not taken.
        """
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._job is None or self._job[0] != step, timeout_s
            )
            found = self.files.find(step)
        if not is_over or found is None:
            raise SnapshotError(str(self.directory), f"the snapshot of step {step} was not taken")
        return found


class SnapshotLease:
    """Pinned snapshot that others read.

    It is the one copy of the worker's state from which its disk and durable storage are filled, so
    that the state itself is read once a step. Any thread may use it; each call waits for the
    commit.
    """

    def __init__(self, writer: SnapshotWriter, step: int) -> None:
        self._writer = writer
        self._step = step
        self._released = False

    def shards(self, timeout_s: float = 60.0) -> dict[ShardId, torch.Tensor]:
        """Return each shard's tensor over the snapshot's memory, valid until `release`.

        Raises SnapshotError if the snapshot was not taken.
        """
        return self._writer.buffer_of(self._step, timeout_s).shards()

    def checksums(self, timeout_s: float = 60.0) -> dict[ShardId, int]:
        buffer = self._writer.buffer_of(self._step, timeout_s)
        return dict(zip(buffer.file.map.extents, buffer.file.checksums(), strict=True))

    def copy_to(self, target: SnapshotBuffer, timeout_s: float = 60.0) -> Sequence[int]:
        """Copy the snapshot into a file of the same map; return its recorded checksums."""
        source = self._writer.buffer_of(self._step, timeout_s)
        target.copy_file(source)
        return source.file.checksums()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._writer.files.end_lease(self._step)


def remove_older(
    directory: Path | str, worker: str, generation: int, but_steps: Collection[int] = ()
) -> None:
    """Remove `worker`'s own files of earlier generations, except snapshots of `but_steps`."""
    for path in Path(directory).glob(f"{escaped(worker)}.g*{SUFFIX}"):
        written_in = generation_of(path)
        if written_in is None or written_in >= generation:
            continue
        if _step_of(path) not in but_steps:
            path.unlink(missing_ok=True)


def _step_of(path: Path) -> int | None:
    """Return the step that a file's commit record names; None if it has no valid one.

    Does not decode the rest, which takes a hundred times as long.
    """
    try:
        with open(open_private(path), "rb") as file:
            return decode_commit(path, os.pread(file.fileno(), RECORD.size, RECORD_OFFSET))[0].step
    except (OSError, SnapshotError):
        return None


def file_name(worker: str, generation: int, slot: int) -> str:
    """Name of one of a worker's two files in the host-memory directory."""
    return f"{escaped(worker)}.g{generation}.{slot}{SUFFIX}"
