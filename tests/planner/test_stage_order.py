"""The order of a stage against 1F1B's definition, in every consumer of it.

Wrong program: a stage that runs its actions in pairs (F0 F1 F2 B0 B1 F3 F4 ...) computes the same
loss, and the planner prices it as 1F1B.
"""

import itertools
from functools import cache

import pytest

from autohet.runtime.parallel.schedule import one_forward_one_backward
from planner.cost.schedule import PipelineTimes, simulate_pipeline
from planner.plans.in_flight import MOST_AHEAD
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan
from planner.plans.stage_order import stage_order

MOST_STAGES = 4
MOST_MICROBATCHES = 6


def admitted(depth: int) -> list[tuple[int, ...]]:
    """Every `in_flight` that `check_plan` admits for `depth` stages; () is 1F1B's."""
    every: list[tuple[int, ...]] = [()]
    for leads in itertools.product(range(1, MOST_AHEAD + 1), repeat=depth - 1):
        every.append(tuple(1 + sum(leads[stage:]) for stage in range(depth)))
    return every


def pipeline_of(depth: int, most: tuple[int, ...], num_microbatches: int) -> Pipeline:
    stages = tuple(Stage(number, 1, (f"a/{number}",)) for number in range(depth))
    return Pipeline(stages, num_microbatches, 1, most)


@cache
def defined_order(in_flight: int, num_microbatches: int) -> list[int]:
    """1F1B by its definition, found among all words of K forwards and K backwards.

    A word is allowed if at most `in_flight` forwards are outstanding and no backward comes before
    its forward. 1F1B is the allowed word that goes forward first wherever two words differ: each
    backward comes as soon as `in_flight` microbatches are outstanding.
    """
    best: list[int] = []
    for places in itertools.combinations(range(2 * num_microbatches), num_microbatches):
        word = [1 if place in places else -1 for place in range(2 * num_microbatches)]
        outstanding = list(itertools.accumulate(word))
        if min(outstanding) >= 0 and max(outstanding) <= in_flight:
            best = max(best, word)

    forwards = itertools.count()
    backwards = itertools.count()
    return [next(forwards) if step == 1 else ~next(backwards) for step in best]


def simulated_orders(pipeline: Pipeline) -> list[list[int]]:
    depth = len(pipeline.stages)
    no_transfer = (0.0,) * (depth - 1)
    times = PipelineTimes(
        (1.0,) * depth,
        (2.0,) * depth,
        no_transfer,
        no_transfer,
        most_in_flight=pipeline.most_in_flight,
    )
    timeline = simulate_pipeline(times, pipeline.num_microbatches)
    orders = []
    for stage in range(depth):
        starts = {}
        for microbatch in range(pipeline.num_microbatches):
            starts[microbatch] = timeline.forward_start_s[stage, microbatch]
            starts[~microbatch] = timeline.backward_start_s[stage, microbatch]
        orders.append(sorted(starts, key=starts.__getitem__))
    return orders


def test_an_order_by_its_definition() -> None:
    assert defined_order(3, 5) == [0, 1, 2, ~0, 3, ~1, 4, ~2, ~3, ~4]


@pytest.mark.parametrize("num_microbatches", range(1, MOST_MICROBATCHES + 1))
@pytest.mark.parametrize("depth", range(1, MOST_STAGES + 1))
def test_the_runtime_runs_and_the_planner_simulates_1f1b(depth: int, num_microbatches: int) -> None:
    for most in admitted(depth):
        pipeline = pipeline_of(depth, most, num_microbatches)
        check_plan(Plan("m", num_microbatches, 1, 4, (pipeline,)), depth)
        numbers = most or tuple(range(depth, 0, -1))
        defined = [defined_order(number, num_microbatches) for number in numbers]
        assert [stage_order(numbers, s, num_microbatches) for s in range(depth)] == defined
        assert [one_forward_one_backward(pipeline, s) for s in range(depth)] == defined
        assert simulated_orders(pipeline) == defined
