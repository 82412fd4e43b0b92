"""Shards that an interrupted restore has already received."""

import torch
from torch import Tensor

from autohet.runtime.messages import GenerationOrder, InterruptedRestore
from recovery.errors import RestoreError
from recovery.state.layout import ShardId
from recovery.transfer.restore import RestoreProgress


class ArrivedShards:
    """Shards that arrived in the last restore, if it was interrupted, for the next attempt.

    The thread of the present generation uses it.
    """

    def __init__(self) -> None:
        self._restore: InterruptedRestore | None = None
        self._shards: dict[ShardId, Tensor] = {}

    def usable_in(self, order: GenerationOrder) -> dict[ShardId, Tensor]:
        """Return the shards that are of the order's step and history."""
        restore = self._restore
        if restore is None or restore.step != order.start_step:
            return {}
        return self._shards if order.continues(restore.generation) else {}

    def keep(
        self,
        order: GenerationOrder,
        progress: RestoreProgress,
        error: BaseException,
        device: torch.device,
    ) -> InterruptedRestore:
        """Keep what has arrived of the order's restore, which `error` has interrupted.

        Return the record of it, with its bad and slow sources.
        """
        arrived = self.usable_in(order) | progress.arrived
        if device.type != "cpu":  # the next attempt wants the device's memory
            arrived = {shard: tensor.cpu() for shard, tensor in arrived.items()}
        bad = error.bad if isinstance(error, RestoreError) else ()
        restore = InterruptedRestore(
            order.start_step, order.generation, frozenset(arrived), bad, progress.slow
        )
        self._restore = restore if arrived else None
        self._shards = arrived
        return restore

    def clear(self) -> None:
        self._restore = None
        self._shards = {}
