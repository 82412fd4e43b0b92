"""Nodes with real snapshots, stores and servers, and workers as threads that restore from them."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.peers.pool import ClientPool
from recovery.peers.server import ShardServer
from recovery.state.holdings import Holding, Source
from recovery.state.layout import Layout, ShardId
from recovery.transfer.links import LinkRates
from recovery.transfer.restore import Access, LiveState, Restored, RestoreTask, restore
from recovery.transfer.schedule import Fetch, TransferSchedule, schedule
from recovery.transfer.tiers import Tier
from tests.harness.faulty_tier import FaultyTier
from tests.harness.state_cases import (
    Placed,
    PostOffice,
    placed,
    placements,
    state_of,
    tensors_of,
    unit,
)

LAYERS = 3
STEP = 7
TOKEN = "token"
TENSORS = tensors_of(LAYERS)
LINKS = LinkRates(
    memory_bytes_per_s=1000, disk_bytes_per_s=300, network_bytes_per_s=100, s3_bytes_per_s=20
)
WHOLE = Layout(TENSORS, {}).shards


@dataclass
class Fleet:
    """Nodes with a store and a server each, under one directory; durable storage as a function that
    counts.
    """

    directory: Path
    servers: dict[str, ShardServer]
    stores: dict[str, AgentStore]
    read_from_s3: Counter[ShardId] = field(default_factory=Counter)
    faults: dict[str, FaultyTier] = field(default_factory=dict)

    def access(self, node: str) -> Access:
        agents = {name: ("127.0.0.1", server.port, TOKEN) for name, server in self.servers.items()}
        return Faulty(self.stores[node], agents, self.durable, 20.0, self.faults)

    def durable(
        self, uri: str, step: int, shards: Sequence[ShardId], into: object
    ) -> Iterator[tuple[ShardId, Tensor]]:
        assert (uri, step) == ("s3://bucket/job", STEP)
        for shard in shards:
            self.read_from_s3[shard] += 1
            yield shard, unit(TENSORS[shard.tensor], shard, step).contiguous()

    def keep(
        self, case: Placed, kind: str, workers: Iterable[str], step: int = STEP
    ) -> list[Holding]:
        """Real snapshots of these workers on their nodes."""
        for worker in workers:
            node = case.node_by_worker[worker]
            writer = SnapshotWriter(self.directory / node / kind, worker, case.layout, 1)
            writer.start(step, state_of(case.layout, worker, step))
            writer.wait(20)
            writer.close(20)
        return [holding for store in self.stores.values() for holding in store.inventory()]


@dataclass(frozen=True)
class Faulty(Access):
    faults: Mapping[str, FaultyTier]

    def tier(
        self,
        source: Source,
        cancelled: threading.Event | None = None,
        *,
        node: str,
        pool: ClientPool,
    ) -> Tier:
        real = super().tier(source, cancelled, node=node, pool=pool)
        kind = "s3" if source.kind == "s3" else source.kind if source.node == node else "peer"
        faulty = self.faults.get(kind)
        if faulty is None:
            return real
        faulty.inner = real
        return faulty


@contextmanager
def restore_fleet(directory: Path) -> Iterator[Fleet]:
    """Four nodes, n0 to n3."""
    nodes = [f"n{number}" for number in range(4)]
    stores = {
        node: AgentStore(directory / node / "memory", directory / node / "disk", node)
        for node in nodes
    }
    servers = {node: ShardServer(store, TOKEN, host="127.0.0.1") for node, store in stores.items()}
    yield Fleet(directory, dict(servers), stores)
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(ShardServer.close, servers.values()))
    for store in stores.values():
        store.close()


def live(
    case: Placed, workers: Iterable[str], step: int = STEP
) -> tuple[list[Holding], dict[str, LiveState]]:
    holdings = []
    states = {}
    for worker in workers:
        source = Source("worker", case.node_by_worker[worker], worker, step, 1)
        holdings.append(Holding(source, case.layout.shards_by_worker[worker]))
        states[worker] = LiveState(case.layout, state_of(case.layout, worker, step))
    return holdings, states


def run(
    plan: TransferSchedule,
    after: Placed,
    states: Mapping[str, LiveState],
    fleet: Fleet,
    office: PostOffice | None = None,
) -> dict[str, Restored]:
    """Every worker's part in a thread of its own; the first error is raised."""
    office = office or PostOffice()

    def one(worker: str) -> Restored:
        node = plan.parts[worker].node
        return restore(
            RestoreTask(plan, worker, after.layout, states.get(worker)),
            office.member(worker),
            fleet.access(node),
        )

    with ThreadPoolExecutor(max(1, len(plan.parts))) as pool:
        return dict(zip(plan.parts, pool.map(one, plan.parts), strict=True))


def drawn(
    fleet: Fleet, data: st.DataObject
) -> tuple[Placed, list[Holding], dict[str, LiveState], TransferSchedule]:
    """Any layout from any mixture of holders: what comes, who holds it, who lives, and the
    schedule.
    """
    before = data.draw(placements(LAYERS))
    after = data.draw(placements(LAYERS, num_nodes=4))
    some = st.sets(st.sampled_from(sorted(before.layout.workers)))
    for path in fleet.directory.rglob("*.snapshot"):
        path.unlink()
    fleet.read_from_s3.clear()
    kept = fleet.keep(before, "memory", data.draw(some))
    kept = fleet.keep(before, "disk", data.draw(some)) or kept
    holdings, states = live(before, data.draw(some))
    held = [*holdings, *kept]
    return (
        after,
        held,
        states,
        schedule(after.layout, after.node_by_worker, [*held, S3], STEP, LINKS),
    )


def check(results: Mapping[str, Restored], after: Placed) -> None:
    for worker in after.layout.workers:
        expected = state_of(after.layout, worker, STEP)
        assert results[worker].state.keys() == expected.keys()
        for name, tensor in results[worker].state.items():
            assert torch.equal(tensor, expected[name]), f"{name} of {worker}"


def moved(results: Mapping[str, Restored]) -> dict[str, int]:
    return {
        tier: sum(result.bytes_by_tier[tier] for result in results.values())
        for tier in ("memory", "disk", "peer", "s3")
    }


S3 = Holding(Source("s3", "", "s3://bucket/job", STEP), WHOLE)
TWO = placed(TENSORS, LAYERS, [[(3, ["n0/0"])], [(3, ["n1/0"])]])


def only_from(plan: TransferSchedule, worker: str, sources: tuple[Source, ...]) -> TransferSchedule:
    """The plan with all that the worker fetches taken from these sources, in this order."""
    part = plan.parts[worker]
    shards = tuple(shard for fetch in part.fetches for shard in fetch.shards)
    return replace(plan, parts={worker: replace(part, fetches=(Fetch(sources, shards, 1e-3),))})
