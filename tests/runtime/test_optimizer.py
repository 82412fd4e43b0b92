"""AdamW against torch.optim.AdamW and its schedule; the same bits wherever a shard lies in a worker's tensor."""

from __future__ import annotations

import math

import pytest
import torch

from autohet.runtime.job import TrainingSection
from autohet.runtime.optimizer import clip_factor, learning_rate, update

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
    return {"param/w": tensor.clone(), "exp_avg/w": torch.zeros_like(tensor), "exp_avg_sq/w": torch.zeros_like(tensor)}


def test_updates_equal_torch_adamw() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5)
    state, plain = first_state(weight), torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([plain], betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay)
    for step in range(6):
        gradient = torch.randn(7, 5)
        update(state, {"w": gradient}, SETTINGS, step, 0.5)
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
        update(whole, {"w": gradient.clone()}, SETTINGS, step, 0.37)
        update(part, {"w": gradient[start:stop].clone()}, SETTINGS, step, 0.37)
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
    torch.testing.assert_close(torch.tensor([3.0, 4.0, 0.0]) * clip_factor(SETTINGS, 5.0), parameter.grad)
    assert clip_factor(SETTINGS, 0.5) == 1.0
