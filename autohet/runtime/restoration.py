"""Joins a generation's orders to `recovery.restore`: who is reached how, and what durable storage is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autohet.runtime.groups import Group
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, WorkerPlace
from recovery.agent_store import AgentStore
from recovery.checkpoint_read import read_shards
from recovery.layout import ShardId
from recovery.restore import Access, LiveState, Restored, restore
from recovery.retention import reading_checkpoint
from recovery.storage import open_storage


def restore_state(
    place: WorkerPlace,
    job: Job,
    order: GenerationOrder,
    live: LiveState | None,
    world: Group,
    device: torch.device,
    arrived: dict[ShardId, Tensor],
) -> Restored:
    """The local state of the order's layout, and where it came from; every participant calls it, and it blocks. `arrived` fills
    up meanwhile.
    """
    assert order.transfers is not None
    store = AgentStore(place.memory_directory, place.disk_directory, place.node)
    agents = {node: (endpoint.host, endpoint.port, endpoint.token) for node, endpoint in order.agents.items()}
    access = Access(
        store, agents, lambda uri, step, shards: _durable(job, step, shards), job.elastic.timeouts().transfer_s
    )
    try:
        return restore(order.transfers, place.worker, order.layout, live, world, access, device, arrived=arrived)
    finally:
        store.close()


def _durable(job: Job, step: int, shards: Sequence[ShardId]) -> Iterator[tuple[ShardId, Tensor]]:
    """Shards of a committed checkpoint, under a lease that retention respects."""
    storage = open_storage(job.checkpoint_storage)
    try:
        with reading_checkpoint(storage, step) as manifest:
            yield from read_shards(storage, manifest, shards)
    finally:
        storage.close()
