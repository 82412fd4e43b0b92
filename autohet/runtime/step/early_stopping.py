"""Early stopping: a function of the run's evaluation losses alone, the same at all workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autohet.runtime.job.data import EvaluationSection

EVALUATIONS = "evaluations.json"
"""Object of a job's storage with the losses of its evaluations, by step."""


@dataclass(frozen=True)
class EvaluationProgress:
    """Lowest loss of a run's evaluations so far, and the evaluations since the last improvement.

    As transformers' EarlyStoppingCallback, except that a loss that is NaN is no improvement.
    """

    lowest: float = math.inf
    num_without_improvement: int = 0

    def after(self, loss: float, section: EvaluationSection) -> EvaluationProgress:
        """Return the progress after one more evaluation."""
        if loss < self.lowest - section.early_stopping_threshold:
            return EvaluationProgress(loss)
        lowest = loss if loss < self.lowest else self.lowest
        return EvaluationProgress(lowest, self.num_without_improvement + 1)

    def ends_run(self, section: EvaluationSection) -> bool:
        """Return True if the run ends with this evaluation."""
        patience = section.early_stopping_patience
        return patience is not None and self.num_without_improvement >= patience


NOT_EVALUATED = EvaluationProgress()

__all__ = ["EVALUATIONS", "NOT_EVALUATED", "EvaluationProgress"]
