"""Among plans that are nearly as fast the one with fewer kinds of pipelines is chosen, and the
answer says so.
"""

from dataclasses import replace

from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.walk.judge import kinds_in, simplest_near_fastest
from planner.strategies import plan_with
from tests.planner.cases import fleet, request

FOUR = fleet(("A100", 4, 1))


def plan_of(*cuts: int) -> Plan:
    """Two stages each, with the first so many of eight blocks."""
    workers = iter(FOUR.workers)
    pipelines = [
        Pipeline((Stage(0, cut, (next(workers),)), Stage(cut, 8 - cut, (next(workers),))), 4, 1)
        for cut in cuts
    ]
    return Plan("model", 8, 1, 512, tuple(pipelines))


def test_within_half_a_percent_the_plan_with_fewer_kinds_is_chosen() -> None:
    alike, unlike = plan_of(4, 4), plan_of(4, 5)
    assert (kinds_in(FOUR, alike), kinds_in(FOUR, unlike)) == (1, 2)
    chosen, why = simplest_near_fastest(FOUR, {unlike: 1.0, alike: 1.0049})
    assert chosen == alike
    assert "one pipeline shape" in why
    assert "0.49%" in why
    assert "2 pipeline shapes" in why
    assert simplest_near_fastest(FOUR, {unlike: 1.0, alike: 1.0051})[0] == unlike


def test_of_equally_plain_plans_the_fastest_is_chosen() -> None:
    assert simplest_near_fastest(FOUR, {plan_of(4, 4): 1.001, plan_of(5, 5): 1.0})[0] == plan_of(
        5, 5
    )


def test_microbatch_sizes_and_node_types_make_kinds_and_numbers_of_microbatches_do_not() -> None:
    mixed = fleet(("A100", 2, 1), ("T4", 2, 1))
    alike = plan_of(4, 4)
    one, other = alike.pipelines
    assert kinds_in(FOUR, replace(alike, pipelines=(one, replace(other, num_microbatches=3)))) == 1
    assert (
        kinds_in(FOUR, replace(alike, pipelines=(one, replace(other, microbatch_sequences=2)))) == 2
    )
    stages = [
        replace(s, workers=(w,))
        for s, w in zip((*one.stages, *other.stages), mixed.workers, strict=True)
    ]
    unlike = tuple(
        replace(p, stages=tuple(s))
        for p, s in zip((one, other), (stages[:2], stages[2:]), strict=True)
    )
    assert kinds_in(mixed, replace(alike, pipelines=unlike)) == 2


def test_an_answer_says_why_its_plan_was_chosen() -> None:
    answer = plan_with("autohet", request(fleet(("A100", 2, 1), ("T4", 1, 1)), 8))
    assert "pipeline shape" in answer.choice
