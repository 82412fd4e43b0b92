"""Evaluation losses of a run's present history, over all of its drivers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autohet.runtime.messages import NOT_EVALUATED, EvaluationProgress

if TYPE_CHECKING:
    from autohet.runtime.job import EvaluationSection

MOST_LOSSES = 2000
"""Number of newest losses, and of lowest ones, that are kept."""


class EvaluationLog:
    """Losses by step, all on the same evaluation rows: others cannot be compared.

    rows: identity of these rows; None until it is known.
    """

    def __init__(
        self,
        section: EvaluationSection | None = None,
        losses: Mapping[int, float] | None = None,
        rows: str | None = None,
    ) -> None:
        self.section = section
        self.losses = dict(losses or {})
        self.rows = rows

    def use_rows(self, digest: str | None) -> str | None:
        """Note the digest of the evaluation rows that this run reads.

        Losses on other rows are dropped; the returned sentence says so.
        """
        if digest is None or self.section is None:
            return None
        limit = self.section.max_sequences
        rows = digest if limit is None else f"{digest} {limit}"
        before = self.rows
        self.rows = rows
        if before in (None, rows) or not self.losses:
            return None
        newest = max(self.losses)
        self.losses = {}
        return (
            f"The evaluation rows have changed: losses until step {newest} are not compared with"
            " later ones"
        )

    def take(self, step: int, loss: float) -> None:
        """Keep the loss after `step` updates."""
        self.losses[step] = loss
        if len(self.losses) > 2 * MOST_LOSSES:
            newest = sorted(self.losses)[-MOST_LOSSES:]
            kept = {*newest, *self.best_steps()[:MOST_LOSSES]}
            self.losses = {step: self.losses[step] for step in sorted(kept)}

    def go_back_to(self, step: int) -> None:
        """Forget the losses after later steps."""
        self.losses = {each: loss for each, loss in self.losses.items() if each <= step}

    def best_steps(self) -> list[int]:
        """Return the steps by their loss, lowest first; of equal ones the earlier first.

        A loss that is not finite is never among them.
        """
        return best_steps(self.losses)

    def progress(self, until: int) -> EvaluationProgress:
        """Return the progress of the evaluations until step `until`, for early stopping."""
        found = NOT_EVALUATED
        if self.section is None:
            return found
        for step in sorted(self.losses):
            if step <= until:
                found = found.after(self.losses[step], self.section)
        return found

    def ends_run(self, step: int) -> bool:
        """Return True if the evaluation after `step` updates ends the run early."""
        if self.section is None or step not in self.losses:
            return False
        return self.progress(step).ends_run(self.section)

    @property
    def early_end_reason(self) -> str:
        """Reason of a run's end that early stopping has decided."""
        best = self.best_steps()[0]
        assert self.section is not None
        return (
            f"stopped early, since {self.section.early_stopping_patience} evaluations in a row"
            f" brought no improvement; the lowest loss is {self.losses[best]:.4f} after step {best}"
        )

    @property
    def document(self) -> dict[str, Any]:
        """Content of the log as JSON, in the order of steps."""
        losses = {str(step): self.losses[step] for step in sorted(self.losses)}
        return {"rows": self.rows, "losses": losses}


def best_steps(losses: Mapping[int, float]) -> list[int]:
    """Return the steps of finite losses, lowest first; of equal ones the earlier first."""
    finite = [step for step, loss in losses.items() if math.isfinite(loss)]
    return sorted(finite, key=lambda step: (losses[step], step))
