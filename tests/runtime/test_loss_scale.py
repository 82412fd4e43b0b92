"""The scale of gradients in fp16: a function of the committed steps alone."""

import pytest
import torch

from autohet.runtime.parallel.scaled_passes import ScaledPasses
from autohet.runtime.step.loss_scale import (
    FIRST_SCALE,
    GROWTH_STEPS,
    LEAST_EXPONENT,
    MOST_CHANGES,
    MOST_EXPONENT,
    LossScale,
    LossScales,
)


def test_a_scale_doubles_after_steps_without_a_change() -> None:
    scale = LossScale(100, 10)
    assert scale.at(100 + GROWTH_STEPS - 1) == scale
    assert scale.at(100 + GROWTH_STEPS) == LossScale(100 + GROWTH_STEPS, 11)
    assert LossScale(0, MOST_EXPONENT).at(10 * GROWTH_STEPS).exponent == MOST_EXPONENT


def test_a_scale_is_halved_down_to_the_least() -> None:
    scale = LossScale(3, LEAST_EXPONENT + 1)
    assert scale.can_halve
    assert scale.halved(7) == LossScale(7, LEAST_EXPONENT)
    assert not scale.halved(7).can_halve
    assert scale.halved(7).factor == 2.0**LEAST_EXPONENT


def test_changes_give_each_step_the_scale_that_it_had() -> None:
    """Also after a way through a manifest, and after the run has gone back."""
    scales = LossScales()
    for change in (FIRST_SCALE, LossScale(4, 9), LossScale(4, 8), LossScale(9, 7)):
        scales.take(change)
        scales.take(change)
    for each in (scales, LossScales(scales.text)):
        assert each.before(0) == FIRST_SCALE
        assert each.before(4) == FIRST_SCALE, "step 4 overflows again when it is run again"
        assert each.before(5) == LossScale(4, 8)
        assert each.before(9) == LossScale(4, 8)
        assert each.before(100) == LossScale(9, 7)
    scales.take(LossScale(6, 7))
    assert scales.text == "0:10 4:8 6:7"


def test_only_the_newest_changes_are_remembered() -> None:
    scales = LossScales()
    for step in range(3 * MOST_CHANGES):
        scales.take(LossScale(step, step % 5))
    assert len(scales.text.split()) == MOST_CHANGES
    assert scales.before(3 * MOST_CHANGES).since == 3 * MOST_CHANGES - 1


@pytest.mark.parametrize(
    ("given", "own", "overflows"),
    [(1.0, 1.0, 0), (1.0, float("inf"), 1), (float("inf"), float("nan"), 0)],
)
def test_an_overflow_is_what_was_given_finite_and_is_not(
    given: float, own: float, overflows: int
) -> None:
    """Each microbatch counts by itself: a bad one hides no overflow of another."""
    passes = ScaledPasses(torch.device("cpu"))
    passes.begin(8.0)
    for gradient in (torch.tensor([given]), torch.tensor([float("inf")])):
        scaled = passes.scale(gradient)
        assert scaled.dtype == torch.float16
        assert float(scaled) == 8.0 * float(gradient)
        assert passes.unscale_factor(torch.tensor([own], dtype=torch.float16)) == 0.125
        passes.end_microbatch()
    assert int(passes.overflows) == overflows
    passes.begin(4.0)
    assert int(passes.overflows) == 0


def test_a_gradient_leaves_the_stage_as_it_would_without_scale() -> None:
    passes = ScaledPasses(torch.device("cpu"))
    passes.begin(1024.0)
    loss = torch.tensor(3.5, requires_grad=True)
    assert float(passes.root_gradient(loss)) == 1024.0
    left = passes.unscale(torch.tensor([1024.0, -0.5], dtype=torch.float16))
    assert left.dtype == torch.float32
    assert left.tolist() == [1.0, -0.5 / 1024]
