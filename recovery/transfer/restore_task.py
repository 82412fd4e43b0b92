"""Task of one worker in a restore: what it has, what it may read, and what it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recovery.local.agent_store import AgentStore
from recovery.peers.pool import ClientPool
from recovery.state.holdings import Source
from recovery.state.layout import Layout, ShardId
from recovery.transfer.schedule import TIERS, TransferSchedule, WorkerPart
from recovery.transfer.tiers import DurableTier, NodeTier, PeerTier, ReadDurable, Tier


@dataclass(frozen=True)
class LiveState:
    """State that a worker has in its own memory.

    `state` are local tensors by state name, cut as `layout` says. `arrived` are single shards that
    an earlier restore of the same step brought before it was interrupted, or that were moved to the
    host.

    `make_room(kept)` is called if the device has no memory for the new state beside this one. It
    moves tensors off the device, except those named in `kept` (if it can), and returns the live
    state after that. None if nothing can be moved.
    """

    layout: Layout
    state: Mapping[str, Tensor]
    arrived: Mapping[ShardId, Tensor] = field(default_factory=dict)
    make_room: Callable[[Collection[str]], LiveState] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Access:
    """Access of this worker to sources other than live workers.

    `store` is its own node's; `agents` maps other nodes to (host, port, token); `read_durable`
    reads durable storage. Once `cancelled` is set, a restore ends with Cancelled as soon as no
    message holds it up: it waits for no source any more, and blames none.
    """

    store: AgentStore
    agents: Mapping[str, tuple[str, int, str]]
    read_durable: ReadDurable
    timeout_s: float
    cancelled: threading.Event | None = field(default=None, kw_only=True)

    def tier(
        self,
        source: Source,
        cancelled: threading.Event | None = None,
        *,
        node: str,
        pool: ClientPool,
    ) -> Tier:
        """Return the tier that reads `source` for a worker on `node`.

        It reads until `cancelled` (the restore's own, if None) is set. `pool` has the restore's
        connections to agents.
        """
        if source.kind == "s3":
            return DurableTier(self.read_durable)
        if source.node == node:
            return NodeTier(self.store)
        return PeerTier(self.agents, pool, self.timeout_s, cancelled or self.cancelled)


@dataclass
class Restored:
    """Result of a restore: the new local state, and the tiers that its bytes came from.

    Shards kept in place count in no tier. `failures` failed on the way and were replaced; `bad` are
    the (source, shard) pairs that the next schedule should avoid. `slow` are the bytes per second
    that late nodes gave before they were overtaken, or all the time if no source could overtake
    them.
    """

    state: dict[str, Tensor]
    bytes_by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    bad: tuple[tuple[Source, ShardId], ...] = ()
    slow: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RestoreTask:
    """Part of a transfer schedule that one worker executes.

    layout: the layout that all workers restore. live: what this worker's memory holds; it must stay
    untouched until all workers are done. device: device of the group's messages, and of the new
    state unless `state_device` names another one (the host's memory).
    """

    schedule: TransferSchedule
    worker: str
    layout: Layout
    live: LiveState | None
    device: torch.device | str = "cpu"
    state_device: torch.device | str | None = None

    @property
    def part(self) -> WorkerPart:
        """This worker's part of the schedule; an empty one if it has none."""
        found = self.schedule.parts.get(self.worker)
        if found is None:
            return WorkerPart(self.worker, "", self.schedule.step)
        return found


@dataclass
class RestoreProgress:
    """Progress of one restore, for its caller, however the restore ends.

    arrived: each shard that is here and checked; if a peer's loss ends the restore, they need not
    come again. slow: as `Restored.slow`. report: called with bytes so far and bytes in all, from
    any thread.
    """

    arrived: dict[ShardId, Tensor] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    report: Callable[[int, int], None] | None = None
