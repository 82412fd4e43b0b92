"""The loss of preferences against its formula, on any cut of the last stage's rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autohet.runtime.models.layers.pieces import answer_lengths
from autohet.runtime.parallel.preference import PreferenceLoss

CPU = torch.device("cpu")


def begins_of(*starts: tuple[int, ...], length: int = 8) -> Tensor:
    begins = torch.zeros(len(starts), length, dtype=torch.bool)
    for row, places in zip(begins, starts, strict=True):
        row[list(places)] = True
    return begins


def test_a_row_is_two_answers_and_the_rest() -> None:
    begins = begins_of((0, 3, 5), (0, 4), (0,))
    assert answer_lengths(begins) == [[3, 2, 3], [4, 4, 0], [8, 0, 0]]


class Answers:
    """A stage whose answers have given losses."""

    def __init__(self, losses: Tensor) -> None:
        self.losses = losses

    def answer_losses(self, x: Tensor, targets: Tensor, begins: Tensor) -> Tensor:
        return self.losses


def test_loss_rewards_and_gradient_are_those_of_the_formula() -> None:
    beta = 0.3
    reference = torch.tensor([[5.0, 4.0], [2.0, 9.0], [1.0, 1.0]])
    losses = torch.tensor([[4.0, 6.0], [3.0, 8.0], [7.0, 7.0]], requires_grad=True)
    targets = torch.tensor([[1, -100], [-100, 2], [-100, -100]])  # the last row holds no pair
    begins = begins_of((0,), (0,), (0,), length=2)
    loss = PreferenceLoss(beta, CPU)
    loss.begin()
    loss.keep_reference(0, Answers(reference), targets, targets, begins)
    total = loss.loss(0, Answers(losses), targets, targets, begins)
    margins = beta * torch.tensor([(5 - 4) - (4 - 6), (2 - 3) - (9 - 8)], dtype=torch.float64)
    torch.testing.assert_close(total, -F.logsigmoid(margins).sum())
    found = {name: total.item() for name, total in loss.sums.items()}
    assert found == pytest.approx(
        {"pairs": 2, "preferred": 1, "reward_margin_sum": margins.sum().item()}
    )
    total.backward()
    slopes = (beta * torch.sigmoid(-margins)).float()
    expected = torch.stack([slopes, -slopes], dim=1)
    assert losses.grad is not None
    torch.testing.assert_close(losses.grad[:2], expected)
    assert losses.grad[2].tolist() == [0.0, 0.0]
