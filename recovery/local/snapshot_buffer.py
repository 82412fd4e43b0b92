"""Tensors over one file of a snapshot writer.

A buffer is filled from the worker's state, or from another such file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.state.borrowed import BorrowedState
from recovery.state.device_checksum import view_checksums
from recovery.state.layout import ShardId, TensorSpec, units_by_tensor
from recovery.state.slices import TORCH_DTYPES, check_local, unit_views

logger = logging.getLogger(__name__)

_Target = tuple[tuple[int, ...], torch.Tensor]
"""Units of one tensor, and the tensor over the file that takes them together."""


class SnapshotBuffer:
    """Tensors over one snapshot file; owns the file's mapping until `close`.

    `local_units` are those of the worker's own tensors, of which the file may hold only some.
    `step` is what is committed in it, `sequence` its place among its writer's commits.
    """

    def __init__(
        self, file: SnapshotFileWriter, local_units: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.file = file
        self.step: int | None = None
        self.sequence = 0
        self._units = local_units
        self._bytes = torch.frombuffer(file.buffer, dtype=torch.uint8)
        self._registered = False
        self._tried_to_register = False
        self._closed = False

        self._targets: dict[str, list[_Target]] = {}
        for name, units in units_by_tensor(file.map.extents).items():
            self._targets[name] = self._targets_of(file.map.tensors[name], units)

    def _targets_of(self, spec: TensorSpec, units: Sequence[int]) -> list[_Target]:
        """Return the tensors over the file that take the units.

        One tensor takes all units if they lie in the file as in the local tensor; else each has its
        own.
        """
        extents = [self.file.map.extents[ShardId(spec.name, unit)] for unit in units]
        num_bytes = sum(extent.num_bytes for extent in extents)
        are_adjacent = extents[-1].end - extents[0].offset == num_bytes
        if spec.split_dim in (None, 0) and are_adjacent:
            together = tuple(units)
            return [(together, self._tensor(spec, together, extents[0].offset))]

        targets: list[_Target] = [
            ((unit,), self._tensor(spec, (unit,), extent.offset))
            for unit, extent in zip(units, extents, strict=True)
        ]
        return targets

    def _tensor(self, spec: TensorSpec, units: tuple[int, ...], offset: int) -> torch.Tensor:
        num_bytes = sum(spec.unit_bytes(unit) for unit in units)
        raw = self._bytes[offset : offset + num_bytes]
        return raw.view(TORCH_DTYPES[spec.dtype]).view(spec.local_shape(units))

    @torch.no_grad()
    def copy_from(self, borrowed: BorrowedState) -> list[int] | None:
        """Fill the file from the worker's local tensors; return when they may change.

        If the state is on a GPU, returns the shards' checksums in the file's order. The GPU
        computes them during the copies; one core of the host would take ten times as long as the
        copies. Returns None if the host is to compute them from the file.
        """
        if not borrowed.on_device:
            with borrowed.reading() as state:
                self._copy_all(state, non_blocking=False)
            return None
        with borrowed.reading() as state:
            self._register()
            self._copy_all(state, non_blocking=True)
            return self._checksums_of(state)

    def _checksums_of(self, state: Mapping[str, torch.Tensor]) -> list[int] | None:
        """Return the checksums of the file's shards in the worker's tensors.

        None if the tensors are on several devices.
        """
        devices = {tensor.device for tensor in state.values()}
        if len(devices) > 1:
            return None

        specs = self.file.map.tensors
        views: dict[ShardId, torch.Tensor] = {}
        for name in self._targets:
            for unit, view in unit_views(specs[name], self._units[name], state[name]).items():
                views[ShardId(name, unit)] = view
        return view_checksums(views[shard] for shard in self.file.map.extents)

    def _copy_all(self, state: Mapping[str, torch.Tensor], non_blocking: bool) -> None:
        """Copy in one call: each of its own would wait for the interpreter, which trains."""
        sources: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for name, targets in self._targets.items():
            spec = self.file.map.tensors[name]
            units = self._units[name]
            if name not in state:
                raise ValueError(f"the worker's layout has {name}, its state has not")
            check_local(spec, units, state[name])

            first_units, first_target = targets[0]
            if first_units == units:
                sources.append(state[name])
                places.append(first_target)
                continue

            views = unit_views(spec, units, state[name])
            for together, target in targets:
                for unit, part in unit_views(spec, together, target).items():
                    sources.append(views[unit])
                    places.append(part)

        if places:
            torch._foreach_copy_(places, sources, non_blocking=non_blocking)

    def copy_file(self, other: SnapshotBuffer) -> None:
        """Copy the payload of another file of the same map."""
        assert self.file.map.extents == other.file.map.extents
        start = self.file.map.payload_offset
        self._bytes[start:].copy_(other._bytes[start:])

    def shards(self) -> dict[ShardId, torch.Tensor]:
        """Return each shard's tensor over the file's memory."""
        tensors = {}
        for shard, extent in self.file.map.extents.items():
            spec = self.file.map.tensors[shard.tensor]
            tensors[shard] = self._tensor(spec, (shard.unit,), extent.offset)
        return tensors

    def _register(self) -> None:
        """Pin the mapped file, once, so that the GPU copies straight into it.

        Unpinned it works too, only slower: Linux pins no file of a disk (long-term pins of pages
        that it writes back are refused), only those of a memory file system.
        """
        if self._tried_to_register:
            return
        self._tried_to_register = True
        runtime: Any = torch.cuda.cudart()
        refused = int(runtime.cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
        self._registered = refused == 0
        if refused:
            _clear_cuda_error()
            logger.warning(
                "%s is not pinned (CUDA error %d): copies of the GPU's state are slow",
                self.file.path,
                refused,
            )

    def close(self) -> None:
        """Close the file, once; its writer or the last lease calls it."""
        if self._closed:
            return
        self._closed = True
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._targets.clear()
        del self._bytes
        self.file.close()


def _clear_cuda_error() -> None:
    """Clear the error that a refused call of CUDA's runtime leaves in this thread.

    The next launch of a kernel would report it as its own. PyTorch does not offer
    cudaGetLastError; a launch that fails calls it. The current stream is one of the state's device.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
