"""Equal pipelines side by side, and groups of other sizes on the same GPUs."""

from collections import Counter

import pytest

from planner.strategies.alike import alike_plans, beside
from planner.strategies.balance import Balancer
from planner.strategies.cost_tables import tables_of
from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.placement import place_by_stage
from planner.strategies.refine import draft_fits
from planner.strategies.regroup import regrouped
from tests.planner.cases import fleet, model, request

TYPES = (("A100", 4, 8), ("T4", 6, 8))


def cut(tables, rows):
    cuts = Balancer(tables, len(rows)).cut_each([rows])
    return Shape(rows, tuple(cuts.ends[0].tolist()))


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_tables_time_pipelines_side_by_side_as_the_simulation_of_their_placement_does(number, degree):
    asked = request(fleet(*TYPES), 16 * number, model(48, 512))
    tables = tables_of(asked)
    fast, slow = (tables.row_of[kind, degree, 1] for kind in ("a100", "t4"))
    estimator = Estimator(beside(asked, tables, number))
    shape = cut(estimator.tables, (fast,) * (32 // number // degree) + (slow,) * (48 // number // degree))
    draft = Draft(((shape, 16),) * number)
    plan = place_by_stage(tables, draft, "tiny", 16 * number, 128)
    placed = asked.cost.predict(plan).breakdown_s["pipeline"]
    assert estimator.pipeline_s(shape, 16) == pytest.approx(placed, rel=2e-3)


def test_its_plans_meet_the_batch_and_use_equal_pipelines():
    asked = request(fleet(*TYPES), 96, model(24, 512))
    tables = tables_of(asked)
    plans = alike_plans(asked, tables)
    assert plans
    for plan in plans:
        assert sum(pipeline.num_sequences for pipeline in plan.pipelines) == 96
        assert len({tuple(stage.num_layers for stage in pipeline.stages) for pipeline in plan.pipelines}) == 1


def test_other_groups_on_the_same_gpus_divide_blocks_better():
    """Ten blocks on four pairs of GPUs: two pairs hold three; merged into one group of four they hold six together."""
    asked = request(fleet(("A100", 1, 8)), 32, model(10, 512))
    tables = tables_of(asked)
    estimator, pair = Estimator(tables), tables.row_of["a100", 2, 1]
    draft = assign_microbatches(estimator, [cut(tables, (pair,) * 4)], 32)
    better = regrouped(estimator, draft, 32, 8)
    assert better is not None
    assert draft_fits(estimator, better)
    assert estimator.draft_s(better) < estimator.draft_s(draft)
    gpus = Counter(tables.kinds[tables.rows[row].kind].tp_degree for row in better.pipelines[0][0].rows)
    assert sum(degree * count for degree, count in gpus.items()) == 8
    assert len(gpus) > 1


def test_no_group_changes_on_nodes_of_one_gpu():
    asked = request(fleet(("A100", 4, 1)), 64, model(8, 512))
    tables = tables_of(asked)
    single = tables.row_of["a100", 1, 1]
    draft = assign_microbatches(Estimator(tables), [cut(tables, (single,) * 4)], 64)
    assert regrouped(Estimator(tables), draft, 64, 4) is None
