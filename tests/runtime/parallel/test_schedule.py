"""1F1B, and with more in flight: each microbatch once in each direction, bounded in flight, no
deadlock whatever the speeds.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.runtime.parallel.schedule import (
    CHANNEL_DEPTH,
    ActionKind,
    StageAction,
    one_forward_one_backward,
)
from planner.plans.in_flight import MOST_AHEAD
from planner.plans.plan import Pipeline, Plan, Stage, check_plan


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


def play(pipeline: Pipeline, depth: int, order: list[int]) -> bool:
    """Run all stages with receives that block and at most `depth` untaken sends a direction.

    `order` picks who moves next. True: all ended.
    """
    num_stages = len(pipeline.stages)
    plans = [one_forward_one_backward(pipeline, stage) for stage in range(num_stages)]
    at = [0] * num_stages
    channels: dict[tuple[int, int], list[int]] = {}
    turn = 0
    while any(at[s] < len(plans[s]) for s in range(num_stages)):
        ready = [
            s
            for s in range(num_stages)
            if at[s] < len(plans[s]) and _can(s, plans[s][at[s]], channels, depth)
        ]
        if not ready:
            return False
        stage = ready[order[turn % len(order)] % len(ready)]
        turn += 1
        _move(stage, plans[stage][at[stage]], channels)
        at[stage] += 1
    return all(not channel for channel in channels.values())


def _channel(stage: int, action: StageAction) -> tuple[int, int] | None:
    neighbour = {
        ActionKind.RECV_ACTIVATION: (stage - 1, stage),
        ActionKind.SEND_ACTIVATION: (stage, stage + 1),
        ActionKind.RECV_GRADIENT: (stage + 1, stage),
        ActionKind.SEND_GRADIENT: (stage, stage - 1),
    }
    return neighbour.get(action.kind)


def _can(
    stage: int, action: StageAction, channels: dict[tuple[int, int], list[int]], depth: int
) -> bool:
    channel = _channel(stage, action)
    if channel is None:
        return True
    waiting = channels.get(channel, [])
    return bool(waiting) if "RECV" in action.kind.name else len(waiting) < depth


def _move(stage: int, action: StageAction, channels: dict[tuple[int, int], list[int]]) -> None:
    channel = _channel(stage, action)
    if channel is None:
        return
    if "RECV" in action.kind.name:
        assert channels[channel].pop(0) == action.microbatch, (
            "messages of one direction must be taken in the order in which they were sent"
        )
    else:
        channels.setdefault(channel, []).append(action.microbatch)


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(pipelines())
def test_every_microbatch_passes_once_and_few_are_in_flight(pipeline: Pipeline) -> None:
    num_stages, num_microbatches = len(pipeline.stages), pipeline.num_microbatches
    allowed = pipeline.most_in_flight or range(num_stages, 0, -1)
    for stage in range(num_stages):
        actions = one_forward_one_backward(pipeline, stage)
        counts = Counter(actions)
        assert set(counts.values()) == {1}
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            assert [a.microbatch for a in actions if a.kind is kind] == list(
                range(num_microbatches)
            )
        in_flight = most = 0
        for action in actions:
            in_flight += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind, 0)
            most = max(most, in_flight)
        assert most == pipeline.in_flight(stage) == min(allowed[stage], num_microbatches)


@pytest.mark.parametrize(
    ("stage", "absent"),
    [(0, ["RECV_ACTIVATION", "SEND_GRADIENT"]), (2, ["SEND_ACTIVATION", "RECV_GRADIENT"])],
)
def test_the_ends_of_a_pipeline_have_one_neighbour(stage: int, absent: list[str]) -> None:
    kinds = {action.kind.name for action in one_forward_one_backward(pipeline_of(3, 5), stage)}
    assert not kinds & set(absent)
    assert len(kinds) == 4
