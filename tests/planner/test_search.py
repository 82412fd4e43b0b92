"""Fleets beyond what is compared exhaustively."""

import random
from dataclasses import replace

import pytest

from planner.inputs.fleet import Fleet, Node
from planner.plans.plan_checks import check_plan
from planner.search.problem import limits
from planner.strategies import plan_with
from scripts.benchmarks.planner.exhaustive import small_case
from tests.planner.cases import fleet, model, request

pytestmark = pytest.mark.thorough

MIXED = (("A100", 17, 4), ("T4", 17, 4))
SMALL = {"A100": 4.0, "A10G": 3.0, "T4": 2.0}


def step_s(asked, strategy="autohet"):
    return plan_with(strategy, asked).prediction.step_time_s


@pytest.mark.parametrize("batch", [68, 136])
def test_neither_a_narrower_search_nor_another_finds_anything_faster(batch):
    """With few microbatches a pipeline and slow links, gradient sync and fill decide."""
    asked = request(fleet(*MIXED, memory_gib=SMALL), batch, model(24, 1024))
    free = step_s(asked)
    for wish in ({"max_tp_degree": 2}, {"max_stages": 6}):
        assert free <= step_s(replace(asked, **wish)) * limits.PLAIN, wish
    for strategy in ("megatron", "fasop"):
        assert free <= step_s(asked, strategy) * limits.PLAIN, strategy


def test_no_pipeline_is_deeper_than_asked_in_a_fleet_of_hundreds():
    asked = request(
        fleet(("A100", 40, 4), ("T4", 37, 4), memory_gib=SMALL), 308, model(24, 1024), max_stages=4
    )
    plan = plan_with("autohet", asked).plan
    check_plan(plan, 24)
    assert max(len(pipeline.stages) for pipeline in plan.pipelines) <= 4


def test_nodes_that_no_equal_parts_use_make_nothing_slower():
    """23 and 11 nodes are no multiple of what 22 and 10 are two parts of."""
    spec = model(12, 1024)
    whole, parts = (
        request(fleet(("A100", a, 8), ("T4", t, 8)), 544, spec) for a, t in ((23, 11), (22, 10))
    )
    assert step_s(whole) <= step_s(parts) * limits.PLAIN


def test_nodes_with_a_slow_network_are_left_out_where_they_slow_everyone():
    """A ring is as slow as its slowest link: with all three types every sum would cross a T4's, an
    eighth as fast.
    """

    def linked(node):
        kind = node.node_type
        slow = replace(kind, inter_node_bytes_per_s=kind.inter_node_bytes_per_s / 8)
        return Node(node.name, slow if kind.gpu_type == "T4" else kind)

    all_types = fleet(("A100", 6, 8), ("A10G", 6, 8), ("T4", 6, 8), memory_gib=SMALL)
    every = Fleet(0, tuple(linked(node) for node in all_types.nodes))
    without = Fleet(0, every.nodes[:12])
    whole, part = (request(nodes, 288, model(32, 1024)) for nodes in (every, without))
    found = plan_with("autohet", whole)
    assert found.prediction.step_time_s <= step_s(part) * limits.MIN_SPEEDUP, (
        "walks of other draws end within that of each other"
    )
    assert sum(len(idle.workers) for idle in found.idle) == 48


def test_the_last_pipeline_may_have_less_than_one_microbatch_of_the_others() -> None:
    """Three sequences on two GPUs, where launches cost: two at once on one, the third on the
    other.
    """
    asked = small_case(random.Random(1000))
    best = plan_with("exhaustive", asked).prediction.step_time_s
    assert plan_with("autohet", asked).prediction.step_time_s <= best * limits.PLAIN
