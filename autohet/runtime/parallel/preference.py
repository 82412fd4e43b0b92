"""Direct preference optimization (Rafailov et al. 2023, equation 7) of rows of two answers each.

With c and r the log-probabilities of a row's chosen and rejected answer, and c', r' those of the
reference, the row's loss is -log sigmoid(beta * ((c - c') - (r - r'))). The reference is the stage
without its adapters. Its forward passes, without gradients, precede those of the step.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class AnswerStage(Protocol):
    """Last stage of a pipeline, as the loss needs it."""

    def answer_losses(self, x: Tensor, targets: Tensor, begins: Tensor) -> Tensor:
        """Return the summed cross entropy of each row's two answers, fp32 [b, 2]."""


class PreferenceLoss:
    """Loss of one step's pairs, on a last stage.

    sums: those of a vote (`step.votes.Vote`) that this loss adds to, as float64 scalars by name.
    The reward of an answer is beta * (c - c').
    """

    def __init__(self, beta: float, device: torch.device) -> None:
        self.beta = beta
        self._device = device
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
        self._reference[m] = stage.answer_losses(x, targets, begins)

    def loss(
        self, m: int, stage: AnswerStage, x: Tensor, targets: Tensor, begins: Tensor
    ) -> Tensor:
        """Return the sum of losses of microbatch m's pairs, and add the pairs to `sums`."""
        reference = self._reference.pop(m)
        answers = stage.answer_losses(x, targets, begins)
        # Losses are negative log-probabilities, so c - c' is the reference's loss less the model's.
        rewards = self.beta * (reference - answers).double()
        margins = rewards[:, 0] - rewards[:, 1]
        # Rows [b] that hold a pair.
        has_target = (targets >= 0).any(dim=-1)
        counted = has_target.double()
        known = margins.detach() * counted
        self.sums["pairs"] = self.sums["pairs"] + counted.sum()
        self.sums["preferred"] = self.sums["preferred"] + (known > 0).sum()
        self.sums["reward_margin_sum"] = self.sums["reward_margin_sum"] + known.sum()
        agreement = F.logsigmoid(margins) * counted
        return -agreement.sum()
