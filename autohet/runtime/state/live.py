"""State in a worker's memory, from the restore that brought it to the one that replaces it.

During a restore peers still need the old state while the new one arrives; both together may exceed
the device's memory. All else (gradients, compute copies, the model) is therefore released as soon
as the next generation begins and no roll-forward over a prepared step can follow. If the device's
allocator still refuses the new state, the old one moves to host memory tensor by tensor, and is
sent from there. No state is lost on the way: after an interrupted restore it is as good a source as
before.

So a transition needs no memory of the device that its two plans do not need in training, and the
planner has no term for it. With n parameters computed with and o <= n of them kept as masters and
moments, a plan in fp32 takes 12 o + 4 n bytes and its activations. During the restore the device
holds the new state, 12 o, and the messages in flight. The optimizer then lays state out one kind
after the other, so at most 4 o lie beside it. Messages in flight (128 MiB, one more, and as much of
buffers) exceed gradients, 4 n, only for plans below 1.2 GiB a worker. Host memory must hold an old
state of which no snapshot has the bits, as after a roll-forward.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.state.host_memory import require_host_memory
from autohet.runtime.step.step_commit import StateVersion, Trainer
from recovery.errors import SnapshotError
from recovery.local.snapshot import SnapshotLease
from recovery.state.layout import Layout, ShardId
from recovery.state.slices import names_by_memory, unit_views
from recovery.transfer.restore import LiveState

logger = logging.getLogger("autohet.worker")

FindSnapshot = Callable[[int, int], SnapshotLease | None]
"""Function that leases this worker's snapshot of (generation, step); None: not committed."""


@dataclass
class Live:
    """State in this process's memory: local slices by state name, and their layout.

    While the state is being trained, only its `trainer` knows its step, and if it is whole.

    `in_host_memory` has the shards that a restore moved off the device, and `state` the remaining
    tensors; together they are the whole state. `offloaded`: all of `state` is in host memory.
    """

    worker: str
    generation: int
    layout: Layout
    state: dict[str, Tensor]
    version_before: StateVersion
    trainer: Trainer | None = None
    vote: tuple[int, Any] | None = None
    in_host_memory: dict[ShardId, Tensor] = field(default_factory=dict)
    offloaded: bool = False
    _leases: list[SnapshotLease] = field(default_factory=list)

    @property
    def version(self) -> StateVersion:
        if self.trainer is None:
            return self.version_before
        return self.trainer.version

    @property
    def last_vote(self) -> tuple[int, Any] | None:
        if self.trainer is None:
            return self.vote
        return self.trainer.last_vote

    def without_trainer(self) -> Live:
        """Return the state alone, at its trainer's current step, and release the trainer's memory.

        This frees gradients and compute copies. Call it only after no step of the trainer can be
        applied any more.
        """
        return replace(self, version_before=self.version, vote=self.last_vote, trainer=None)

    def known(
        self, usable: bool, arrived: Mapping[ShardId, Tensor], snapshot_of: FindSnapshot
    ) -> LiveState:
        """Return the state that a restore may take from this process.

        It is the state, if that is of the wanted step and history (`usable`), and the shards that
        have `arrived`. In both cases the restore can free the device's memory for itself.
        """

        def make_room(kept: Collection[str]) -> LiveState:
            self.move_to_host(kept, snapshot_of(self.generation, self.version.step))
            return self.known(usable, arrived, snapshot_of)

        # Offloaded state takes no memory of the device: there is nothing to make room of.
        room = None if self.offloaded else make_room
        if not usable:
            return LiveState(self.layout, {}, arrived, room)
        return LiveState(self.layout, self.state, self.in_host_memory | dict(arrived), room)

    def move_to_host(self, kept: Collection[str], snapshot: SnapshotLease | None) -> None:
        """Move tensors to host memory and free their device memory.

        Exceptions are the tensors `kept`, and those that share memory with them. A flat buffer is
        freed only after its last view.

        snapshot: the host's copy of this state; a shard with equal bits in it is not copied again.

        Raises:
            OutOfMemoryError: the host has no memory for it, either. `in_host_memory` has the shards
            moved so far.
        """
        # Frees a trainer's parameters, which their hooks refer to and which refer to them.
        gc.collect()
        leaving: list[str] = []
        for names in names_by_memory(self.state):
            if not names <= set(kept):
                leaving += sorted(names)

        copies = self._copies(snapshot)
        units = self.layout.units_of(self.worker)
        moved = 0
        for name in leaving:
            moved += self._move_tensor(name, units[name], copies)
        logger.info(
            "%s bytes of the old state went to host memory: the new state does not fit beside it",
            f"{moved:,}",
        )

    def _move_tensor(
        self, name: str, units: tuple[int, ...], copies: Mapping[ShardId, Tensor]
    ) -> int:
        """Move one tensor to host memory, leave no reference to it, and return its bytes."""
        tensor = self.state[name]
        views = unit_views(self.layout.tensors[name], units, tensor)
        uncopied = [view for unit, view in views.items() if ShardId(name, unit) not in copies]
        require_host_memory(sum(view.nbytes for view in uncopied))
        for unit, view in views.items():
            shard = ShardId(name, unit)
            self.in_host_memory[shard] = shard_on_host(view, copies.get(shard))
        del self.state[name]
        return tensor.nbytes

    def _copies(self, snapshot: SnapshotLease | None) -> Mapping[ShardId, Tensor]:
        if snapshot is None:
            return {}
        self._leases.append(snapshot)
        try:
            return snapshot.shards()
        except SnapshotError as error:
            logger.warning("the snapshot is of no use for what leaves the device: %s", error)
            return {}

    def close(self) -> None:
        """Release the snapshot and the moved shards, after the state has been replaced."""
        self.in_host_memory.clear()
        while self._leases:
            self._leases.pop().release()


@torch.no_grad()
def shard_on_host(view: Tensor, copy: Tensor | None) -> Tensor:
    """Return a shard in host memory: the snapshot's copy if its bits are equal, else a new copy."""
    moved = view.to("cpu", copy=True).contiguous()
    if copy is not None and torch.equal(_bits(copy), _bits(moved)):
        return copy
    return moved


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
