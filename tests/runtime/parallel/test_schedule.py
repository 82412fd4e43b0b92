"""1F1B, and with more in flight: each microbatch once in each direction, bounded in flight, no
deadlock whatever the speeds.
"""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.runtime.parallel.schedule import CHANNEL_DEPTH, one_forward_one_backward
from planner.plans.in_flight import MOST_AHEAD
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan


def pipeline_of(
    num_stages: int, num_microbatches: int, most_in_flight: tuple[int, ...] = ()
) -> Pipeline:
    stages = tuple(Stage(number, 1, (f"a/{number}",)) for number in range(num_stages))
    return Pipeline(stages, num_microbatches, 1, most_in_flight)


@st.composite
def pipelines(draw: st.DrawFn, most_ahead: int = MOST_AHEAD) -> Pipeline:
    """Any that `check_plan` admits: each stage may keep 1 to `most_ahead` more than the next, the
    last 1 (none: 1F1B's numbers).
    """
    more = [*draw(st.lists(st.integers(1, most_ahead), max_size=8)), 1]
    most = tuple(sum(more[stage:]) for stage in range(len(more)))
    num_microbatches = draw(st.integers(1, 20))
    made = pipeline_of(len(more), num_microbatches, most)
    check_plan(Plan("m", num_microbatches, 1, 4, (made,)), len(more))
    return draw(st.sampled_from((made, pipeline_of(len(more), num_microbatches))))


Message = tuple[bool, tuple[int, int], int]
"""True: it is received; sender and receiver; microbatch."""


def messages_of(pipeline: Pipeline, stage: int) -> list[Message]:
    """What a stage receives before each of its passes, and sends after it, in its order."""
    messages: list[Message] = []
    last = len(pipeline.stages) - 1
    for m in one_forward_one_backward(pipeline, stage):
        before, after = (stage - 1, stage + 1) if m >= 0 else (stage + 1, stage - 1)
        microbatch = m if m >= 0 else ~m
        if 0 <= before <= last:
            messages.append((True, (before, stage), microbatch))
        if 0 <= after <= last:
            messages.append((False, (stage, after), microbatch))
    return messages


def play(pipeline: Pipeline, depth: int, order: list[int]) -> bool:
    """Run all stages with receives that block and at most `depth` untaken sends a direction.

    `order` picks who moves next. True: all ended.
    """
    left = {stage: messages_of(pipeline, stage) for stage in range(len(pipeline.stages))}
    channels: dict[tuple[int, int], list[int]] = defaultdict(list)
    turn = 0
    while any(left.values()):
        ready = [stage for stage in left if left[stage] and can(left[stage][0], channels, depth)]
        if not ready:
            return False
        stage = ready[order[turn % len(order)] % len(ready)]
        turn += 1
        is_received, channel, microbatch = left[stage].pop(0)
        if is_received:
            assert channels[channel].pop(0) == microbatch, (
                "messages of one direction must be taken in the order in which they were sent"
            )
        else:
            channels[channel].append(microbatch)
    return not any(channels.values())


def can(message: Message, channels: dict[tuple[int, int], list[int]], depth: int) -> bool:
    is_received, channel, _ = message
    waiting = channels[channel]
    return bool(waiting) if is_received else len(waiting) < depth


@settings(max_examples=150)
@given(
    st.data(), st.integers(1, CHANNEL_DEPTH), st.lists(st.integers(0, 8), min_size=1, max_size=30)
)
def test_no_deadlock_with_bounded_channels(
    data: st.DataObject, depth: int, order: list[int]
) -> None:
    assert play(data.draw(pipelines(min(MOST_AHEAD, 2 * depth))), depth, order)


def test_the_game_can_end_in_deadlock() -> None:
    """With channels that hold nothing every send would have to meet its receive: the game must
    notice that 1F1B cannot do that.
    """
    assert not play(pipeline_of(2, 4), 0, [0])


@pytest.mark.parametrize("depth", range(1, CHANNEL_DEPTH + 1))
def test_a_stage_may_keep_twice_the_depth_more_than_the_next(depth: int) -> None:
    """One more, and it sends a forward that no room is left for before it takes the gradient that
    would make room.
    """
    assert play(pipeline_of(2, 20, (1 + 2 * depth, 1)), depth, [0])
    assert not play(pipeline_of(2, 20, (2 + 2 * depth, 1)), depth, [0])


def test_the_plan_bounds_it_by_what_the_channels_hold() -> None:
    assert MOST_AHEAD <= 2 * CHANNEL_DEPTH


@settings(max_examples=100)
@given(pipelines())
def test_every_microbatch_passes_once_and_few_are_in_flight(pipeline: Pipeline) -> None:
    num_stages, num_microbatches = len(pipeline.stages), pipeline.num_microbatches
    allowed = pipeline.most_in_flight or range(num_stages, 0, -1)
    for stage in range(num_stages):
        order = one_forward_one_backward(pipeline, stage)
        assert [m for m in order if m >= 0] == list(range(num_microbatches))
        assert [~m for m in order if m < 0] == list(range(num_microbatches))
        in_flight = itertools.accumulate(1 if m >= 0 else -1 for m in order)
        assert max(in_flight) == pipeline.in_flight(stage) == min(allowed[stage], num_microbatches)
