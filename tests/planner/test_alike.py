"""Equal pipelines side by side, and groups of other sizes on the same GPUs."""

from collections import Counter
from dataclasses import replace

import pytest

from planner.redundancy import redundancy
from planner.search.cost_tables import tables_of
from planner.search.cut import Balancer
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches
from planner.search.place import place_by_stage
from planner.strategies.alike import alike_plans
from planner.strategies.autohet import choose
from planner.strategies.disjoint import disjoint_plans
from planner.strategies.refine import draft_fits
from planner.strategies.regroup import regrouped
from planner.strategies.side_by_side import SideBySide, beside
from tests.planner.cases import fleet, model, request

TYPES = (("A100", 4, 8), ("T4", 6, 8))


def _row(tables, kind, degree):
    """Of a node type by its name, one sequence a microbatch."""
    return next(row for (of, d, size), row in tables.row_of.items() if (of.name, d, size) == (kind, degree, 1))


def cut(tables, rows):
    cuts = Balancer(tables, len(rows)).cut_each([rows])
    return Shape(rows, tuple(cuts.ends[0].tolist()))


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_tables_time_pipelines_side_by_side_as_the_simulation_of_their_placement_does(number, degree):
    asked = request(fleet(*TYPES), 16 * number, model(48, 512))
    tables = tables_of(asked)
    fast, slow = (_row(tables, kind, degree) for kind in ("a100", "t4"))
    estimator = Estimator(beside(asked, tables, number))
    shape = cut(estimator.tables, (fast,) * (32 // number // degree) + (slow,) * (48 // number // degree))
    draft = Draft(((shape, 16),) * number)
    plan = place_by_stage(tables, draft, 1, "tiny", 16 * number, 128)
    placed = asked.cost.predict(asked.cost.working_ahead(plan)).breakdown_s["pipeline"]
    assert estimator.pipeline_s(shape, 16) == pytest.approx(placed, rel=5e-3)


def test_its_plans_meet_the_batch_and_use_equal_pipelines():
    asked = request(fleet(*TYPES), 96, model(24, 512))
    tables = tables_of(asked)
    plans = alike_plans(asked, tables)
    assert plans
    for plan in plans:
        assert sum(pipeline.num_sequences for pipeline in plan.pipelines) == 96
        assert len({tuple(stage.num_layers for stage in pipeline.stages) for pipeline in plan.pipelines}) == 1


def in_parts(number, parts):
    """(request, tables, estimator, shape, plan) of so many pipelines of 20 stages in parts."""
    asked = request(fleet(("A100", 8, 8), ("T4", 12, 8)), 16 * number, model(48, 512))
    tables = tables_of(asked)
    estimator = Estimator(beside(asked, tables, -(-number // parts)))
    shape = cut(estimator.tables, (_row(tables, "a100", 1),) * 8 + (_row(tables, "t4", 1),) * 12)
    plan = place_by_stage(tables, Draft(((shape, 16),) * number), parts, "tiny", 16 * number, 128)
    return asked, tables, estimator, shape, plan


@pytest.mark.parametrize(("number", "parts"), [(4, 2), (8, 2), (6, 3), (5, 2), (8, 4)])
def test_each_layer_of_pipelines_in_parts_lies_on_as_many_nodes(number, parts):
    asked, _, _, _, plan = in_parts(number, parts)
    assert redundancy(plan, asked.fleet, 48).weakest >= parts


@pytest.mark.parametrize(("number", "parts"), [(4, 2), (8, 2), (6, 3), (8, 4)])
def test_pipelines_in_parts_take_what_the_tables_say(number, parts):
    """Neighbours of a part share their nodes, so that fewer transfers meet on a NIC."""
    asked, tables, estimator, shape, plan = in_parts(number, parts)
    prediction = asked.cost.predict(plan)
    assert estimator.pipeline_s(shape, 16) == pytest.approx(prediction.breakdown_s["pipeline"], rel=2e-3)
    timed = estimator.pipeline_s(shape, 16) + SideBySide(asked, tables, parts).after_one_s(estimator, number, shape)
    assert timed == pytest.approx(prediction.step_time_s, rel=0.05)


@pytest.mark.parametrize("holders", [1, 2, 3])
def test_most_of_its_plans_keep_the_holders_asked_for(holders):
    """Divided into as many parts as nodes are asked for, no search has to hope for them."""
    asked = replace(request(fleet(("A100", 6, 8), ("T4", 6, 8)), 96, model(24, 512)), min_node_disjoint_holders=holders)
    plans = alike_plans(asked, tables_of(asked))
    weakest = [redundancy(plan, asked.fleet, 24).weakest for plan in plans]
    assert sum(held >= holders for held in weakest) >= len(plans) / 2


def test_what_is_faster_on_any_nodes_does_not_hide_what_keeps_two_holders():
    """A step time that only a plan with one holder reaches is no reason to look at nothing slower."""
    asked = request(fleet(("A100", 3, 8), ("T4", 3, 8)), 96, model(24, 512))
    tables = tables_of(asked)
    assert not alike_plans(asked, tables, 1e-6)
    assert alike_plans(replace(asked, min_node_disjoint_holders=2), tables, 1e-6)


def test_two_holders_need_no_pipelines_with_nodes_of_their_own():
    """Where a node holds one stage of several pipelines, two copies of each layer cost less than with a node for few stages."""
    asked = request(fleet(("A100", 4, 4), ("T4", 4, 4)), 512, model(24, 512))
    asked = replace(asked, min_node_disjoint_holders=2)
    tables = tables_of(asked)
    alike, _ = choose(asked, alike_plans(asked, tables))
    apart, _ = choose(asked, disjoint_plans(asked, tables, Estimator(tables)))
    assert alike.prediction.step_time_s < 0.9 * apart.prediction.step_time_s


def test_other_groups_on_the_same_gpus_divide_blocks_better():
    """Ten blocks on four pairs of GPUs: two pairs hold three; merged into one group of four they hold six together."""
    asked = request(fleet(("A100", 1, 8)), 32, model(10, 512))
    tables = tables_of(asked)
    estimator, pair = Estimator(tables), _row(tables, "a100", 2)
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
    single = _row(tables, "a100", 1)
    draft = assign_microbatches(Estimator(tables), [cut(tables, (single,) * 4)], 64)
    assert regrouped(Estimator(tables), draft, 64, 4) is None
