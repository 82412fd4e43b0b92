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
from recovery.layout import Layout, ShardId
from recovery.restore import Access, LiveState, restore
from recovery.retention import reading_checkpoint
from recovery.storage import open_storage


def restore_state(
    place: WorkerPlace,
    job: Job,
    order: GenerationOrder,
    live: tuple[Layout, dict[str, Tensor]] | None,
    world: Group,
    device: torch.device,
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The local state of the order's layout and the bytes by tier; every participant calls it, and it blocks."""
    assert order.transfers is not None
    store = AgentStore(place.memory_directory, place.disk_directory, place.node)
    agents = {node: (endpoint.host, endpoint.port, endpoint.token) for node, endpoint in order.agents.items()}
    access = Access(
        store, agents, lambda uri, step, shards: _durable(job, step, shards), job.elastic.timeouts().transfer_s
    )
    known = None if live is None else LiveState(*live)
    try:
        restored = restore(order.transfers, place.worker, order.layout, known, world, access, device)
    finally:
        store.close()
    return restored.state, restored.bytes_by_tier


def _durable(job: Job, step: int, shards: Sequence[ShardId]) -> Iterator[tuple[ShardId, Tensor]]:
    """Shards of a committed checkpoint, under a lease that retention respects."""
    storage = open_storage(job.checkpoint_storage)
    try:
        with reading_checkpoint(storage, step) as manifest:
            yield from read_shards(storage, manifest, shards)
    finally:
        storage.close()
