"""How far stages work ahead: within memory, without deadlock, and never slower than the closed form
says.
"""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.schedule import PipelineTimes, simulate_pipeline
from planner.errors import ConfigError
from planner.plans.in_flight import MOST_AHEAD, one_each, period_s, working_ahead
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan
from planner.search.walk.judge import fewest_in_flight
from tests.planner.cases import fleet, model, request, with_nics


def plan(*most: int, stages: int = 3) -> Plan:
    made = tuple(Stage(s, 1, (f"n{s}/0",)) for s in range(stages))
    return Plan("m", 8, 1, 4, (Pipeline(made, 8, 1, most),))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40)), min_size=1, max_size=9),
    st.integers(1, MOST_AHEAD),
)
def test_numbers_fit_memory_and_plans_may_have_them(
    cases: list[tuple[float, int]], most: int
) -> None:
    transfers, room = [seconds for seconds, _ in cases][1:], [have for _, have in cases]
    depth = len(room)
    numbers = working_ahead(transfers, room, most)
    check_plan(plan(*numbers, stages=depth), depth)
    for number, need, have in zip(numbers, one_each(depth), room, strict=True):
        assert number == need or number <= have
    more = [earlier - later for earlier, later in itertools.pairwise(numbers)]
    assert all(1 <= step <= most for step in more)


def test_the_longest_transfer_is_hidden_first() -> None:
    assert working_ahead([1.0, 5.0, 2.0], [5, 4, 9, 9]) == (5, 4, 2, 1)
    assert working_ahead([1.0, 5.0, 2.0], [99] * 4) == (10, 7, 4, 1)
    assert working_ahead([1.0, 5.0, 2.0], [2, 1, 1, 1]) == (4, 3, 2, 1)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(*[st.floats(0.1, 3)] * 2, st.floats(0, 1)), min_size=2, max_size=6),
    st.integers(1, 40),
    st.integers(1, MOST_AHEAD),
)
def test_no_step_is_shorter_than_its_periods(
    stages: list[tuple[float, float, float]], microbatches: int, most: int
) -> None:
    forward, backward, send = (tuple(column) for column in zip(*stages, strict=True))
    numbers = working_ahead(send[1:], [99] * len(stages), most)
    times = PipelineTimes(forward, backward, send[1:], send[1:], "none", numbers)
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    period = period_s(work, [2 * seconds for seconds in send[1:]], numbers)
    assert microbatches * period <= simulate_pipeline(times, microbatches).total_s * (1 + 1e-9)


def test_working_ahead_hides_transfers_that_hold_1f1b_up() -> None:
    times = PipelineTimes((1.0,) * 4, (2.0,) * 4, (0.5,) * 3, (0.5,) * 3, "none")
    one_each_s = simulate_pipeline(times, 40).total_s
    ahead_s = simulate_pipeline(replace(times, most_in_flight=(7, 5, 3, 1)), 40).total_s
    assert ahead_s == pytest.approx(
        4 * 3 + 3 + 39 * 3
    )  # the way through and back, and no other wait
    assert one_each_s > 1.2 * ahead_s


@pytest.mark.parametrize(
    ("most", "why"),
    [
        ((5, 3), "has 2 numbers; expected one for each of 3 stages"),
        ((5, 3, 2), "the last stage of pipeline 0 is 2; it must be 1"),
        ((9, 5, 1), "stage 0 of pipeline 0 is 9|stage 1 of pipeline 0 is 5"),
        ((2, 2, 1), "stage 0 of pipeline 0 is 2; it must be one to 3 more"),
    ],
)
def test_numbers_that_could_not_run_are_refused(most: tuple[int, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_plan(plan(*most), 3)


@pytest.mark.parametrize("most", [(8, 8, 8), (9, 2, 1), (2, 2, 1)])
def test_a_refusal_names_numbers_that_are_admitted(most: tuple[int, ...]) -> None:
    """GPipe's numbers, K at each stage, are refused; the user needs some that are not."""
    with pytest.raises(ConfigError) as refusal:
        check_plan(plan(*most), 3)
    message = str(refusal.value)
    suggested = re.findall(r"\[([\d, ]+)\]", message)
    assert suggested == ["7, 4, 1", "3, 2, 1"]
    for numbers in suggested:
        check_plan(plan(*map(int, numbers.split(", "))), 3)
    assert "each stage 1 to 3 more than the next" in message


def test_documents_carry_them() -> None:
    assert Plan.from_document(plan(5, 3, 1).to_document()) == plan(5, 3, 1)
    assert "in_flight" not in plan().to_document()["pipelines"][0]
    document = plan(5, 3, 1).to_document()
    document["pipelines"][0]["in_flight"] = [5, True, 1]
    with pytest.raises(ConfigError, match="must be whole numbers"):
        Plan.from_document(document)


def test_a_chosen_plan_is_as_far_ahead_as_helps_and_its_memory_counts_that() -> None:
    of = with_nics(fleet(("A100", 4, 1)), {"A100": 5e8})
    asked = request(of, 32, model(8, 512), microbatch_sequences=1)
    cuts = ((0, 3), (3, 2), (5, 2), (7, 1))
    stages = tuple(Stage(first, count, (f"a100-{s}/0",)) for s, (first, count) in enumerate(cuts))
    plain = Plan("tiny", 32, 1, 128, (Pipeline(stages, 32, 1),))
    chosen = fewest_in_flight(asked.cost, plain).plan
    before, after = asked.cost.predict(plain), asked.cost.predict(chosen)
    assert chosen.pipelines[0].in_flight(0) > 4
    assert after.step_time_s < 0.97 * before.step_time_s
    assert after.memory_bytes_by_worker["a100-0/0"] > before.memory_bytes_by_worker["a100-0/0"]
    assert after.memory_bytes_by_worker["a100-3/0"] == before.memory_bytes_by_worker["a100-3/0"]


def test_what_memory_has_left_goes_before_late_boundaries() -> None:
    assert working_ahead((0.1, 0.1), (5, 9, 9), 3) == (5, 3, 1)
    assert working_ahead((0.1, 0.1), (6, 9, 9), 3) == (6, 4, 1)
    assert working_ahead((0.2, 0.1), (4, 9, 9), 3) == (4, 2, 1)
    assert working_ahead((0.1, 0.1), (99, 99, 99), 3) == (7, 4, 1)
