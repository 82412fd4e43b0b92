"""Snapshots: a worker's state copied to its node's host memory after every step, off the critical path.

The writer lives in the worker's process and owns one thread. Two files in a memory file system (`/dev/shm`, or any
directory) take the steps in turn, so that the newest step and the one before are both there, and they stay when the
worker's process dies. Between `start(step)` and the optimizer's next update the tensors do not change: the thread
copies straight from them, no clone is made.
"""

from __future__ import annotations

import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from recovery.errors import RecoveryError, SnapshotError
from recovery.layout import Layout, TensorSpec, units_by_tensor
from recovery.slices import TORCH_DTYPES, check_local, unit_views
from recovery.snapshot_file import SUFFIX, FileMap, SnapshotFileWriter

NUM_BUFFERS = 2


class SnapshotWriter:
    """Copies one worker's local state of each step to host memory, asynchronously.

    Call order in the training loop: `wait_copied()` before the update of step s, the update, `start(s, state)`,
    forward and backward of step s + 1 while the copy runs, `wait_copied()`, ... `start` itself waits until the
    snapshot before is committed, so snapshots are never skipped and all workers keep the same steps. An error of
    the thread is raised once, by the next call.
    """

    def __init__(
        self, directory: Path | str, worker: str, layout: Layout, generation: int, *, force_to_device: bool = False
    ) -> None:
        """Make the files for the worker's part of `layout` in `directory` (created if absent).

        With `force_to_device` (files on a disk) a snapshot is committed only once its bytes are on the device.

        Raises:
            SnapshotError: no room for the files.
        """
        self.directory = Path(directory)
        self.worker = worker
        self.generation = generation
        self._force_to_device = force_to_device
        shards = sorted(layout.shards_by_worker[worker])
        file_map = FileMap.of(worker, layout.tensors, shards)
        self._buffers = [
            _Buffer(
                SnapshotFileWriter(self.directory / file_name(worker, generation, slot), file_map),
                units_by_tensor(shards),
            )
            for slot in range(NUM_BUFFERS)
        ]
        self._next = 0
        self._commits = 0
        self._changed = threading.Condition()
        self._job: tuple[int, Mapping[str, torch.Tensor], torch.cuda.Event | None] | None = None
        self._copied = True
        self._closed = False
        self._error: RecoveryError | None = None
        self._thread = threading.Thread(target=self._run, name=f"snapshot {worker}", daemon=True)
        self._thread.start()

    def start(self, step: int, state: Mapping[str, torch.Tensor], timeout_s: float = 60.0) -> None:
        """Begin the snapshot of `step` and return. The tensors must not change until `wait_copied` returns.

        `state` maps each state name to the worker's local tensor, on the CPU or on CUDA (read behind the current
        stream's work).

        Raises:
            SnapshotError: the snapshot before failed, or is not done after `timeout_s`.
        """
        self.wait(timeout_s)
        with self._changed:
            assert not self._closed, "start() after close()"
            self._copied = False
            self._job = (step, dict(state), _event_on(state))
            self._changed.notify_all()

    def wait_copied(self, timeout_s: float = 60.0) -> None:
        """Block until the tensors given to `start` may change. Raises as `start` does."""
        self._wait_until(lambda: self._copied, "copying", timeout_s)

    def wait(self, timeout_s: float = 60.0) -> None:
        """Block until the snapshot given to `start` is committed. Raises as `start` does."""
        self._wait_until(lambda: self._job is None, "committing", timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what was started, join the thread, leave the files. The last error, if any, is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        for buffer in self._buffers:
            buffer.close()

    def _wait_until(self, done: object, doing: str, timeout_s: float) -> None:
        assert callable(done)
        with self._changed:
            if not self._changed.wait_for(lambda: bool(done()) or self._error is not None, timeout_s):
                raise SnapshotError(str(self.directory), f"{self.worker} is still {doing} after {timeout_s:.3g} s")
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closed)
                if self._job is None:
                    return
                step, state, event = self._job
            error: RecoveryError | None = None
            try:
                self._take(step, state, event)
            except (RecoveryError, ValueError, RuntimeError, OSError) as failure:
                why = failure.reason if isinstance(failure, SnapshotError) else str(failure)
                reason = f"step {step} was not taken: {why}"
                error = SnapshotError(str(self._buffers[self._next].file.path), reason)
            del state
            with self._changed:
                self._job, self._copied = None, True
                self._error = error or self._error
                self._changed.notify_all()

    def _take(self, step: int, state: Mapping[str, torch.Tensor], event: torch.cuda.Event | None) -> None:
        buffer = self._buffers[self._next]
        buffer.file.begin()
        versions = _versions(state)
        buffer.copy_from(state, event)
        if _versions(state) != versions:
            raise SnapshotError(str(buffer.file.path), "the state was changed while it was being copied")
        with self._changed:
            self._copied = True
            self._changed.notify_all()
        if self._force_to_device:
            buffer.file.sync()
        buffer.file.commit(step, self.generation)
        if self._force_to_device:
            buffer.file.sync()
        self._next = (self._next + 1) % NUM_BUFFERS
        self._commits += 1
        if self._commits == NUM_BUFFERS:
            self._remove_older_generations()

    def _remove_older_generations(self) -> None:
        """What this worker wrote under older layouts; two commits of this one stand, so every worker has gone on
        from it.
        """
        for path in self.directory.glob(f"{_escaped(self.worker)}.g*{SUFFIX}"):
            generation = path.name.removesuffix(SUFFIX).rsplit(".g", 1)[1].split(".")[0]
            if generation.isdigit() and int(generation) < self.generation:
                path.unlink(missing_ok=True)


class _Buffer:
    """One of the writer's files, seen as tensors."""

    def __init__(self, file: SnapshotFileWriter, units: Mapping[str, tuple[int, ...]]) -> None:
        self.file = file
        self._units = units
        self._bytes = torch.frombuffer(file.buffer, dtype=torch.uint8)
        self._registered = False
        self._targets = {name: self._targets_of(file.map.tensors[name], of_tensor) for name, of_tensor in units.items()}

    def _targets_of(self, spec: TensorSpec, units: Sequence[int]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Tensors over the file that take the units: one for all of them where they lie as in the local tensor,
        else one each.
        """
        extents = [(unit, self.file.map.extents[shard]) for unit in units for shard in (spec.shards[unit],)]
        first, last = extents[0][1], extents[-1][1]
        together = last.offset + last.num_bytes - first.offset == sum(extent.num_bytes for _, extent in extents)
        if spec.split_dim in (None, 0) and together:
            return [(tuple(units), self._tensor(spec, tuple(units), first.offset))]
        return [((unit,), self._tensor(spec, (unit,), extent.offset)) for unit, extent in extents]

    def _tensor(self, spec: TensorSpec, units: tuple[int, ...], offset: int) -> torch.Tensor:
        num_bytes = sum(spec.unit_bytes(unit) for unit in units)
        shape = spec.local_shape(units)
        return self._bytes[offset : offset + num_bytes].view(TORCH_DTYPES[spec.dtype]).view(shape)

    @torch.no_grad()
    def copy_from(self, state: Mapping[str, torch.Tensor], event: torch.cuda.Event | None) -> None:
        """Fill the file from the worker's local tensors; returns when they may change."""
        if event is None:
            self._copy_all(state, non_blocking=False)
            return
        self._register()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            self._copy_all(state, non_blocking=True)
        stream.synchronize()

    def _copy_all(self, state: Mapping[str, torch.Tensor], non_blocking: bool) -> None:
        for name, targets in self._targets.items():
            spec, units = self.file.map.tensors[name], self._units[name]
            if name not in state:
                raise ValueError(f"the worker's layout has {name}, its state has not")
            check_local(spec, units, state[name])
            if targets[0][0] == units:
                targets[0][1].copy_(state[name], non_blocking=non_blocking)
                continue
            views = unit_views(spec, units, state[name])
            for (unit,), target in targets:
                target.copy_(views[unit], non_blocking=non_blocking)

    def _register(self) -> None:
        """Pin the mapped file, once, so that the GPU copies straight into it; unpinned it works too, only slower."""
        if not self._registered:
            torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)  # type: ignore[no-untyped-call]
            self._registered = True

    def close(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._targets.clear()
        del self._bytes
        self.file.close()


def _escaped(worker: str) -> str:
    return urllib.parse.quote(worker, safe="")


def file_name(worker: str, generation: int, slot: int) -> str:
    """Name of one of a worker's two files in the host-memory directory."""
    return f"{_escaped(worker)}.g{generation}.{slot}{SUFFIX}"


def _versions(state: Mapping[str, torch.Tensor]) -> int:
    # Every in-place operation raises a tensor's version counter: their sum tells whether any has changed.
    return sum(tensor._version for tensor in state.values())


def _event_on(state: Mapping[str, torch.Tensor]) -> torch.cuda.Event | None:
    if not any(tensor.is_cuda for tensor in state.values()):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
