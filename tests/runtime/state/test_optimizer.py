"""AdamW against torch.optim.AdamW and its schedule; the same bits wherever a shard lies in a
worker's tensor.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.runtime.job import TrainingSection
from autohet.runtime.state.optimizer import UpdateRule, clip_factor, update
from autohet.runtime.step.learning_rate import learning_rate

SETTINGS = TrainingSection(
    global_batch_sequences=1,
    sequence_length=1,
    steps=10,
    learning_rate=1e-2,
    warmup_steps=4,
    min_learning_rate_ratio=0.1,
    clip_norm=1.0,
)


def first_state(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "param/w": tensor.clone(),
        "exp_avg/w": torch.zeros_like(tensor),
        "exp_avg_sq/w": torch.zeros_like(tensor),
    }


def test_updates_equal_torch_adamw() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5)
    state, plain = first_state(weight), torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW(
        [plain], betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay
    )
    for step in range(6):
        gradient = torch.randn(7, 5)
        update(state, {"w": gradient}, UpdateRule(SETTINGS, step, 0.5))
        plain.grad = gradient * 0.5
        optimizer.param_groups[0]["lr"] = learning_rate(SETTINGS, step)
        optimizer.step()
        torch.testing.assert_close(state["param/w"], plain.data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("start", "stop"), [(0, 50), (3, 103), (50, 103), (7, 12)])
def test_a_slice_gets_the_bits_of_the_whole(start: int, stop: int) -> None:
    torch.manual_seed(start)
    weight = torch.randn(103)
    whole, part = first_state(weight), first_state(weight[start:stop])
    for step in range(3):
        gradient = torch.randn(103)
        rule = UpdateRule(SETTINGS, step, 0.37)
        update(whole, {"w": gradient.clone()}, rule)
        update(part, {"w": gradient[start:stop].clone()}, rule)
    for name in whole:
        assert torch.equal(whole[name][start:stop], part[name]), name


def test_learning_rate_rises_then_falls_along_a_cosine() -> None:
    rates = [learning_rate(SETTINGS, step) for step in range(13)]
    assert rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert rates[7] == pytest.approx(0.01 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 3 / 6))))
    assert rates[10:] == pytest.approx([0.001] * 3)


def test_clipping_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 4.0, 0.0])
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(
        torch.tensor([3.0, 4.0, 0.0]) * clip_factor(SETTINGS, 5.0), parameter.grad
    )
    assert clip_factor(SETTINGS, 0.5) == 1.0


@settings(max_examples=60)
@given(
    st.integers(0, 20),
    st.integers(1, 60),
    st.none() | st.integers(1, 60),
    st.floats(0, 1),
    st.integers(0, 80),
)
def test_learning_rate_is_that_of_torchs_schedulers(
    warmup: int, steps: int, decay: int | None, floor: float, step: int
) -> None:
    """Rising: LinearLR's line from lr / warmup.

    Falling: CosineAnnealingLR's closed form. After the end: the floor, for ever.
    """
    end = decay or steps
    warmup = min(warmup, end, steps)
    section = TrainingSection(
        global_batch_sequences=1,
        sequence_length=1,
        steps=steps,
        learning_rate=2.0,
        warmup_steps=warmup,
        decay_steps=decay,
        min_learning_rate_ratio=floor,
    )
    if step < warmup:
        wanted = 2.0 * (step + 1) / warmup
    elif step >= max(end, warmup + 1):
        wanted = 2.0 * floor
    else:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, end - warmup, eta_min=2.0 * floor
        )
        for _ in range(step - warmup):
            optimizer.step()
            cosine.step()
        wanted = cosine.get_last_lr()[0]
    assert learning_rate(section, step) == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clipping_many_tensors_is_torchs(seed: int, scale: float, limit: float) -> None:
    section = TrainingSection(global_batch_sequences=1, sequence_length=1, clip_norm=limit)
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    given_gradients = [
        parameter.grad.clone() for parameter in parameters if parameter.grad is not None
    ]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
    for before, parameter in zip(given_gradients, parameters, strict=True):
        torch.testing.assert_close(
            before * clip_factor(section, norm), parameter.grad, rtol=1e-5, atol=0
        )


def test_without_a_bound_nothing_is_clipped() -> None:
    section = TrainingSection(global_batch_sequences=1, sequence_length=1, clip_norm=None)
    assert clip_factor(section, 1e30) == 1.0
