"""Stages exchanged between nodes: the same plan on the same GPUs, with sums that end sooner."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan import Pipeline, Plan, Stage, check_plan
from planner.search.problem import Request
from planner.strategies.housing import housed
from tests.planner.cases import fleet, model, request, with_nics

BLOCKS = 12
NODES, GPUS = 4, 4


def asked_for() -> Request:
    return request(with_nics(fleet(("A100", NODES, GPUS)), {"A100": 2e9}), 64, model(BLOCKS, 1024))


def plan_of(cuts: list[list[tuple[int, int]]]) -> Plan:
    """Pipelines of (blocks, TP degree) stages, on one GPU after the other, where groups fit into their nodes."""
    pipelines, free, node = [], GPUS, 0
    for stages in cuts:
        mine, start = [], 0
        for blocks, degree in stages:
            if free < degree:
                node, free = node + 1, GPUS
            first = GPUS - free
            mine.append(Stage(start, blocks, tuple(f"a100-{node}/{first + i}" for i in range(degree))))
            start, free = start + blocks, free - degree
        pipelines.append(Pipeline(tuple(mine), 64 // len(cuts), 1))
    return Plan("tiny", 64 // len(cuts) * len(cuts), 1, 128, tuple(pipelines))


def test_early_stages_that_share_a_node_are_spread() -> None:
    """Both pipelines begin with four stages on a node of their own, whose NICs sum them all at the end."""
    asked, plan = asked_for(), plan_of([[(2, 1)] * 4 + [(1, 1)] * 4, [(2, 1)] * 2 + [(1, 1)] * 4 + [(2, 1)] * 2])
    before, after = (asked.cost.predict(each) for each in (plan, housed(plan, asked.cost, asked.fleet)))
    assert after.breakdown_s["grad_sync"] < 0.9 * before.breakdown_s["grad_sync"]
    assert after.breakdown_s["pipeline"] == pytest.approx(before.breakdown_s["pipeline"], rel=0.05)


stages = st.lists(st.tuples(st.integers(1, 4), st.sampled_from((1, 1, 2))), min_size=2, max_size=5)


@settings(max_examples=40, deadline=None)
@given(several=st.lists(stages, min_size=2, max_size=3))
def test_it_is_the_same_plan_on_the_same_gpus(several: list[list[tuple[int, int]]]) -> None:
    asked = asked_for()
    for each in several:
        rest = BLOCKS - sum(blocks for blocks, _ in each[:-1])
        if rest < 1:
            return
        each[-1] = rest, each[-1][1]
    plan = plan_of(several)
    if not set(plan.workers) <= set(asked.fleet.workers):
        return
    moved = housed(plan, asked.cost, asked.fleet)
    check_plan(moved, BLOCKS)
    assert [[(s.first_layer, s.num_layers, s.tp_degree) for s in p.stages] for p in moved.pipelines] == [
        [(s.first_layer, s.num_layers, s.tp_degree) for s in p.stages] for p in plan.pipelines
    ]
    assert all(len({worker.split("/")[0] for worker in s.workers}) == 1 for p in moved.pipelines for s in p.stages)
    on = [Counter(worker.split("/")[0] for worker in each.workers) for each in (plan, moved)]
    assert on[0] == on[1]
    before, after = (asked.cost.predict(each).breakdown_s["grad_sync"] for each in (plan, moved))
    starts = [max(asked.cost.pipelines_s(each)) for each in (plan, moved)]
    assert starts[1] + after <= (starts[0] + before) * 1.05
