"""The emulated speed, and a worker's neighbours where stages differ in tensor-parallel degree."""

from __future__ import annotations

import itertools
import time

import pytest

from autohet.runtime.pacing import Pace, Pacer
from autohet.runtime.place import place_of
from planner.plan import Plan


def test_an_action_lasts_as_long_as_its_pace() -> None:
    started = time.perf_counter()
    Pacer(Pace(0.05, 0.0), lambda: False).after_forward(started)
    assert time.perf_counter() - started >= 0.05


def test_an_interrupt_ends_the_sleep() -> None:
    checks = itertools.count()
    Pacer(Pace(3600.0, 0.0), lambda: next(checks) == 2, slice_s=0.001).after_forward(time.perf_counter())
    assert next(checks) == 3


def test_a_slow_action_is_not_made_slower() -> None:
    Pacer(Pace(1.0, 1.0), lambda: pytest.fail("asked, so it was about to sleep")).after_backward(
        time.perf_counter() - 2.0
    )


@pytest.mark.parametrize(("before", "after"), itertools.product((1, 2, 4), repeat=2))
def test_each_receives_from_the_one_that_sends_to_it(before: int, after: int) -> None:
    names = [f"w{i}" for i in range(before + after)]
    stages = [
        {"first_layer": 0, "num_layers": 1, "workers": names[:before]},
        {"first_layer": 1, "num_layers": 1, "workers": names[before:]},
    ]
    document = {
        "version": 1, "model": "m", "global_batch_sequences": 6, "microbatch_sequences": 3, "sequence_length": 4,
        "pipelines": [{"num_microbatches": 2, "stages": stages}],
    }  # fmt: skip
    plan = Plan.from_document(document)
    places = {name: place_of(plan, name) for name in names}
    forward = {(giver, taker) for giver in names for taker in places[giver].send_forward_to}  # type: ignore[union-attr]
    backward = {(giver, taker) for giver in names for taker in places[giver].send_backward_to}  # type: ignore[union-attr]
    assert forward == {(places[name].upstream, name) for name in names[before:]}  # type: ignore[union-attr]
    assert backward == {(places[name].downstream, name) for name in names[:before]}  # type: ignore[union-attr]
    assert place_of(plan, "stranger") is None


def test_pipelines_take_consecutive_parts_of_the_batch() -> None:
    pipelines = [
        {
            "num_microbatches": 2,
            "microbatch_sequences": 3,
            "stages": [{"first_layer": 0, "num_layers": 1, "workers": ["a"]}],
        },
        {"num_microbatches": 4, "stages": [{"first_layer": 0, "num_layers": 1, "workers": ["b"]}]},
    ]
    document = {
        "version": 1,
        "model": "m",
        "global_batch_sequences": 10,
        "microbatch_sequences": 1,
        "sequence_length": 4,
        "pipelines": pipelines,
    }
    plan = Plan.from_document(document)
    taken = [i for name, count in (("a", 2), ("b", 4)) for m in range(count) for i in place_of(plan, name).sequences(m)]  # type: ignore[union-attr]
    assert taken == list(range(10))
