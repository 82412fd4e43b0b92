"""Fill a worker's state at the start of a generation.

The state comes from the seed, from pretrained weights, or from the tiers that hold it.
"""

import threading
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.facts.layout import STATE_KINDS, parameter_name, state_name
from autohet.runtime.groups import Group
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, WorkerPlace
from autohet.runtime.parallel.host_staging import state_device
from autohet.runtime.state.frozen import first_weights
from autohet.runtime.state.host_memory import require_host_memory
from recovery.checkpoint.durable_reads import DurableReads
from recovery.local.agent_store import AgentStore
from recovery.state.layout import Layout
from recovery.storage.protocol import Storage
from recovery.transfer.restore import (
    Access,
    LiveState,
    Restored,
    RestoreProgress,
    RestoreTask,
    restore,
)


@dataclass(frozen=True)
class StateSource:
    """Source of one worker's state in one generation."""

    place: WorkerPlace
    job: Job
    config: PreTrainedConfig
    device: torch.device
    storage: Storage

    def fill(
        self,
        order: GenerationOrder,
        live: LiveState | None,
        world: Group,
        cancelled: threading.Event,
        progress: RestoreProgress,
    ) -> Restored:
        """Return the local slices of the order's layout, and the bytes that came from each tier.

        `live` is this worker's own state at the order's step. Every participant of the generation
        calls this. It blocks until this worker has received and sent everything in the schedule.
        `progress` fills up meanwhile. Once `cancelled` is set, no call here waits for storage or
        for an agent.
        """
        where = state_device(order.plan, self.device)
        if order.plan.offloads and self.place.worker in order.plan.workers:
            worker = self.place.worker
            # The bytes of the new state that are not in this worker's memory yet.
            part = None if order.transfers is None else order.transfers.parts.get(worker)
            kept = () if part is None else part.keep
            arriving = order.layout.shards_by_worker[worker].difference(kept)
            require_host_memory(sum(map(order.layout.shard_bytes, arriving)))
        if order.transfers is None:
            return Restored(self._first(order.layout, where))
        task = RestoreTask(
            order.transfers, self.place.worker, order.layout, live, self.device, where
        )
        timeout_s = self.job.elastic.timeouts().transfer_s
        agents = {
            node: (endpoint.host, endpoint.port, endpoint.token)
            for node, endpoint in order.agents.items()
        }
        place = self.place
        with (
            closing(AgentStore(place.memory_directory, place.disk_directory, place.node)) as store,
            DurableReads(self.storage, cancelled, timeout_s) as durable,
        ):
            access = Access(store, agents, durable, timeout_s, cancelled=cancelled)
            return restore(task, world, access, progress)

    def _first(self, layout: Layout, device: torch.device) -> dict[str, Tensor]:
        """Return the state before the first step: drawn or pretrained masters, moments of zero."""
        units = layout.units_of(self.place.worker)
        names = [parameter_name(name) for name in units if name.startswith("param/")]
        whole = first_weights(self.job.model, self.config, names, self.job.training.seed)
        state: dict[str, Tensor] = {}
        for name, tensor in whole:
            master = state_name("param", name)
            local = local_slice(layout, master, units[master], tensor).to(device)
            state[master] = local
            for kind in STATE_KINDS[1:]:
                # Muon's matrices have one moment.
                if (moment := state_name(kind, name)) in units:
                    state[moment] = torch.zeros_like(local)
        return state


def local_slice(layout: Layout, name: str, units: tuple[int, ...], whole: Tensor) -> Tensor:
    """Concatenate `units` of a whole tensor in memory of its own."""
    spec = layout.tensors[name]
    if spec.split_dim is None:
        return whole.clone()
    return torch.cat([whole[spec.unit_slices(unit)] for unit in units], spec.split_dim).contiguous()
