"""Steps that earlier drivers of the same run have logged as events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToldSteps:
    """Steps of a run that have an event.

    first: the step at which the run began; steps: those with an event; checkpoint_step: the newest
    checkpoint with one.
    """

    first: int
    steps: frozenset[int]
    checkpoint_step: int | None = None

    @property
    def until(self) -> int:
        """Number of steps that are known to have been run: all before this one."""
        return max(self.steps, default=-1) + 1

    def missing(self, restored: int) -> list[int]:
        """Return the steps before `restored`, at which the run continues, that have no event."""
        if not self.steps:
            return []
        return [step for step in range(self.first, restored) if step not in self.steps]


NOTHING_TOLD = ToldSteps(0, frozenset())
