"""Random changes leave whole plans, and walks by them end where every plan was looked at, the same in every process."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.bench.planner.searches import small_case
from planner.plan import Pipeline, Plan, Stage, check_plan
from planner.search.cost_tables import tables_of
from planner.strategies import Request, plan_with
from planner.strategies.anneal import Annealer
from planner.strategies.changes import Changes
from planner.strategies.symmetric import draft_of
from tests.planner.cases import fleet, model, request, slowed, with_nics

pytestmark = pytest.mark.thorough


def _seconds(asked: Request, plan: Plan) -> float:
    prediction = asked.cost.predict(plan)
    return prediction.step_time_s if prediction.fits else math.inf


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.sampled_from([4, 7, 12]))
def test_each_change_of_a_walk_leaves_a_whole_plan(seed: int, batch: int) -> None:
    asked = request(fleet(("A100", 1, 4), ("T4", 2, 2)), batch, model(6))
    changes = Changes(asked, tables_of(asked), random.Random(seed))
    first = Pipeline((Stage(0, 4, ("a100-0/0", "a100-0/1")), Stage(4, 2, ("t4-0/0",))), batch - 2, 1)
    other = Pipeline((Stage(0, 3, ("a100-0/2",)), Stage(3, 3, ("t4-1/0",))), 2, 1)
    plan = Plan("tiny", batch, 1, 128, (first, other))
    seen = set()
    for _ in range(60):
        drawn = changes.draw(plan)
        if drawn is not None:
            check_plan(drawn, 6)
            assert set(drawn.workers) <= set(asked.fleet.workers)
            seen.add(drawn)
            plan = drawn
    assert len(seen) > 3


def test_idle_workers_join_and_workers_become_idle() -> None:
    asked = request(fleet(("A100", 1, 2), ("T4", 1, 1)), 4, model(3))
    changes = Changes(asked, tables_of(asked), random.Random(1))
    plan = Plan("tiny", 4, 1, 128, (Pipeline((Stage(0, 2, ("a100-0/0",)), Stage(2, 1, ("a100-0/1",))), 4, 1),))
    drawn = [changes.draw(plan) for _ in range(400)]
    sizes = {len(one.workers) for one in drawn if one is not None}
    assert sizes == {1, 2, 3}


def test_a_given_plan_with_a_group_that_was_never_measured_stays_or_loses_it() -> None:
    asked = request(fleet(("A100", 1, 4)), 4, model(3))
    plan = Plan("tiny", 4, 1, 128, (Pipeline((Stage(0, 3, ("a100-0/0", "a100-0/1", "a100-0/2")),), 4, 1),))
    changes = Changes(asked, tables_of(asked), random.Random(1))
    for drawn in filter(None, (changes.draw(plan) for _ in range(100))):
        assert all(stage.tp_degree != 3 for pipeline in drawn.pipelines for stage in pipeline.stages)


def test_a_walk_never_ends_slower_and_is_the_same_again() -> None:
    asked = small_case(random.Random(3))
    plan = plan_with("varuna", asked).plan
    ends = [
        Annealer(asked, tables_of(asked), lambda p: _seconds(asked, p)).walk(plan, 80, lambda: False) for _ in range(2)
    ]
    assert ends[0] == ends[1]
    assert _seconds(asked, ends[0]) <= _seconds(asked, plan)


def test_a_walk_in_a_hurry_goes_nowhere() -> None:
    asked = small_case(random.Random(3))
    plan = plan_with("varuna", asked).plan
    annealer = Annealer(asked, tables_of(asked), lambda p: _seconds(asked, p))
    assert annealer.walk(plan, 80, lambda: True) == plan


@pytest.mark.parametrize("seed", [0, 47, 192, 193])
def test_an_odd_batch_over_two_nodes_is_divided_as_well_as_by_every_plan(seed: int) -> None:
    asked = small_case(random.Random(seed))
    best = plan_with("exhaustive", asked).prediction.step_time_s
    assert plan_with("autohet", asked).prediction.step_time_s <= best * (1 + 1e-9)


_ONE_FAST = (("A100", 1, 1), ("A10G", 1, 1), ("T4", 1, 1))
_TWO_SLOW = (("T4", 2, 1), ("A10G", 1, 1), ("A100", 1, 1))


@pytest.mark.parametrize("width", [256, 512, 1024])
@pytest.mark.parametrize(
    ("types", "nics", "batch"),
    [
        (_ONE_FAST, {"A100": 5.5e7, "A10G": 9.5e8, "T4": 1.3e8}, 8),
        (_TWO_SLOW, {"T4": 6e7, "A10G": 1e9, "A100": 3e7}, 6),
    ],
)
def test_a_fast_link_serves_several_slow_ones(types: tuple, nics: dict[str, float], batch: int, width: int) -> None:
    """The best plans let one fast link hold what slow ones share, cut against the GPUs' speed; estimates rank them low."""
    of, spec = with_nics(fleet(*types), nics), model(4, width, 8000)
    asked = request(of, batch, spec, max_microbatch_sequences=2, min_node_disjoint_holders=2)
    best = plan_with("exhaustive", asked).prediction.step_time_s
    assert plan_with("autohet", asked).prediction.step_time_s <= best * (1 + 1e-9)


@pytest.mark.parametrize("slowdown", [1.5, 2.5])
@pytest.mark.parametrize(("types", "slow"), [((("A100", 3, 1),), "a100-1"), ((("A100", 2, 1), ("T4", 2, 1)), "a100-0")])
def test_a_node_slower_than_others_of_its_type_is_planned_as_well_as_by_every_plan(
    types: tuple, slow: str, slowdown: float
) -> None:
    asked = request(slowed(fleet(*types), slow, slowdown), 8, model(5), max_microbatch_sequences=2)
    best = plan_with("exhaustive", asked).prediction.step_time_s
    assert plan_with("autohet", asked).prediction.step_time_s <= best * (1 + 1e-9)


def test_a_plan_reads_back_into_the_row_of_each_nodes_own_speed() -> None:
    asked = request(slowed(fleet(("A100", 2, 1)), "a100-0", 2.0), 4, model(4))
    tables = tables_of(asked)
    stages = (Stage(0, 2, ("a100-0/0",)), Stage(2, 2, ("a100-1/0",)))
    draft = draft_of(tables, Plan("tiny", 4, 1, 128, (Pipeline(stages, 4, 1),)), asked.fleet)
    assert draft is not None
    slow, fast = (float(tables.time_sums[row, -1]) for row in draft.pipelines[0][0].rows)
    assert slow == pytest.approx(2 * fast)
