"""Replanning: what leaves is replaced, what stays is kept, and a move that does not pay is not
made.
"""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.answers.repair import recut, repair
from planner.answers.replan import MigrationCost, holders_of, migration_s, replan
from planner.inputs.fleet import Fleet
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan
from planner.plans.redundancy import redundancy
from planner.search.problem.cost_tables import tables_of
from planner.search.walk.moves import Moves
from planner.strategies import Request, plan_with
from tests.planner.cases import DEMO, fleet, request


def moves_of(asked: Request) -> Moves:
    return Moves(tables_of(asked), random.Random(0))


def without(of: Fleet, *names: str) -> Fleet:
    return Fleet(of.generation + 1, tuple(node for node in of.nodes if node.name not in names))


@pytest.mark.thorough
def test_a_lost_node_is_left_out_and_the_batch_is_still_met() -> None:
    whole = fleet(*DEMO)
    previous = plan_with("autohet", request(whole, 24)).plan
    decision = replan(previous, request(without(whole, "a10g-1"), 24))
    assert decision.kind == "move"
    assert "gone" in decision.reason
    check_plan(decision.answer.plan, 8)
    assert not any(worker.startswith("a10g-1/") for worker in decision.answer.plan.workers)


@pytest.mark.thorough
def test_an_arrival_is_taken_when_the_horizon_pays_for_it_and_not_otherwise() -> None:
    whole = fleet(*DEMO)
    asked = request(whole, 24)
    small = request(without(whole, "a100-0", "a100-1"), 24)
    present = plan_with("autohet", small).plan
    later = replan(present, asked, migration=MigrationCost(horizon_s=3600))
    soon = replan(present, asked, migration=MigrationCost(fixed_s=5, horizon_s=6))
    assert later.kind == "move"
    assert later.answer.prediction.step_time_s < asked.cost.predict(present).step_time_s
    assert soon.kind == "stay"
    assert soon.answer.plan == present
    assert "would not earn its cost" in soon.reason


@pytest.mark.thorough
def test_a_move_that_must_be_made_is_made_to_a_fast_plan_also_where_little_is_left_to_train() -> (
    None
):
    """Nothing earns the fixed part of a move within three seconds, and every candidate pays it."""
    whole = fleet(*DEMO)
    previous = plan_with("autohet", request(whole, 24)).plan
    asked, migration = (
        request(without(whole, "a10g-1"), 24),
        MigrationCost(fixed_s=5),
    )
    later, soon = (
        replan(previous, asked, migration=replace(migration, horizon_s=h)) for h in (3600, 3)
    )
    assert soon.useful_sequences > 0
    assert soon.answer.prediction.step_time_s <= 1.02 * later.answer.prediction.step_time_s


@pytest.mark.thorough
def test_the_same_fleet_stays() -> None:
    asked = request(fleet(*DEMO), 24)
    previous = plan_with("autohet", asked).plan
    decision = replan(previous, asked)
    assert decision.kind == "stay"
    assert decision.migration_s == 0


def test_the_quick_path_keeps_whole_pipelines_where_they_are() -> None:
    whole = fleet(("A10G", 4, 1))
    asked = request(whole, 16, max_stages=1, microbatch_sequences=1)
    previous = plan_with("autohet", asked).plan
    smaller = dataclasses.replace(
        request(without(whole, "a10g-2"), 16, max_stages=1, microbatch_sequences=1)
    )
    decision = replan(previous, smaller, thorough=False)
    kept = {p.stages for p in previous.pipelines if not any("a10g-2/" in w for w in p.workers)}
    assert kept <= {p.stages for p in decision.answer.plan.pipelines}


def test_a_whole_pipeline_with_uneven_shares_stays_and_one_that_lost_a_worker_does_not() -> None:
    whole = fleet(("A100", 1, 1), ("A10G", 2, 2))
    stage = Stage(0, 8, ("a100-0/0", "a10g-0/0", "a10g-0/1"), tp_shares=(2, 1, 1))
    other = Stage(0, 8, ("a10g-1/0", "a10g-1/1"))
    previous = Plan("tiny", 16, 1, 128, (Pipeline((stage,), 10, 1), Pipeline((other,), 6, 1)))
    held = holders_of(previous)
    assert ("3", 0, 4) in held["a100-0/0"]
    assert ("3", 4, 6) in held["a10g-0/0"]
    asked = request(without(whole, "a10g-1"), 16, microbatch_sequences=1)
    kept = repair(previous, asked, set(asked.fleet.workers))
    assert kept is not None
    assert [s.tp_shares for p in kept.pipelines for s in p.stages] == [(2, 1, 1)]
    assert kept.pipelines[0].num_microbatches == 16
    assert migration_s(kept, asked, held, MigrationCost(fixed_s=0.0)) == 0.0
    lost = replan(
        previous, request(without(whole, "a100-0"), 16, microbatch_sequences=1)
    ).answer.plan
    check_plan(lost, 8, max_tp_degree=8)
    assert not any(s.tp_shares for p in lost.pipelines for s in p.stages)


def test_pipelines_that_go_on_in_place_share_any_batch_and_stay_what_they_are() -> None:
    """15 rows of three pipelines: one of microbatches of 4 and one of 2 cannot meet them with whole
    ones alone.
    """
    whole = fleet(("A100", 1, 4))
    halves = (Stage(0, 4, ("a100-0/0",)), Stage(4, 4, ("a100-0/1",), "full"))
    deep = Pipeline(halves, 1, 4, most_in_flight=(2, 1))
    alone = Pipeline((Stage(0, 8, ("a100-0/2",)),), 4, 2)
    lost = Pipeline((Stage(0, 8, ("a100-0/3",)),), 3, 1)
    previous = Plan("tiny", 15, 1, 128, (deep, alone, lost))
    asked = request(whole, 15, microbatch_sequences=1)
    alive = {*deep.workers, *alone.workers}
    assert repair(previous, asked, alive) is None
    kept = repair(previous, asked, alive, in_place=True)
    assert kept is not None
    check_plan(kept, 8)
    assert sum(pipeline.last_microbatch_sequences > 0 for pipeline in kept.pipelines) == 1
    for before, after in zip((deep, alone), kept.pipelines, strict=True):
        counted = {"num_microbatches": after.num_microbatches}
        last = after.last_microbatch_sequences
        assert after == replace(before, **counted, last_microbatch_sequences=last)
    # A pipeline that had a smaller last microbatch gets its share anew.
    again = repair(kept, asked, set(deep.workers), in_place=True)
    assert again is not None
    assert again.pipelines == (replace(deep, num_microbatches=4, last_microbatch_sequences=3),)
    assert repair(kept, request(whole, 16), set(deep.workers)).pipelines[0].num_sequences == 16  # type: ignore[union-attr]


def test_redundancy_of_uneven_shares_is_that_of_their_parts() -> None:
    whole = fleet(("A100", 1, 1), ("A10G", 2, 2))
    stage = Stage(0, 8, ("a100-0/0", "a10g-0/0", "a10g-0/1"), tp_shares=(2, 1, 1))
    other = Stage(0, 8, ("a10g-1/0", "a10g-1/1"))
    alone = Plan("tiny", 16, 1, 128, (Pipeline((stage,), 16, 1),))
    lost = redundancy(alone, whole, 8).lost_by_node
    assert {(shard.part, shard.parts) for shard in lost["a100-0"]} == {(0, 4), (1, 4)}
    assert (
        redundancy(
            replace(alone, pipelines=(*alone.pipelines, Pipeline((other,), 1, 1))), whole, 8
        ).weakest
        >= 2
    )


def test_redundancy_names_what_a_node_would_take_along() -> None:
    whole = fleet(("A100", 1, 1), ("T4", 1, 1))
    plan = plan_with("autohet", request(whole, 8)).plan
    report = redundancy(plan, whole, 8)
    holders = {w.split("/")[0] for w in plan.workers}
    assert set(report.lost_by_node) == holders
    if len(plan.pipelines) == 1:
        assert report.weakest < 2
        lost = sum(len(shards) for shards in report.lost_by_node.values())
        assert lost == 10  # eight blocks, the embedding and the head have one holder each


def test_a_pipeline_that_lost_a_node_is_cut_again_over_its_other_workers() -> None:
    whole = fleet(("A10G", 4, 1))
    asked = request(whole, 16)
    stages = tuple(Stage(2 * i, 2, (f"a10g-{i}/0",)) for i in range(4))
    previous = Plan("tiny", 16, 1, 128, (Pipeline(stages, 16, 1),))
    smaller = request(without(whole, "a10g-2"), 16)
    plan = recut(previous, smaller, set(smaller.fleet.workers), moves_of(smaller))
    assert plan is not None
    check_plan(plan, 8)
    assert [stage.workers for stage in plan.pipelines[0].stages] == [
        ("a10g-0/0",),
        ("a10g-1/0",),
        ("a10g-3/0",),
    ]
    same = recut(previous, asked, set(whole.workers), moves_of(asked))
    assert same is not None
    assert same.pipelines == previous.pipelines
    decision = replan(previous, smaller, thorough=False)
    assert len(decision.answer.plan.workers) == 3
    assert decision.answer.prediction.step_time_s <= smaller.cost.predict(plan).step_time_s


def _chain(nodes: Sequence[str], microbatches: int) -> Pipeline:
    """One GPU a stage, the eight blocks spread evenly, the first stages one more."""
    each, more = divmod(8, len(nodes))
    sizes = [each + (i < more) for i in range(len(nodes))]
    stages = tuple(Stage(sum(sizes[:i]), size, (f"{nodes[i]}/0",)) for i, size in enumerate(sizes))
    return Pipeline(stages, microbatches, 1)


def test_a_whole_pipeline_lends_a_node_to_one_that_lost_most_of_its_own() -> None:
    whole = fleet(("A10G", 8, 1))
    names = [node.name for node in whole.nodes]
    previous = Plan("tiny", 64, 1, 128, (_chain(names[:4], 32), _chain(names[4:], 32)))
    smaller = request(without(whole, names[4], names[5]), 64)
    own = recut(previous, smaller, set(smaller.fleet.workers), moves_of(smaller))
    assert own is not None
    assert sorted(len(p.stages) for p in own.pipelines) == [2, 4]
    lent = replan(previous, smaller, thorough=False).answer
    assert sorted(len(p.stages) for p in lent.plan.pipelines) == [3, 3]
    check_plan(lent.plan, 8)
    assert lent.prediction.step_time_s < smaller.cost.predict(own).step_time_s


def test_a_free_node_that_holds_no_model_alone_joins_a_pipeline() -> None:
    whole = fleet(("A10G", 5, 1))
    names = [node.name for node in whole.nodes]
    previous = Plan("tiny", 32, 1, 128, (_chain(names[:2], 16), _chain(names[2:4], 16)))
    asked = request(whole, 32)
    plan = replan(previous, asked, thorough=False).answer.plan
    assert set(plan.workers) == set(whole.workers)
    check_plan(plan, 8)
    assert asked.cost.predict(plan).step_time_s < asked.cost.predict(previous).step_time_s


@pytest.mark.thorough
def test_where_the_price_rises_above_the_bound_fewer_nodes_are_used() -> None:
    whole = fleet(("A100", 1, 1), ("A10G", 2, 1))
    previous = plan_with("autohet", request(whole, 24)).plan
    priced = replace(
        whole,
        nodes=tuple(
            replace(n, node_type=replace(n.node_type, usd_per_hour=2.0)) for n in whole.nodes
        ),
    )
    asked = replace(
        request(priced, 24), max_usd_per_hour=2.0 * len(whole.nodes) - 1.0, time_limit_s=0.5
    )
    decision = replan(previous, asked)
    assert decision.kind == "move"
    assert (
        0
        < len({worker.split("/")[0] for worker in decision.answer.plan.workers})
        < len(whole.nodes)
    )
    assert decision.answer.prediction.usd_per_hour <= asked.max_usd_per_hour


def priced(of: Fleet, **usd_by_gpu: float) -> Fleet:
    """Return the fleet at these prices of a node by GPU type."""
    nodes = []
    for node in of.nodes:
        usd = usd_by_gpu.get(node.node_type.gpu_type)
        nodes.append(replace(node, node_type=replace(node.node_type, usd_per_hour=usd)))
    return replace(of, nodes=tuple(nodes))


@pytest.mark.thorough
def test_a_replan_follows_the_objective_of_the_job() -> None:
    """Wrong: a replan that looks for the fastest plan whatever the job asks for."""
    whole = fleet(("A100", 1, 1), ("A10G", 2, 1))
    kinds = {"A100": 4.0, "A10G": 0.5}
    asked = replace(request(priced(whole, **kinds), 24), objective="cost", time_limit_s=1.0)
    present = plan_with("autohet", request(whole, 24)).plan
    decision = replan(present, asked, migration=MigrationCost(horizon_s=3600))
    best = plan_with("autohet", asked).prediction.usd_per_million_tokens
    assert decision.kind == "move"
    assert decision.answer.prediction.usd_per_million_tokens == pytest.approx(best, rel=0.01)
    assert "$ a million tokens" in decision.reason

    soon = replan(present, asked, migration=MigrationCost(fixed_s=5, horizon_s=6))
    assert soon.kind == "stay", "the move is not worth its dollars"
    free = replace(asked, **{"fleet": priced(whole, A100=0.0, A10G=0.0)})
    free = replace(free, cost=request(free.fleet, 24).cost)
    slow = plan_with("autohet", asked).plan
    found = replan(slow, free, migration=MigrationCost(horizon_s=3600))
    assert found.answer.step_time_s < free.cost.predict(slow).step_time_s, "free and faster"


@pytest.mark.thorough
def test_nodes_without_a_price_are_no_free_ones() -> None:
    whole = fleet(("A100", 1, 1), ("A10G", 2, 1))
    known = priced(whole, A10G=0.5)
    asked = replace(request(known, 24), objective="cost", time_limit_s=1.0)
    names = tuple(node.name for node in known.nodes if node.node_type.gpu_type == "A100")
    present = plan_with("autohet", request(without(whole, *names), 24)).plan
    decision = replan(present, asked)
    assert not set(decision.answer.used_nodes) & set(names)
