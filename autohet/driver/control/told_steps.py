"""Steps that earlier drivers of the same run have told of in its events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToldSteps:
    """first: the step at which the run began; steps: those with an event; checkpoint_step: the
    newest checkpoint with one.
    """

    first: int
    steps: frozenset[int]
    checkpoint_step: int | None = None

    @property
    def until(self) -> int:
        """Steps before this one are known to have been run."""
        return max(self.steps, default=-1) + 1

    def missing(self, restored: int) -> list[int]:
        """Steps of a run that goes on at step `restored` that no event tells of."""
        if not self.steps:
            return []
        return [step for step in range(self.first, restored) if step not in self.steps]


NOTHING_TOLD = ToldSteps(0, frozenset())
