"""Gradient all-reduces side by side: each as soon as its members are free, none beyond what links
carry.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.links.sync import Ring, SyncJob, side_by_side, simulate_sync
from planner.cost.links.traffic import Links
from planner.cost.parameters import CostParameters
from planner.inputs.fleet import Fleet, Node, NodeType

WORKERS = "abcdef"
shares = st.dictionaries(st.sampled_from(WORKERS), st.floats(0.05, 1.0), min_size=2)
drawn = st.lists(st.tuples(st.floats(0.1, 5.0), shares), min_size=1, max_size=14)
ready_at = st.lists(st.floats(0.0, 3.0), min_size=6, max_size=6)


def rings_of(entries: list) -> tuple[list[SyncJob], list[Ring]]:
    rings = [
        Ring(seconds, {w: share * seconds for w, share in own.items()}, {w: w for w in own})
        for seconds, own in entries
    ]
    return [SyncJob(tuple(ring.link_of), 1.0) for ring in rings], rings


@given(entries=drawn, ready=ready_at)
def test_each_starts_when_its_last_member_is_free_and_takes_no_less_than_alone(
    entries: list, ready: list
) -> None:
    (jobs, rings), begin = rings_of(entries), dict(zip(WORKERS, ready, strict=True))
    free = dict(begin)
    events = {id(event.job): event for event in side_by_side(jobs, rings, free, {})}
    assert len(events) == len(jobs)
    for job, ring in zip(jobs, rings, strict=True):
        event = events[id(job)]
        assert event.start_s == max(begin[worker] for worker in job.members)
        assert event.end_s >= event.start_s + ring.seconds
        assert set(event.spans) == set(job.members)
    for worker in WORKERS:
        mine = [event for event in events.values() if worker in event.spans]
        assert free[worker] == max([begin[worker], *(event.end_s for event in mine)])


@given(entries=drawn, ready=ready_at)
def test_a_link_carries_one_share_after_the_other(entries: list, ready: list) -> None:
    (jobs, rings), begin = rings_of(entries), dict(zip(WORKERS, ready, strict=True))
    own = {id(job): ring.link_s for job, ring in zip(jobs, rings, strict=True)}
    events = side_by_side(jobs, rings, dict(begin), {})
    for worker in WORKERS:
        mine = sorted((event.spans[worker], event) for event in events if worker in event.spans)
        assert all(end <= start for ((_, end), _), ((start, _), _) in itertools.pairwise(mine))
        for (start, end), event in mine:
            assert end - start == pytest.approx(own[id(event.job)][worker])
            assert start >= event.start_s
            assert event.end_s >= end


@given(entries=drawn, ready=ready_at)
def test_the_last_ends_with_the_fullest_link_or_the_slowest_all_reduce(
    entries: list, ready: list
) -> None:
    """The least that any sharing allows: a link has to carry, after any moment, all that starts
    from then on.
    """
    (jobs, rings), begin = rings_of(entries), dict(zip(WORKERS, ready, strict=True))
    starts = [max(begin[worker] for worker in ring.link_s) for ring in rings]
    least = max(start + ring.seconds for start, ring in zip(starts, rings, strict=True))
    for worker, moment in itertools.product(WORKERS, starts):
        later = [
            r.link_s.get(worker, 0.0)
            for r, start in zip(rings, starts, strict=True)
            if start >= moment
        ]
        least = max(least, moment + sum(later)) if any(later) else least
    assert max(
        event.end_s for event in side_by_side(jobs, rings, dict(begin), {})
    ) == pytest.approx(least)


def seconds_of(jobs: list[SyncJob], fleet: Fleet) -> float:
    parameters = CostParameters(
        efficiency_inter=1.0, all_reduce_efficiency=1.0, latency_inter_s=0.0
    )
    idle = {node.workers[0]: 0.0 for node in fleet.nodes}
    return simulate_sync(jobs, idle, idle, fleet, Links(parameters)).gradients_end_s


def nodes(**megabytes_per_s: float) -> Fleet:
    types = [
        NodeType(name, "T4", 1, 1, 1.0, speed * 1e6) for name, speed in megabytes_per_s.items()
    ]
    return Fleet(0, tuple(Node(each.name, each) for each in types))


def test_a_fast_link_serves_several_slow_ones_at_a_time() -> None:
    """Measured so over links of limited speed: scripts/benchmarks/results/gradient_sync.json."""
    jobs = [SyncJob(("fast/0", f"{slow}/0"), 10e6) for slow in ("a", "b", "c", "d")]
    assert seconds_of(jobs, nodes(fast=40.0, a=10.0, b=10.0, c=10.0, d=10.0)) == pytest.approx(1.0)
    assert seconds_of(jobs, nodes(fast=20.0, a=10.0, b=10.0, c=10.0, d=10.0)) == pytest.approx(2.0)
    assert seconds_of(jobs, nodes(fast=10.0, a=10.0, b=10.0, c=10.0, d=10.0)) == pytest.approx(4.0)


def test_three_that_meet_in_pairs_share_their_links() -> None:
    jobs = [SyncJob(pair, 10e6) for pair in itertools.combinations(("a/0", "b/0", "c/0"), 2)]
    assert seconds_of(jobs, nodes(a=10.0, b=10.0, c=10.0)) == pytest.approx(2.0)


def test_a_nic_is_shared_by_those_that_use_it_at_the_time() -> None:
    """Measured so: nodes of two and of four in scripts/benchmarks/results/gradient_sync.json."""
    fleet = Fleet(0, tuple(Node(n, NodeType("two", "T4", 2, 1, 1e9, 10e6)) for n in "ab"))
    jobs = [SyncJob((f"a/{i}", f"b/{i}"), 10e6) for i in range(2)]
    parameters = CostParameters(
        efficiency_inter=1.0, all_reduce_efficiency=1.0, latency_inter_s=0.0
    )
    for late, end in ((0.0, 2.0), (0.5, 2.0), (1.0, 2.0), (3.0, 4.0)):
        ready = {worker: late if worker.endswith("1") else 0.0 for worker in fleet.workers}
        step = simulate_sync(jobs, ready, dict.fromkeys(ready, 0.0), fleet, Links(parameters))
        assert step.gradients_end_s == pytest.approx(end)


def test_a_nic_that_still_carries_gradients_has_no_time_for_a_tied_embedding() -> None:
    fleet = Fleet(
        0, (*nodes(b=10.0, c=10.0).nodes, Node("a", NodeType("two", "T4", 2, 1, 1e9, 10e6)))
    )
    jobs = [SyncJob(("a/0", "b/0"), 10e6), SyncJob(("a/1", "c/0"), 10e6, tied=True)]
    parameters = CostParameters(
        efficiency_inter=1.0, all_reduce_efficiency=1.0, latency_inter_s=0.0
    )
    idle = dict.fromkeys(fleet.workers, 0.0)
    assert simulate_sync(jobs, idle, idle, fleet, Links(parameters)).tied_end_s == pytest.approx(
        2.0
    )
