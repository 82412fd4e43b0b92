"""The restore as a whole: workers as threads, real snapshots, servers and checkpoints, against
state known beforehand.
"""

import gc
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recovery.errors import RestoreError
from recovery.state.holdings import Holding, Source
from recovery.state.layout import Layout, ShardId
from recovery.transfer import exchange
from recovery.transfer import restore as restore_module
from recovery.transfer.messages import Message
from recovery.transfer.restore import LiveState, Restored, RestoreProgress, RestoreTask, restore
from recovery.transfer.schedule import EarlierRound, TransferSchedule, schedule
from tests.harness.faulty_tier import FAULTS, FaultyTier
from tests.harness.restore_fleet import (
    LAYERS,
    LINKS,
    S3,
    STEP,
    TENSORS,
    TWO,
    WHOLE,
    Fleet,
    check,
    drawn,
    live,
    moved,
    run,
)
from tests.harness.state_cases import Member, Placed, PostOffice, placed, tensors_of, unit


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_layout_from_any_mixture_of_holders(fleet: Fleet, data: st.DataObject) -> None:
    """State is right, bytes by tier are the schedule's, s3 gives each missing shard once."""
    after, held, states, plan = drawn(fleet, data)
    results = run(plan, after, states, fleet)
    check(results, after)
    assert moved(results) == plan.bytes_by_tier
    somewhere = frozenset().union(*(holding.shards for holding in held))
    needed = frozenset().union(*after.layout.shards_by_worker.values())
    assert fleet.read_from_s3 == Counter(needed - somewhere)
    assert all(not result.failures for result in results.values())


def test_unchanged_tensors_are_taken_over_and_the_old_state_is_untouched(fleet: Fleet) -> None:
    before = placed(TENSORS, LAYERS, [[(2, ["n0/0"]), (1, ["n1/0"])]])
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    holdings, states = live(before, ["n0/0", "n1/0"])
    plan = schedule(after.layout, after.node_by_worker, holdings, STEP, LINKS)
    results = run(plan, after, states, fleet)
    check(results, after)
    for name, tensor in states["n0/0"].state.items():
        assert results["n0/0"].state[name] is tensor
    assert moved(results) == {
        "memory": 0,
        "disk": 0,
        "peer": before.layout.bytes_of("n1/0"),
        "s3": 0,
    }
    assert results["n1/0"].state == {}, "it only gave"


def test_messages_do_not_wait_for_what_is_copied_of_ones_own(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of tensors become parts of whole ones: each of two workers has one half, and wants the
    other's.
    """
    before = placed(TENSORS, LAYERS, [[(3, ["n0/0", "n1/0"])]])
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])], [(3, ["n1/0"])]])
    holdings, states = live(before, ["n0/0", "n1/0"])
    plan = schedule(after.layout, after.node_by_worker, holdings, STEP, LINKS)
    came, copy_kept, take = (
        threading.Event(),
        restore_module._Restore._copy_kept,
        restore_module._Restore._take,
    )

    def copying(execution: restore_module._Restore) -> None:
        assert came.wait(20)
        copy_kept(execution)

    def taking(
        execution: restore_module._Restore, message: Message, shard: ShardId, data: Tensor
    ) -> None:
        came.set()
        take(execution, message, shard, data)

    monkeypatch.setattr(restore_module._Restore, "_copy_kept", copying)
    monkeypatch.setattr(restore_module._Restore, "_take", taking)
    check(run(plan, after, states, fleet), after)
    assert came.is_set()


def test_a_copy_of_ones_own_that_fails_ends_the_restore(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(execution: restore_module._Restore) -> None:
        raise MemoryError("no more")

    case = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    holdings, states = live(case, ["n0/0"])
    monkeypatch.setattr(restore_module._Restore, "_copy_kept", failing)
    with pytest.raises(MemoryError):
        run(schedule(case.layout, case.node_by_worker, holdings, STEP, LINKS), case, states, fleet)


def test_what_shares_its_memory_with_something_that_leaves_is_copied(fleet: Fleet) -> None:
    """Taken over as it is, it would keep all of that memory beside the new state."""
    before = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    after = placed(TENSORS, LAYERS, [[(2, ["n0/0"]), (1, ["n1/0"])]])
    holdings, states = live(before, ["n0/0"])
    state = states["n0/0"].state
    assert isinstance(state, dict)
    flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in state.values()])
    for name, part in zip(
        state, flat.split([tensor.nbytes for tensor in state.values()]), strict=True
    ):
        state[name] = part.view(state[name].dtype).view(state[name].shape)
    plan = schedule(after.layout, after.node_by_worker, holdings, STEP, LINKS)
    results = run(plan, after, states, fleet)
    check(results, after)
    old = flat.untyped_storage().data_ptr()
    assert all(
        tensor.untyped_storage().data_ptr() != old for tensor in results["n0/0"].state.values()
    )


def test_a_restore_lets_go_of_the_state_before_and_of_the_group_at_once(fleet: Fleet) -> None:
    """Not when the interpreter next looks for circles: on a device their memory is wanted now, and
    a group keeps its connections.
    """
    before = placed(TENSORS, LAYERS, [[(2, ["n0/0"]), (1, ["n1/0"])]])
    after = placed(TENSORS, LAYERS, [[(1, ["n0/0"]), (2, ["n1/0"])]])
    holdings, states = live(before, ["n0/0", "n1/0"])
    plan = schedule(after.layout, after.node_by_worker, holdings, STEP, LINKS)
    office = PostOffice()
    members = {worker: office.member(worker) for worker in plan.parts}

    def one(worker: str) -> Restored:
        access = fleet.access(plan.parts[worker].node)
        return restore(
            RestoreTask(plan, worker, after.layout, states.get(worker)), members[worker], access
        )

    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(2) as pool:
            check(dict(zip(plan.parts, pool.map(one, plan.parts), strict=True)), after)
        given_away = weakref.ref(
            next(t for name, t in states["n0/0"].state.items() if "layers.1" in name)
        )
        groups = [weakref.ref(member) for member in members.values()]
        states.clear()
        members.clear()
        assert given_away() is None
        assert [group() for group in groups] == [None, None]
    finally:
        gc.enable()


def test_live_state_of_another_step_is_never_handed_on(fleet: Fleet) -> None:
    """n0/0 stands one step ahead; the older step comes from its node's snapshot and goes on to n2
    through it.
    """
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])], [(3, ["n0/1"])]])
    kept = fleet.keep(TWO, "memory", ["n1/0"])
    holdings, states = live(TWO, ["n0/0"], step=STEP + 1)
    plan = schedule(after.layout, after.node_by_worker, [*holdings, *kept], STEP, LINKS)
    assert any(part.messages for part in plan.parts.values()), "a node fetches once and hands on"
    check(run(plan, after, states, fleet), after)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["memory", "disk", "peer"])
def test_a_source_that_fails_is_replaced_by_the_next(fleet: Fleet, kind: str, fault: str) -> None:
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    holder = "n1/0" if kind == "peer" else "n0/0"
    kept = fleet.keep(TWO, "disk" if kind == "disk" else "memory", [holder])
    plan = schedule(after.layout, after.node_by_worker, [*kept, S3], STEP, LINKS)
    fleet.faults[kind] = FaultyTier(None, fault, at=5)  # type: ignore[arg-type]
    results = run(plan, after, {}, fleet)
    check(results, after)
    assert results["n0/0"].failures
    broken_off = fault in ("fail", "stall")
    assert len(fleet.read_from_s3) == (len(WHOLE) - 4 if broken_off else 1)
    assert moved(results)["s3"] > 0
    assert moved(results)[kind] + moved(results)["s3"] == after.layout.num_bytes


def test_a_message_damaged_on_the_way_is_replaced_from_a_snapshot(fleet: Fleet) -> None:
    after = placed(TENSORS, LAYERS, [[(3, ["n2/0"])]])
    holdings, states = live(TWO, ["n0/0"])
    kept = fleet.keep(TWO, "memory", ["n1/0"])
    plan = schedule(after.layout, after.node_by_worker, [*holdings, *kept], STEP, LINKS)
    office = PostOffice()
    office.flip.add(("n0/0", "n2/0"))
    results = run(plan, after, states, fleet, office)
    check(results, after)
    assert len(results["n2/0"].failures) == 1


def test_live_memory_that_differs_from_its_snapshot_is_not_believed(fleet: Fleet) -> None:
    """What rotted in a sender's memory has a checksum of its own that agrees; the snapshot's, in
    the schedule, does not.
    """
    after = placed(TENSORS, LAYERS, [[(3, ["n2/0"])]])
    holdings, states = live(TWO, ["n0/0"])
    kept = fleet.keep(TWO, "memory", ["n0/0"])
    name, tensor = next(iter(states["n0/0"].state.items()))
    tensor.view(-1)[0] *= -1
    plan = schedule(after.layout, after.node_by_worker, [*holdings, *kept], STEP, LINKS)
    assert any(part.messages for part in plan.parts.values())
    results = run(plan, after, states, fleet)
    check(results, after)
    assert {shard.tensor for _, shard in results["n2/0"].bad} == {name}


class Rotting(dict[ShardId, Tensor]):
    """What has arrived at a worker, whose memory flips a bit of `victim` right after it was
    checked.
    """

    def __init__(self, victim: ShardId) -> None:
        self.victim = victim

    def __setitem__(self, shard: ShardId, target: Tensor) -> None:
        if shard == self.victim:
            target[(0,) * target.dim()] *= -1
        super().__setitem__(shard, target)


@pytest.mark.parametrize("shared_by", ["a relay", "the first worker of a node"])
def test_what_rots_where_it_is_handed_on_is_not_believed(fleet: Fleet, shared_by: str) -> None:
    """Its checksum of its own agrees; that of the copy which it was read from, in the schedule,
    does not.
    """
    wanting = ["n1/0", "n2/0", "n3/0"] if shared_by == "a relay" else ["n1/0", "n1/1", "n1/2"]
    after = placed(TENSORS, LAYERS, [[(3, [worker])] for worker in wanting])
    kept = fleet.keep(TWO, "memory", ["n0/0"])
    holdings, states = live(TWO, ["n0/0"])
    plan = schedule(after.layout, after.node_by_worker, [*holdings, *kept], STEP, LINKS)
    handed_on = [
        m
        for part in plan.parts.values()
        for m in part.messages
        if m.source not in ("n0/0", part.worker)
    ]
    relay, victim = handed_on[0].source, handed_on[0].shards[0]
    office = PostOffice()

    def one(worker: str) -> Restored:
        access, progress = (
            fleet.access(plan.parts[worker].node),
            RestoreProgress(Rotting(victim)) if worker == relay else None,
        )
        member = office.member(worker)
        return restore(
            RestoreTask(plan, worker, after.layout, states.get(worker)),
            member,
            access,
            progress,
        )

    with ThreadPoolExecutor(len(plan.parts)) as pool:
        results = dict(zip(plan.parts, pool.map(one, plan.parts), strict=True))
    fed = [m.destination for m in handed_on if m.source == relay and victim in m.shards]
    for worker in set(wanting) - {relay}:
        check_one(results[worker], after, worker)
    assert all(
        (Source("worker", after.node_by_worker[relay], relay, STEP), victim) in results[w].bad
        for w in fed
    )


def test_what_a_relay_had_to_read_elsewhere_is_believed_with_that_copy_s_checksum(
    fleet: Fleet,
) -> None:
    """Replicas of different devices may differ in rounding, and so do their checksums."""
    after = placed(TENSORS, LAYERS, [[(3, ["n1/0"])], [(3, ["n1/1"])]])
    kept = fleet.keep(TWO, "memory", ["n0/0"])
    shard = min(WHOLE)
    other = replace(S3, checksums={shard: 1})
    plan = schedule(after.layout, after.node_by_worker, [*kept, other], STEP, LINKS)
    (fed,) = {
        m.destination for part in plan.parts.values() for m in part.messages if shard in m.shards
    }
    assert set(plan.checksums_of_message(fed, shard)) == {kept[0].checksums[shard], 1}


def test_damage_is_not_handed_on_and_the_next_schedule_avoids_it(fleet: Fleet) -> None:
    """A new node gets damaged what it should hand on to another.

    Both say what is bad; nobody takes it for good.
    """
    after = placed(
        TENSORS, LAYERS, [[(3, ["n0/0"])], [(3, ["n1/0"])], [(3, ["n2/0"])], [(3, ["n3/0"])]]
    )
    holdings, states = live(TWO, ["n0/0"])
    plan = schedule(after.layout, after.node_by_worker, holdings, STEP, LINKS)
    office = PostOffice()
    relay = next(
        m.source for part in plan.parts.values() for m in part.messages if m.source != "n0/0"
    )
    office.flip.add(("n0/0", relay))
    bad: list[tuple[Source, ShardId]] = []
    outcomes = run_all(plan, after, states, fleet, office)
    for worker, outcome in outcomes.items():
        if isinstance(outcome, RestoreError):
            assert pickle.loads(pickle.dumps(outcome)).bad == outcome.bad
            bad += outcome.bad
        else:
            check_one(outcome, after, worker)
    failed = {worker for worker, outcome in outcomes.items() if isinstance(outcome, RestoreError)}
    assert len(failed) > 1, "who was fed by it knows, too"
    assert {source.name for source, _ in bad} <= {"n0/0", *failed}
    assert len({shard for _, shard in bad}) == 1, "one byte was flipped"
    spare = fleet.keep(TWO, "disk", ["n1/0"])
    again = schedule(
        after.layout, after.node_by_worker, [*holdings, *spare], STEP, LINKS, EarlierRound(set(bad))
    )
    damaged = {shard for source, shard in bad if source.name == "n0/0"}
    assert all(holdings[0].source not in again.sources_of("n3/0", shard) for shard in damaged)
    check(run(again, after, states, fleet), after)


def run_all(
    plan: TransferSchedule,
    after: Placed,
    states: Mapping[str, LiveState],
    fleet: Fleet,
    office: PostOffice,
) -> dict[str, Restored | RestoreError]:
    def one(worker: str) -> Restored | RestoreError:
        try:
            access = fleet.access(plan.parts[worker].node)
            return restore(
                RestoreTask(plan, worker, after.layout, states.get(worker)),
                office.member(worker),
                access,
            )
        except RestoreError as error:
            return error

    with ThreadPoolExecutor(len(plan.parts)) as pool:
        return dict(zip(plan.parts, pool.map(one, plan.parts), strict=True))


def check_one(result: Restored, after: Placed, worker: str) -> None:
    check(
        {worker: result},
        Placed(
            Layout(TENSORS, {worker: after.layout.shards_by_worker[worker]}), after.node_by_worker
        ),
    )


def test_no_source_left_is_an_error_that_names_what_failed(fleet: Fleet) -> None:
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(TWO, "memory", ["n0/0"])
    plan = schedule(after.layout, after.node_by_worker, kept, STEP, LINKS)
    fleet.faults["memory"] = FaultyTier(None, "corrupt", at=5)  # type: ignore[arg-type]
    with pytest.raises(RestoreError, match=r"n0/0 cannot restore its state: .*flipped") as error:
        run(plan, after, {}, fleet)
    assert [source for source, _ in error.value.bad] == [kept[0].source]


def test_a_server_that_is_gone_and_one_that_is_unknown(fleet: Fleet) -> None:
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(TWO, "memory", ["n1/0"])
    plan = schedule(after.layout, after.node_by_worker, [*kept, S3], STEP, LINKS)
    fleet.servers["n1"].close()
    check(run(plan, after, {}, fleet), after)
    del fleet.servers["n1"]
    check(run(plan, after, {}, fleet), after)
    assert set(fleet.read_from_s3.values()) == {2}


@pytest.mark.parametrize("direct_bytes", [1, exchange.DIRECT_BYTES])
def test_small_messages_in_small_windows_do_not_deadlock(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, direct_bytes: int
) -> None:
    """Every worker sends to every other, with room for hardly one message in flight; shards packed,
    or each by itself.
    """
    monkeypatch.setattr(exchange, "DIRECT_BYTES", direct_bytes)
    monkeypatch.setattr(exchange, "IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr("recovery.transfer.messages.make_messages.__defaults__", (64,))
    before = placed(
        TENSORS, LAYERS, [[(1, ["n0/0", "n0/1"]), (1, ["n1/0", "n1/1"]), (1, ["n2/0"])]]
    )
    after = placed(
        TENSORS,
        LAYERS,
        [
            [(1, ["n1/0"]), (2, ["n2/0", "n2/1"])],
            [(3, ["n0/0"])],
            [(2, ["n3/0", "n0/1"]), (1, ["n1/1"])],
        ],
    )
    holdings, states = live(before, before.layout.workers)
    plan = schedule(after.layout, after.node_by_worker, holdings, STEP, LINKS)
    assert sum(len(part.messages) for part in plan.parts.values()) > 100
    check(run(plan, after, states, fleet), after)


@pytest.mark.parametrize("direct_bytes", [1, exchange.DIRECT_BYTES])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8"])
def test_other_types(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, dtype: str, direct_bytes: int
) -> None:
    monkeypatch.setattr(exchange, "DIRECT_BYTES", direct_bytes)
    tensors = tensors_of(1, dtype)
    before = placed(tensors, 1, [[(1, ["n0/0", "n0/1"])]])
    after = placed(tensors, 1, [[(1, ["n1/0"])]])
    holdings, states = live(before, ["n0/0"])
    kept = fleet.keep(before, "memory", ["n0/1"])
    plan = schedule(after.layout, after.node_by_worker, [*holdings, *kept], STEP, LINKS)
    check(run(plan, after, states, fleet), after)


def test_progress_reaches_the_total(fleet: Fleet) -> None:
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    plan = schedule(
        after.layout, after.node_by_worker, fleet.keep(TWO, "memory", ["n1/0"]), STEP, LINKS
    )
    seen: list[tuple[int, int]] = []
    member, access = PostOffice().member("n0/0"), fleet.access("n0")
    restore(
        RestoreTask(plan, "n0/0", after.layout, None),
        member,
        access,
        RestoreProgress(report=lambda done, total: seen.append((done, total))),
    )
    assert max(seen) == (after.layout.num_bytes, after.layout.num_bytes)
    assert len(seen) == len(WHOLE)


def test_what_came_before_a_peer_was_lost_does_not_come_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n1 leaves in the middle of its messages: the next schedule fetches the rest alone, and it is
    right.
    """
    monkeypatch.setattr("recovery.transfer.messages.make_messages.__defaults__", (64,))
    monkeypatch.setattr(exchange, "IN_FLIGHT_BYTES", 200)
    before = placed(TENSORS, LAYERS, [[(1, ["n0/0"]), (2, ["n1/0"])]])
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    holdings, states = live(before, ("n0/0", "n1/0"))
    plan = schedule(
        after.layout, before.node_by_worker | after.node_by_worker, holdings, STEP, LINKS
    )
    office, left = PostOffice(deadline_s=1), [4]
    arrived: dict[ShardId, Tensor] = {}

    class Leaving(Member):
        def send(self, tensor: Tensor, to: str, tag: int) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionError("n1 is gone")
            return super().send(tensor, to, tag)

    def part(worker: str) -> None:
        member = Leaving(office, worker) if worker == "n1/0" else Member(office, worker)
        progress = RestoreProgress(arrived) if worker == "n0/0" else None
        node = plan.parts[worker].node
        restore(
            RestoreTask(plan, worker, after.layout, states[worker]),
            member,
            fleet.access(node),
            progress,
        )

    with ThreadPoolExecutor(2) as pool:
        for ending in [pool.submit(part, worker) for worker in ("n0/0", "n1/0")]:
            assert ending.exception(20) is not None
    assert 0 < len(arrived) < len(before.layout.shards_by_worker["n1/0"])
    kept = [*holdings[:1], Holding(holdings[0].source, frozenset(arrived)), S3]
    again = schedule(after.layout, after.node_by_worker, kept, STEP, LINKS)
    state = states["n0/0"]
    results = run(again, after, {"n0/0": LiveState(state.layout, state.state, arrived)}, fleet)
    check(results, after)
    assert not set(fleet.read_from_s3) & set(arrived)
    assert set(fleet.read_from_s3) == before.layout.shards_by_worker["n1/0"] - set(arrived)


def test_what_arrived_of_a_step_is_used_without_the_live_state_of_another(fleet: Fleet) -> None:
    case = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    (newer,), states = live(case, ("n0/0",), STEP + 1)
    arrived = {s: unit(TENSORS[s.tensor], s, STEP) for s in sorted(WHOLE)[::2]}
    here = Holding(Source("worker", "n0", "n0/0", STEP, 2), frozenset(arrived))
    plan = schedule(case.layout, case.node_by_worker, [newer, here, S3], STEP, LINKS)
    known = LiveState(states["n0/0"].layout, {}, arrived)
    results = run(plan, case, {"n0/0": known}, fleet)
    check(results, case)
    assert set(fleet.read_from_s3) == WHOLE - set(arrived)


def test_a_shard_that_arrived_counts_before_the_one_in_place(fleet: Fleet) -> None:
    """It came because that one was not to be used."""
    case = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    holdings, states = live(case, ("n0/0",), STEP)
    plan = schedule(case.layout, case.node_by_worker, holdings, STEP, LINKS)
    shard = max(WHOLE, key=case.layout.shard_bytes)
    states["n0/0"].state[shard.tensor].zero_()
    arrived = {s: unit(TENSORS[s.tensor], s, STEP) for s in WHOLE if s.tensor == shard.tensor}
    results = run(
        plan, case, {"n0/0": LiveState(case.layout, states["n0/0"].state, arrived)}, fleet
    )
    check(results, case)
