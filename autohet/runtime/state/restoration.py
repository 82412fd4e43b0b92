"""Adapter from a generation's order to `recovery.transfer.restore`.

It supplies the addresses of the agents and the durable storage.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from autohet.runtime.groups import Group
from autohet.runtime.messages import GenerationOrder, WorkerPlace
from recovery.checkpoint.durable_reads import DurableReads
from recovery.local.agent_store import AgentStore
from recovery.state.layout import ShardId
from recovery.storage.protocol import Storage
from recovery.transfer.restore import Access, LiveState, Restored, restore


def restore_state(
    place: WorkerPlace,
    order: GenerationOrder,
    live: LiveState | None,
    world: Group,
    device: torch.device,
    arrived: dict[ShardId, Tensor],
    storage: Storage,
    timeout_s: float,
    cancelled: threading.Event,
    slow: dict[str, float],
    state_device: torch.device,
) -> Restored:
    """Restore the local state of the order's layout; every participant calls it, and it blocks.

    Returns the state and its sources. Meanwhile `arrived` and `slow` fill up. `device`: of
    messages;
    `state_device`: of the state. Once `cancelled` is set, no call here waits for storage or for an
    agent.
    """
    assert order.transfers is not None
    store = AgentStore(place.memory_directory, place.disk_directory, place.node)
    agents = {
        node: (endpoint.host, endpoint.port, endpoint.token)
        for node, endpoint in order.agents.items()
    }
    try:
        with DurableReads(storage, cancelled, timeout_s) as durable:
            access = Access(store, agents, durable, timeout_s, cancelled=cancelled)
            return restore(
                order.transfers,
                place.worker,
                order.layout,
                live,
                world,
                access,
                device,
                arrived=arrived,
                slow=slow,
                state_device=state_device,
            )
    finally:
        store.close()
