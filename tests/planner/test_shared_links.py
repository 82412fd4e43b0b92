"""NICs that several transfers or all-reduces share: each as fast as what it gets of the sender's
and of the receiver's.
"""

from dataclasses import replace

import pytest

from planner.cost.links.sync import SyncJob, simulate_sync
from planner.inputs.fleet import Fleet, NodeType
from planner.plans.plan import Pipeline, Plan, Stage
from planner.strategies import Request
from tests.planner.cases import fleet, model, request, with_nics

LARGE, SMALL = "A100", "T4"


def _asked(large_nic: float, small_nic: float) -> Request:
    """One node of four GPUs and four of one."""
    of = with_nics(fleet((LARGE, 1, 4), (SMALL, 4, 1)), {LARGE: large_nic, SMALL: small_nic})
    return request(of, 8, model(2))


def _plan() -> Plan:
    """Four pipelines from the large node to a small one each."""
    each = (
        Pipeline((Stage(0, 1, (f"a100-0/{i}",)), Stage(1, 1, (f"t4-{i}/0",))), 2, 1)
        for i in range(4)
    )
    return Plan("tiny", 8, 1, 128, tuple(each))


def _transfers_s(large_nic: float, small_nic: float) -> tuple[float, float]:
    asked, plan = _asked(large_nic, small_nic), _plan()
    times = [asked.cost.steps.pipeline_times(plan, pipeline) for pipeline in plan.pipelines]
    assert len(set(times)) == 1
    return times[0].send_forward_s[0], times[0].send_backward_s[0]


SHARES = [(4e9, 1.0), (2e9, 2.0), (1e9, 4.0)]
"""The large node's NIC, and how many times as long four at a time take as one between two small
nodes.
"""


@pytest.mark.parametrize(("large_nic", "times"), SHARES)
def test_small_nodes_share_what_a_large_one_sends_and_takes_in(
    large_nic: float, times: float
) -> None:
    asked = _asked(large_nic, 1e9)
    small, num_bytes = _small(asked), asked.cost.stage_formats.inside_bytes(1, asked.cost.precision)
    latency_s = asked.cost.links.latency(False)
    alone_s = asked.cost.links.message_s(small, small, False, num_bytes) - latency_s
    assert _transfers_s(large_nic, 1e9) == pytest.approx((times * alone_s + latency_s,) * 2)


@pytest.mark.parametrize(("large_nic", "times"), SHARES)
def test_rings_between_a_large_node_and_small_ones_go_at_the_lesser_share(
    large_nic: float, times: float
) -> None:
    asked = _asked(large_nic, 1e9)
    jobs = [SyncJob((f"a100-0/{i}", f"t4-{i}/0"), 1e9) for i in range(4)]
    ready = {worker: 0.0 for job in jobs for worker in job.members}
    links = asked.cost.links
    members = [("a", _small(asked)), ("b", _small(asked))]
    alone_s = links.all_reduce_s(members, 1e9)
    found_s = simulate_sync(jobs, ready, ready, asked.fleet, links).gradients_end_s
    assert found_s == pytest.approx(times * alone_s, rel=1e-3)


def _small(asked: Request) -> NodeType:
    return asked.fleet.node_of("t4-0/0").node_type


def _meeting(apart: bool) -> Plan:
    """Two pipelines; the first one's boundary 0 and the second one's boundary 1 leave node a100-0,
    or a node of each.
    """
    first = Pipeline((Stage(0, 4, ("a100-0/0",)), Stage(4, 4, ("t4-0/0",))), 4, 1)
    middle = "a100-1/1" if apart else "a100-0/1"
    second = Pipeline(
        (Stage(0, 2, ("t4-1/0",)), Stage(2, 3, (middle,)), Stage(5, 3, ("t4-2/0",))), 4, 1
    )
    return Plan("tiny", 8, 1, 128, (first, second))


@pytest.mark.parametrize("nic", [1e6, 1e7, 1e8])
def test_transfers_at_unlike_boundaries_share_a_card_while_they_use_it(nic: float) -> None:
    """Faster cards are used for less of the time, so less is shared; at worst all share evenly."""
    asked = request(
        with_nics(fleet((LARGE, 2, 2), (SMALL, 3, 1)), {LARGE: nic, SMALL: 100 * nic}), 8
    )
    sent_s = []
    for plan in (_meeting(True), _meeting(False)):
        sent_s.append(asked.cost.steps.pipeline_times(plan, plan.pipelines[0]).send_forward_s[0])
    latency_s, num_bytes = (
        asked.cost.links.latency(False),
        asked.cost.stage_formats.inside_bytes(1, asked.cost.precision),
    )
    longer = (sent_s[1] - latency_s) / (sent_s[0] - latency_s)
    alone_s = num_bytes / (nic * asked.cost.parameters.efficiency_inter)
    others = 2 * min(1.0, alone_s / asked.cost.stages.work_s(_meeting(False).pipelines[1]))
    assert longer > 1.01
    assert longer == pytest.approx(min(3.0, 1 / max(1e-9, 1 - others)), abs=2 / 64)


def test_what_one_stage_sends_follows_one_another() -> None:
    """A pipeline of one GPU a node: the middle stage sends hidden states on and gradients back,
    neither slower for the other.
    """
    asked = request(with_nics(fleet((LARGE, 3, 1)), {LARGE: 1e7}), 8)
    stages = tuple(Stage(3 * i, 3 if i < 2 else 2, (f"a100-{i}/0",)) for i in range(3))
    plan = Plan("tiny", 8, 1, 128, (Pipeline(stages, 8, 1),))
    kind = asked.fleet.nodes[0].node_type
    alone_s = asked.cost.boundaries.between_s(kind, kind, 1)
    times = asked.cost.steps.pipeline_times(plan, plan.pipelines[0])
    assert times.send_forward_s + times.send_backward_s == pytest.approx((alone_s,) * 4)


def test_a_ring_waits_for_as_many_latencies_as_it_has_hops() -> None:
    """2 (p - 1) of them, whatever is sent (Patarasu and Yuan 2009)."""
    links = request(fleet((LARGE, 9, 1)), 8).cost.links
    kind = fleet((LARGE, 9, 1)).nodes[0].node_type
    members = [(str(i), kind) for i in range(9)]
    assert links.all_reduce_s(members, 1e-3) == pytest.approx(16 * links.latency(False), rel=1e-3)
    assert links.all_reduce_s(members[:2], 1e-3) == pytest.approx(
        2 * links.latency(False), rel=1e-3
    )


def test_prices_and_unknown_zones_change_no_ring() -> None:
    """Live nodes of one type stand at several prices; in some the metadata service says no zone."""
    plain = fleet((SMALL, 4, 1))
    zones = zip(plain.nodes, ("", "a", "", "a"), strict=True)
    live = Fleet(
        0,
        tuple(
            replace(n, node_type=replace(n.node_type, zone=zone, usd_per_hour=0.3 + len(zone)))
            for n, zone in zones
        ),
    )
    jobs = [SyncJob((f"t4-{i}/0", f"t4-{j}/0"), 1e9) for i, j in ((0, 1), (2, 3), (0, 2), (1, 3))]
    ready = {worker: 0.0 for worker in plain.workers}
    links = request(live, 8, model(2)).cost.links
    assert simulate_sync(jobs, ready, ready, live, links) == simulate_sync(
        jobs, ready, ready, plain, links
    )
