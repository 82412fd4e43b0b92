"""1F1B: each microbatch once in each direction, bounded in flight, and free of deadlock whatever the speeds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.runtime.schedule import CHANNEL_DEPTH, Action, Kind, num_in_flight, one_forward_one_backward

shapes = st.tuples(st.integers(1, 9), st.integers(1, 20))


def play(num_stages: int, num_microbatches: int, depth: int, order: list[int]) -> bool:
    """Run all stages with receives that block and at most `depth` untaken sends a direction.

    `order` picks who moves next. True: all ended.
    """
    plans = [one_forward_one_backward(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    at = [0] * num_stages
    channels: dict[tuple[int, int], list[int]] = {}
    turn = 0
    while any(at[s] < len(plans[s]) for s in range(num_stages)):
        ready = [s for s in range(num_stages) if at[s] < len(plans[s]) and _can(s, plans[s][at[s]], channels, depth)]
        if not ready:
            return False
        stage = ready[order[turn % len(order)] % len(ready)]
        turn += 1
        _move(stage, plans[stage][at[stage]], channels)
        at[stage] += 1
    return all(not channel for channel in channels.values())


def _channel(stage: int, action: Action) -> tuple[int, int] | None:
    neighbour = {
        Kind.RECV_ACTIVATION: (stage - 1, stage), Kind.SEND_ACTIVATION: (stage, stage + 1),
        Kind.RECV_GRADIENT: (stage + 1, stage), Kind.SEND_GRADIENT: (stage, stage - 1),
    }  # fmt: skip
    return neighbour.get(action.kind)


def _can(stage: int, action: Action, channels: dict[tuple[int, int], list[int]], depth: int) -> bool:
    channel = _channel(stage, action)
    if channel is None:
        return True
    waiting = channels.get(channel, [])
    return bool(waiting) if "RECV" in action.kind.name else len(waiting) < depth


def _move(stage: int, action: Action, channels: dict[tuple[int, int], list[int]]) -> None:
    channel = _channel(stage, action)
    if channel is None:
        return
    if "RECV" in action.kind.name:
        assert channels[channel].pop(0) == action.microbatch, (
            "messages of one direction must be taken in the order in which they were sent"
        )
    else:
        channels.setdefault(channel, []).append(action.microbatch)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, CHANNEL_DEPTH), st.lists(st.integers(0, 8), min_size=1, max_size=30))
def test_no_deadlock_with_bounded_channels(shape: tuple[int, int], depth: int, order: list[int]) -> None:
    assert play(*shape, depth, order)


def test_the_game_can_end_in_deadlock() -> None:
    """With channels that hold nothing every send would have to meet its receive: the game must notice that 1F1B cannot do that."""
    assert not play(2, 4, 0, [0])


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_every_microbatch_passes_once_and_few_are_in_flight(shape: tuple[int, int]) -> None:
    num_stages, num_microbatches = shape
    for stage in range(num_stages):
        actions = one_forward_one_backward(stage, num_stages, num_microbatches)
        counts = Counter(actions)
        assert set(counts.values()) == {1}
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(num_microbatches))
        in_flight = most = 0
        for action in actions:
            in_flight += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
            most = max(most, in_flight)
        assert most == num_in_flight(stage, num_stages, num_microbatches) == min(num_stages - stage, num_microbatches)


@pytest.mark.parametrize(
    ("stage", "absent"), [(0, ["RECV_ACTIVATION", "SEND_GRADIENT"]), (2, ["SEND_ACTIVATION", "RECV_GRADIENT"])]
)
def test_the_ends_of_a_pipeline_have_one_neighbour(stage: int, absent: list[str]) -> None:
    kinds = {action.kind.name for action in one_forward_one_backward(stage, 3, 5)}
    assert not kinds & set(absent)
    assert len(kinds) == 4
