"""Plans that are equal but for the names of equal nodes share one judgement in a walk."""

import random
from dataclasses import replace

from planner.plans.plan import Plan
from planner.search.problem.cost_tables import tables_of
from planner.search.walk.improve import Improver, Judge, Likeness
from planner.search.walk.moves import Moves
from planner.strategies import plan_with
from tests.planner.cases import fleet, request, slowed


def renamed(plan: Plan, names: dict[str, str]) -> Plan:
    def of(worker: str) -> str:
        node, _, gpu = worker.rpartition("/")
        return f"{names.get(node, node)}/{gpu}"

    pipelines = []
    for pipeline in plan.pipelines:
        stages = (replace(s, workers=tuple(map(of, s.workers))) for s in pipeline.stages)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


def test_walks_over_alike_plans_agree_with_the_prediction() -> None:
    """Every plan that a walk meets scores what its own prediction says."""
    asked = request(fleet(("A100", 2, 2), ("T4", 4, 1)), 16)
    tables, cost = tables_of(asked), asked.cost
    alike = Likeness(tables.node_types, in_flight=cost.parameters.transfers != "none")
    moves, first = Moves(tables, random.Random(1)), plan_with("autohet", asked).plan
    judge = Judge(lambda plan: 0.0, prepared=cost.stage_choices.working_ahead, likeness=alike.key)
    improver = Improver(moves, judge)
    seconds, now = dict[object, float](), first
    hits = 0
    for _ in range(300):
        drawn = moves.draw(now)
        if drawn is None:
            continue
        own_s = cost.predict(cost.stage_choices.working_ahead(drawn)).step_time_s
        hits += alike.key(drawn) in seconds
        known_s = seconds.setdefault(alike.key(drawn), own_s)
        assert abs(known_s - own_s) <= 1e-9 * own_s
        now = cost.stage_choices.working_ahead(drawn)
        assert improver.prepare(drawn, alike.key(drawn)) == now
    assert hits > 20


def test_a_slow_node_is_not_like_a_fast_one() -> None:
    of = slowed(fleet(("A100", 2, 2), ("T4", 2, 1)), "a100-0", 2.0)
    asked = request(of, 16)
    tables = tables_of(asked)
    alike = Likeness(tables.node_types, in_flight=True)
    plan = plan_with("autohet", request(fleet(("A100", 2, 2)), 16)).plan
    swapped = renamed(plan, {"a100-0": "a100-1", "a100-1": "a100-0"})
    assert alike.key(plan) != alike.key(swapped)
    equal = Likeness(dict.fromkeys(tables.node_types, of.nodes[1].node_type), in_flight=True)
    assert equal.key(plan) == equal.key(swapped)


def test_a_plan_ruled_out_by_its_bound_is_judged_once_it_may_be_kept() -> None:
    """A walk from a slower start keeps what a walk from a faster one had no use for."""
    asked = request(fleet(("A100", 2, 1)), 8)
    plan = plan_with("autohet", asked).plan
    judge = Judge(lambda plan: 2.0, lambda plan: 1.5)
    improver = Improver(Moves(tables_of(asked), random.Random(0)), judge)
    assert improver.score(plan, 1.0) == float("inf")
    assert improver.score(plan, 3.0) == 2.0
