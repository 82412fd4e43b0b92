"""Fill a worker's state at the start of a generation.

The state comes from the seed, from pretrained weights, or from the tiers that hold it.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.groups import Group
from autohet.runtime.job import Job
from autohet.runtime.layout import STATE_KINDS, parameter_name, state_name
from autohet.runtime.messages import GenerationOrder, WorkerPlace
from autohet.runtime.parallel.host_staging import state_device
from autohet.runtime.state.frozen import first_weights
from autohet.runtime.state.host_memory import require_host_memory
from autohet.runtime.state.restoration import restore_state
from recovery.state.layout import Layout, ShardId
from recovery.storage.protocol import Storage
from recovery.transfer.restore import LiveState, Restored


class StateSource:
    """Source of one worker's state in one generation."""

    def __init__(
        self,
        place: WorkerPlace,
        job: Job,
        config: PreTrainedConfig,
        device: torch.device,
        storage: Storage,
    ) -> None:
        self.place, self.job, self.config, self.device = place, job, config, device
        self._storage = storage

    def fill(
        self,
        order: GenerationOrder,
        live: LiveState | None,
        world: Group,
        arrived: dict[ShardId, Tensor],
        cancelled: threading.Event,
        slow: dict[str, float],
    ) -> Restored:
        """Return the local slices of the order's layout, and the bytes that came from each tier.

        `live` is this worker's own state at the order's step. Every participant of the generation
        calls this. It blocks until this worker has received and sent everything in the schedule.
        `arrived` holds the shards received so far, `slow` the nodes that were late. Ends soon after
        `cancelled` is set.
        """
        where = state_device(order.plan, self.device)
        if order.plan.offloads and self.place.worker in order.plan.workers:
            require_host_memory(_arriving_bytes(order, self.place.worker))
        if order.transfers is None:
            return Restored(self._first(order.layout, where))
        timeout_s = self.job.elastic.timeouts().transfer_s
        return restore_state(
            self.place,
            order,
            live,
            world,
            self.device,
            arrived,
            self._storage,
            timeout_s,
            cancelled,
            slow,
            where,
        )

    def _first(self, layout: Layout, device: torch.device) -> dict[str, Tensor]:
        """Return the state before the first step: drawn or pretrained masters, moments of zero."""
        units = layout.units_of(self.place.worker)
        names = [parameter_name(name) for name in units if name.startswith("param/")]
        whole = first_weights(self.job.model, self.config, names, self.job.training.seed)
        state: dict[str, Tensor] = {}
        for name, tensor in whole:
            local = local_slice(
                layout, state_name("param", name), units[state_name("param", name)], tensor
            ).to(device)
            for kind in STATE_KINDS:
                state[state_name(kind, name)] = (
                    local if kind == "param" else torch.zeros_like(local)
                )
        return state


def _arriving_bytes(order: GenerationOrder, worker: str) -> int:
    """Return the bytes of the worker's new state that are not in its memory yet."""
    part = None if order.transfers is None else order.transfers.parts.get(worker)
    kept = () if part is None else part.keep
    arriving = order.layout.shards_by_worker[worker].difference(kept)
    return sum(map(order.layout.shard_bytes, arriving))


def local_slice(layout: Layout, name: str, units: tuple[int, ...], whole: Tensor) -> Tensor:
    """Concatenate `units` of a whole tensor in memory of its own."""
    spec = layout.tensors[name]
    if spec.split_dim is None:
        return whole.clone()
    return torch.cat([whole[spec.unit_slices(unit)] for unit in units], spec.split_dim).contiguous()
