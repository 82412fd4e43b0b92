"""Drafts of jobs that want every layer on two nodes, on fleets with single nodes of a type."""

import pytest

from planner.plans.redundancy import redundancy
from planner.search.autohet import draft
from planner.strategies import plan_with
from tests.planner.cases import fleet, model, request

SINGLES = [("A100", 1, 4), ("A10G", 1, 2), ("T4", 1, 1)]


@pytest.mark.parametrize("brief", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_one_node_of_each_type_has_a_plan_of_two_holders(brief: bool, count: int) -> None:
    """Each type alone has one node: only unlike pipelines beside each other can do it."""
    asked = request(fleet(*SINGLES[:count]), 16, min_node_disjoint_holders=2, brief=brief)
    answer = plan_with("autohet", asked)
    assert redundancy(answer.plan, asked.fleet, asked.spec.num_layers).weakest >= 2


def test_a_deep_pipeline_may_be_the_only_one_of_its_type() -> None:
    """Four small nodes hold one copy together, the large node holds the other."""
    of = fleet(("A100", 1, 1), ("T4", 4, 1), memory_gib={"A100": 24.0, "T4": 1.9})
    asked = request(of, 16, min_node_disjoint_holders=2, brief=True)
    answer = plan_with("autohet", asked)
    assert redundancy(answer.plan, of, asked.spec.num_layers).weakest >= 2


@pytest.mark.parametrize("counts", [(1, 1, 0), (1, 1, 1), (1, 2, 1)])
def test_a_node_more_is_no_reason_to_refuse(counts: tuple[int, ...]) -> None:
    """Whatever the least fleet of two nodes can train, all larger ones can train."""
    kinds = [(gpu, n, gpus) for n, (gpu, _, gpus) in zip(counts, SINGLES, strict=True) if n]
    asked = request(fleet(*kinds), 16, min_node_disjoint_holders=2, brief=True)
    answer = plan_with("autohet", asked)
    assert redundancy(answer.plan, asked.fleet, asked.spec.num_layers).weakest >= 2


@pytest.mark.parametrize("brief", [True, False])
def test_the_only_node_of_a_type_holds_other_layers_in_each_pipeline(brief: bool) -> None:
    """Equal pipelines would have it hold the same ones alone, so that it was left idle."""
    of = fleet(("A100", 2, 8), ("A10G", 1, 4))
    asked = request(of, 64, spec=model(24), min_node_disjoint_holders=2, brief=brief)
    best = draft(asked).ranked[0].plan
    assert set(best.workers) == set(of.workers)
    assert redundancy(best, of, asked.spec.num_layers).weakest >= 2
