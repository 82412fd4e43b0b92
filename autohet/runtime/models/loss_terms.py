"""What a training loss has beside plain cross entropy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossTerms:
    """Of each counted target:

        (1 - label_smoothing) * nll + label_smoothing * mean over the vocabulary of -log p
            + z_loss * (log of the sum of exponentials)^2

    label_smoothing: as `torch.nn.functional.cross_entropy` has it. z_loss: as in PaLM (Chowdhery et
    al., 2022, section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = LossTerms()
"""Cross entropy alone, of evaluation and of most training."""

__all__ = ["PLAIN", "LossTerms"]
