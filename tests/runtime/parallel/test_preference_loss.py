"""The losses of preferences against their formula, and TRL's on whole models."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from trl.experimental.orpo import ORPOTrainer

from autohet.runtime.models.layers.loss_terms import AnswerLosses
from autohet.runtime.models.layers.pieces import answer_lengths
from autohet.runtime.parallel.preference import DpoLoss, OrpoLoss
from autohet.runtime.step.reference import reference_model
from tests.harness.tiny_models import random_parameters, stage_chain, tiny_config

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

    def answer_losses(self, *_: Any) -> AnswerLosses:
        return AnswerLosses(self.losses, torch.ones_like(self.losses).long())


def test_loss_rewards_and_gradient_are_those_of_the_formula() -> None:
    beta = 0.3
    reference = torch.tensor([[5.0, 4.0], [2.0, 9.0], [1.0, 1.0]])
    losses = torch.tensor([[4.0, 6.0], [3.0, 8.0], [7.0, 7.0]], requires_grad=True)
    targets = torch.tensor([[1, -100], [-100, 2], [-100, -100]])  # the last row holds no pair
    begins = begins_of((0,), (0,), (0,), length=2)
    loss = DpoLoss(beta, CPU)
    loss.begin()
    loss.keep_reference(0, Answers(reference), targets, targets, begins)
    total = loss.loss(0, Answers(losses), targets, (targets, targets), begins)
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


PAIRS = [((3, 4), (3, 2)), ((2, 5), (2, 6)), ((4, 1), (4, 3))]
"""Tokens of the prompt and of the answer, of each row's chosen and rejected piece."""
LENGTH = 24


def rows_of_pairs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and begins [4, LENGTH]; the last row holds no pair."""
    drawn = torch.randint(0, 60, (4, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    counted = torch.zeros(drawn.shape, dtype=torch.bool)
    begins = torch.zeros(4, LENGTH, dtype=torch.bool)
    begins[:, 0] = True
    for row, pieces in enumerate(PAIRS):
        place = 0
        for prompt, answer in pieces:
            counted[row, place + prompt : place + prompt + answer] = True
            place += prompt + answer
            begins[row, place] = True
    targets = drawn[:, 1:].masked_fill(~counted[:, 1:], -100)
    return drawn[:, :-1], targets, begins


def trl_orpo(beta: float, model: Any, tokens: Tensor) -> Tensor:
    """The sum of TRL's losses of the pairs, each a batch of its own."""
    trainer = ORPOTrainer.__new__(ORPOTrainer)
    trainer.beta = beta
    trainer.is_encoder_decoder = trainer.aux_loss_enabled = False
    trainer.padding_value = 0
    trainer.accelerator = SimpleNamespace(device=CPU, gather_for_metrics=lambda each: each)
    total = torch.zeros(())
    for row, pieces in zip(tokens, PAIRS, strict=False):
        place = 0
        batch = {}
        for name, (prompt, answer) in zip(("chosen", "rejected"), pieces, strict=True):
            ids = row[place : place + prompt + answer].unsqueeze(0)
            place += prompt + answer
            batch[f"{name}_input_ids"] = ids
            batch[f"{name}_attention_mask"] = torch.ones_like(ids)
            batch[f"{name}_labels"] = ids.clone()
            batch[f"{name}_labels"][:, :prompt] = -100
        total = total + trainer.get_batch_loss_metrics(model, batch)[0]
    return total


def test_orpo_and_its_gradients_are_those_of_trl() -> None:
    """Wrong: the prompt is left out of the entropy, sums stand for means, the odds have a sign."""
    config = tiny_config("llama")
    parameters = random_parameters(config)
    (stage,) = stage_chain(config, parameters, [3])
    tokens, targets, begins = rows_of_pairs()
    loss = OrpoLoss(0.3, CPU)
    total = loss.loss(0, stage, tokens, (tokens, targets), begins)
    total.backward()
    model = reference_model(config, iter(parameters.items()))
    expected = trl_orpo(0.3, model, tokens)
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.sums["pairs"].item() == 3
    theirs = dict(model.named_parameters())
    for name, parameter in stage.weights.local_parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)
