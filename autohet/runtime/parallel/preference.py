"""Losses of preferences: of rows of two answers each.

With c and r the log-probabilities of a row's chosen and rejected answer, and c', r' those of a
reference, DPO's loss of the row (Rafailov et al. 2023, equation 7) is
-log sigmoid(beta * ((c - c') - (r - r'))). The reference is the stage as the run began. Its
forward passes, without gradients, precede those of the step.

ORPO (Hong et al. 2024, equations 6 and 7) has no reference. With c and r the means over an answer's
tokens, its loss is n - beta * log sigmoid(odds(c) - odds(r)), where odds(l) = l - log(1 - e^l), and
n is the mean cross entropy of the tokens of the chosen answer and its prompt, as in its authors'
code and in TRL.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from autohet.runtime.models.layers.loss_terms import AnswerLosses


class AnswerStage(Protocol):
    """Last stage of a pipeline, as the losses need it."""

    def answer_losses(
        self, x: Tensor, targets: Tensor, begins: Tensor, tokens: Tensor | None = None
    ) -> AnswerLosses:
        """Return the cross entropy of each row's answers; tokens: with that of the prompts."""


class PreferenceLoss(ABC):
    """Loss of one step's pairs, on a last stage.

    sums: those of a vote (`step.votes.Vote`) that this loss adds to, as float64 scalars by name.
    first_weights: first values of trained parameters, with which the reference computes; empty: it
    is the stage without its adapters.
    """

    has_reference: bool
    """True if `keep_reference` is called with each microbatch before the step's passes."""

    def __init__(self, beta: float, device: torch.device) -> None:
        self.beta = beta
        self._device = device
        self.first_weights: Mapping[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self._reference: dict[int, Tensor] = {}
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self.sums = {"pairs": zero, "preferred": zero, "reward_margin_sum": zero}

    def keep_reference(
        self, m: int, stage: AnswerStage, x: Tensor, targets: Tensor, begins: Tensor
    ) -> None:
        """Compute and keep what the reference says of microbatch m's answers."""
        self._reference[m] = stage.answer_losses(x, targets, begins).sums

    @abstractmethod
    def loss(
        self, m: int, stage: AnswerStage, x: Tensor, batch: tuple[Tensor, Tensor], begins: Tensor
    ) -> Tensor:
        """Return the sum of losses of microbatch m's pairs, and add the pairs to `sums`.

        batch: its tokens and targets.
        """

    def _count(self, rewards: Tensor, targets: Tensor) -> Tensor:
        """Add the pairs to `sums`, by the rewards [b, 2]; return which rows hold one, float64."""
        counted = (targets >= 0).any(dim=-1).double()
        margins = (rewards[:, 0] - rewards[:, 1]).detach() * counted
        self.sums["pairs"] = self.sums["pairs"] + counted.sum()
        self.sums["preferred"] = self.sums["preferred"] + (margins > 0).sum()
        self.sums["reward_margin_sum"] = self.sums["reward_margin_sum"] + margins.sum()
        return counted


class DpoLoss(PreferenceLoss):
    """The reward of an answer is beta * (c - c')."""

    has_reference = True

    def loss(
        self, m: int, stage: AnswerStage, x: Tensor, batch: tuple[Tensor, Tensor], begins: Tensor
    ) -> Tensor:
        _, targets = batch
        reference = self._reference.pop(m)
        answers = stage.answer_losses(x, targets, begins).sums
        # Losses are negative log-probabilities, so c - c' is the reference's loss less the model's.
        rewards = self.beta * (reference - answers).double()
        counted = self._count(rewards, targets)
        agreement = F.logsigmoid(rewards[:, 0] - rewards[:, 1]) * counted
        return -agreement.sum()


class OrpoLoss(PreferenceLoss):
    """The reward of an answer is beta * c."""

    has_reference = False

    def loss(
        self, m: int, stage: AnswerStage, x: Tensor, batch: tuple[Tensor, Tensor], begins: Tensor
    ) -> Tensor:
        tokens, targets = batch
        found = stage.answer_losses(x, targets, begins, tokens)
        assert found.prompt is not None
        assert found.prompt_counts is not None
        means = -found.sums.double() / found.counts.clamp(min=1)
        counted = self._count(self.beta * means, targets)
        # A row without a pair has probabilities of 1, whose odds are infinite.
        means = torch.where(counted.bool().unsqueeze(1), means, -1.0)
        odds = means - _log_of_rest(means)
        agreement = F.logsigmoid(odds[:, 0] - odds[:, 1])
        num_tokens = (found.counts[:, 0] + found.prompt_counts).clamp(min=1)
        entropy = (found.sums[:, 0] + found.prompt).double() / num_tokens
        return ((entropy - self.beta * agreement) * counted).sum()


def _log_of_rest(logs: Tensor) -> Tensor:
    """Return log(1 - e^l) of logarithms below 0, without cancellation (Maechler 2012)."""
    by_expm1 = torch.log(-torch.expm1(logs))
    by_log1p = torch.log1p(-torch.exp(logs))
    return torch.where(logs > -math.log(2.0), by_expm1, by_log1p)


LOSSES: Mapping[str, type[PreferenceLoss]] = {"dpo": DpoLoss, "orpo": OrpoLoss}
"""Loss of preferences by `training.objective`."""
