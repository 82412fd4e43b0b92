"""Sources that do not fail but are late: overtaken by the next, and nothing of theirs is used, or
written, afterwards.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from recovery.errors import Cancelled, PeerUnreachable
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot_file import SnapshotFile
from recovery.peers.pool import ClientPool
from recovery.peers.server import ShardServer
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from recovery.transfer.links import LinkRates
from recovery.transfer.reads import Reads
from recovery.transfer.restore import Access, Restored, RestoreProgress, RestoreTask, restore
from recovery.transfer.schedule import TransferSchedule, schedule
from recovery.transfer.tiers import Into, ShardAnswer, Tier
from tests.harness.restore_fleet import (
    LAYERS,
    LINKS,
    S3,
    STEP,
    TENSORS,
    TOKEN,
    TWO,
    Fleet,
    check,
    live,
    moved,
    only_from,
    run,
)
from tests.harness.state_cases import Member, PostOffice, placed


class GreyStore(AgentStore):
    """Gives what it holds, but each shard takes it long: a node whose network or disk is ill."""

    def file_of(self, source: Source, shard: ShardId) -> SnapshotFile:
        time.sleep(0.4)
        return super().file_of(source, shard)


@pytest.mark.parametrize("other", ["peer", "s3"])
def test_a_grey_peer_is_overtaken_by_the_next_source_and_blamed(
    fleet: Fleet, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never times out.

    Were it waited for, each of its shards would come from it, right, and nobody be blamed.
    """
    monkeypatch.setattr("recovery.transfer.reads.LATE_AT_LEAST_S", 0.3)
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    spare = fleet.keep(TWO, "disk", ["n1/0"]) if other == "peer" else [S3]
    both = placed(TENSORS, LAYERS, [[(3, ["n2/0"])]])
    kept = fleet.keep(both, "memory", ["n2/0"])
    grey = [holding for holding in kept if holding.source.node == "n2"]
    with ShardServer(
        GreyStore(fleet.directory / "n2/memory", fleet.directory / "n2/disk", "n2"),
        TOKEN,
        host="127.0.0.1",
    ) as slow:
        fleet.servers["n2"] = slow
        plan = schedule(after.layout, after.node_by_worker, [*grey, *spare], STEP, LINKS)
        for fetch in plan.parts["n0/0"].fetches:
            assert fetch.sources[0].node == "n2" or other == "peer"
        plan = only_from(plan, "n0/0", (grey[0].source, spare[0].source))
        results = run(plan, after, {}, fleet)
    check(results, after)
    assert set(results["n0/0"].slow) == {"n2"}
    assert moved(results)["s3" if other == "s3" else "peer"] > 0
    assert {source.node for source, _ in results["n0/0"].bad} == {"n2"}
    assert len(results["n0/0"].bad) > 1


def test_a_grey_live_worker_is_known_when_the_restore_breaks_off(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody overtakes its messages.

    Those who hand on what comes from it wait themselves, and are not blamed.
    """
    monkeypatch.setattr("recovery.transfer.senders.LATE_AT_LEAST_S", 0.2)
    monkeypatch.setattr("recovery.transfer.messages.make_messages.__defaults__", (64,))
    after = placed(TENSORS, LAYERS, [[(3, [f"n{number}/0"])] for number in (1, 2, 3)])
    holdings, states = live(TWO, ["n0/0"])
    plan = schedule(
        after.layout, after.node_by_worker, holdings, STEP, LinkRates(network_bytes_per_s=1e9)
    )
    messages = {m.position: m for part in plan.parts.values() for m in part.messages}.values()
    from_grey = [message for message in messages if message.source == "n0/0"]
    assert len(from_grey) < len(messages), "some hand on"
    office, left = PostOffice(deadline_s=2), [len(from_grey) - 3]

    class Grey(Member):
        def send(self, tensor: Tensor, to: str, tag: int) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionError("n0 is gone")
            time.sleep(0.05)
            return super().send(tensor, to, tag)

    def slow_for(worker: str) -> dict[str, float]:
        slow: dict[str, float] = {}
        member, access = (
            (Grey if worker == "n0/0" else Member)(office, worker),
            fleet.access(plan.parts[worker].node),
        )
        with pytest.raises((ConnectionError, TimeoutError, queue.Empty)):
            restore(
                RestoreTask(plan, worker, after.layout, states.get(worker)),
                member,
                access,
                RestoreProgress(slow=slow),
            )
        return slow

    with ThreadPoolExecutor(len(plan.parts)) as pool:
        found = list(pool.map(slow_for, plan.parts))
    assert {node for slow in found for node in slow} == {"n0"}
    assert all(1 < speed < 1e5 for slow in found for speed in slow.values())


def test_a_late_source_that_has_no_other_is_waited_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.transfer.reads.LATE_AT_LEAST_S", 0.1)
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(placed(TENSORS, LAYERS, [[(3, ["n2/0"])]]), "memory", ["n2/0"])
    plan = schedule(after.layout, after.node_by_worker, kept, STEP, LINKS)
    results = run(plan, after, {}, fleet)
    check(results, after)
    assert not results["n0/0"].bad


@dataclass
class Stuck:
    """A tier whose read of shard number `at` stays where nothing wakes it until `wake`, and then
    goes on as if nothing had been.
    """

    inner: Tier = field(default_factory=lambda: Failing())
    at: int = 1
    wake: threading.Event = field(default_factory=threading.Event)
    stuck: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Into,
    ) -> Iterator[tuple[ShardId, ShardAnswer]]:
        try:
            for number, (shard, piece) in enumerate(
                self.inner.read(source, shards, checksums, into)
            ):
                if number == self.at:
                    self.stuck.set()
                    assert self.wake.wait(60)
                    if shard in into:
                        torch.frombuffer(into[shard], dtype=torch.uint8).fill_(255)
                yield shard, piece
        finally:
            self.ended.set()


@dataclass(frozen=True)
class WithStuck(Access):
    """Reads of the stuck kinds of source hang; those of `failing` kinds fail at once."""

    stuck: Mapping[str, Stuck]
    failing: frozenset[str] = frozenset()

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
        if kind in self.failing:
            return Failing()
        if kind in self.stuck:
            self.stuck[kind].inner = real
            return self.stuck[kind]
        return real


class Failing:
    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Into,
    ) -> Iterator[tuple[ShardId, ShardAnswer]]:
        raise PeerUnreachable(str(source), "it hung up")
        yield


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    tier = Stuck()
    yield tier
    tier.wake.set()


AFTER = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])


def plan_from(fleet: Fleet, *kinds: str) -> TransferSchedule:
    """All that n0's worker wants from these kinds of source, in this order: its own disk, a peer's
    memory, durable storage.
    """
    fleet.keep(placed(TENSORS, LAYERS, [[(3, ["n0/0"])]]), "disk", ["n0/0"])
    held = fleet.keep(placed(TENSORS, LAYERS, [[(3, ["n2/0"])]]), "memory", ["n2/0"])
    found = {"disk" if each.source.node == "n0" else "peer": each.source for each in held} | {
        "s3": S3.source
    }
    plan = schedule(AFTER.layout, AFTER.node_by_worker, [*held, S3], STEP, LINKS)
    return only_from(plan, "n0/0", tuple(found[kind] for kind in kinds))


def restore_with(
    fleet: Fleet,
    plan: TransferSchedule,
    stuck: Mapping[str, Stuck],
    failing: frozenset[str] = frozenset(),
    cancelled: threading.Event | None = None,
) -> Restored:
    known = fleet.access("n0")
    access = WithStuck(
        known.store, known.agents, fleet.durable, 20.0, stuck, failing, cancelled=cancelled
    )
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(
            restore,
            RestoreTask(plan, "n0/0", AFTER.layout, None),
            PostOffice().member("n0/0"),
            access,
        )
        try:
            return doing.result(timeout=15)
        finally:
            for tier in stuck.values():
                if not doing.done():
                    tier.wake.set()


@pytest.mark.parametrize("order", [("disk", "peer"), ("disk", "s3"), ("s3", "peer")])
def test_a_read_that_never_comes_back_is_left_behind_and_writes_nowhere(
    fleet: Fleet, stuck: Stuck, order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or a server that hangs: the restore ends by the other source, and what the read brings
    when it wakes is dropped.
    """
    monkeypatch.setattr("recovery.transfer.reads.LATE_AT_LEAST_S", 0.3)
    result = restore_with(fleet, plan_from(fleet, *order), {order[0]: stuck})
    assert stuck.stuck.is_set()
    assert not stuck.wake.is_set(), "it was not waited for"
    check({"n0/0": result}, AFTER)
    assert not result.slow, (
        "how fast a disk of its own or a storage is says nothing of a node's links"
    )
    assert {source.kind for source, _ in result.bad} == {order[0]}
    for tensor in result.state.values():
        tensor.zero_()
    stuck.wake.set()
    assert stuck.ended.wait(20)
    assert not any(tensor.any() for tensor in result.state.values())


def test_what_wakes_while_others_are_still_read_is_dropped(
    fleet: Fleet, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.transfer.reads.LATE_AT_LEAST_S", 0.3)
    plan, puts = plan_from(fleet, "disk", "peer"), Counter[ShardId]()

    class Counting:
        def memory_of(self, shard: ShardId) -> None:
            return None

        def put(self, shard: ShardId, data: Tensor, tier: str) -> None:
            puts[shard] += 1

    known = fleet.access("n0")
    access = WithStuck(known.store, known.agents, fleet.durable, 20.0, {"disk": stuck})
    with ClientPool() as pool:
        tier_of = partial(access.tier, node="n0", pool=pool)
        with Reads("n0", AFTER.layout, plan, tier_of, Counting(), None) as reads:
            for done in [reads.start(fetch) for fetch in plan.parts["n0/0"].fetches]:
                done.result(20)
            stuck.wake.set()
            assert stuck.ended.wait(20)
    assert puts == Counter(AFTER.layout.shards_by_worker["n0/0"])


def test_a_hedge_that_fails_is_followed_by_the_next(
    fleet: Fleet, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.transfer.reads.LATE_AT_LEAST_S", 0.3)
    result = restore_with(
        fleet, plan_from(fleet, "disk", "peer", "s3"), {"disk": stuck}, frozenset({"peer"})
    )
    assert not stuck.wake.is_set()
    check({"n0/0": result}, AFTER)
    assert result.bytes_by_tier["s3"] > 0
    assert not result.bytes_by_tier["peer"]


def test_a_hedge_that_hangs_is_not_waited_for_once_the_late_source_gave_all(
    fleet: Fleet, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.transfer.reads.LATE_AT_LEAST_S", 0.1)
    late, stuck.at = Stuck(), 0
    threading.Timer(1.0, late.wake.set).start()
    result = restore_with(fleet, plan_from(fleet, "peer", "s3"), {"peer": late, "s3": stuck})
    assert stuck.stuck.is_set()
    assert not stuck.wake.is_set()
    check({"n0/0": result}, AFTER)
    assert result.bytes_by_tier["s3"] == 0


def test_a_cancelled_restore_waits_for_no_disk(fleet: Fleet, stuck: Stuck) -> None:
    cancelled = threading.Event()
    threading.Thread(target=lambda: stuck.stuck.wait(20) and cancelled.set()).start()
    with pytest.raises(Cancelled):
        restore_with(fleet, plan_from(fleet, "disk", "s3"), {"disk": stuck}, cancelled=cancelled)
    assert not stuck.wake.is_set()


def test_a_cancelled_restore_leaves_no_hedge_behind(
    fleet: Fleet, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restore is given up while a hedge waits until the late read writes nothing any more."""
    monkeypatch.setattr("recovery.transfer.reads.LATE_AT_LEAST_S", 0.1)
    stuck.at, cancelled, overtaken = 0, threading.Event(), Reads.overtake

    def giving_up(reads: Reads, late: Any, by: Source) -> None:
        cancelled.set()
        stuck.wake.set()
        overtaken(reads, late, by)

    monkeypatch.setattr(Reads, "overtake", giving_up)
    with pytest.raises(Cancelled):
        restore_with(fleet, plan_from(fleet, "peer", "s3"), {"peer": stuck}, cancelled=cancelled)
    assert cancelled.is_set()
    until = time.monotonic() + 10
    while left := [thread.name for thread in threading.enumerate() if "hedge" in thread.name]:
        assert time.monotonic() < until, left
        time.sleep(0.01)
