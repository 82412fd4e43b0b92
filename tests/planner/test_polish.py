"""Small changes to whole plans: each leaves a whole plan, and they reach what no search of whole pipelines offers."""

import random

import pytest

from autohet.cli.bench_planner_search import small_case
from planner.plan import Pipeline, Plan, Stage, check_plan
from planner.strategies import plan_with
from planner.strategies.polish import neighbours
from tests.planner.cases import fleet, model, request


def test_idle_workers_join_a_pipeline_before_and_after_a_stage() -> None:
    asked = request(fleet(("A100", 1, 2), ("T4", 1, 1)), 4, model(3))
    plan = Plan("tiny", 4, 1, 128, (Pipeline((Stage(0, 3, ("a100-0/1",)),), 4, 1),))
    changed = list(neighbours(plan, asked, [1]))
    for one in changed:
        check_plan(one, 3)
    assert {tuple((s.workers[0], s.num_layers) for s in one.pipelines[0].stages) for one in changed} == {
        (("a100-0/0", 1), ("a100-0/1", 2)), (("a100-0/1", 2), ("a100-0/0", 1)),
        (("t4-0/0", 1), ("a100-0/1", 2)), (("a100-0/1", 2), ("t4-0/0", 1)),
    }  # fmt: skip


@pytest.mark.parametrize("seed", [0, 192])
def test_an_odd_batch_over_two_nodes_is_divided_as_well_as_by_every_plan(seed: int) -> None:
    asked = small_case(random.Random(seed))
    best = plan_with("exhaustive", asked).prediction.step_time_s
    assert plan_with("autohet", asked).prediction.step_time_s <= best * (1 + 1e-9)
