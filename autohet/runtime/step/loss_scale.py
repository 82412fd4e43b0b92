"""Scale of the gradients that stages in fp16 compute with (Micikevicius et al. 2018, section 3.2).

It is a power of two, so that scaling changes no bit of a value that fp16 can hold. It follows from
the committed steps alone: an overflow halves it, and the step is run again; GROWTH_STEPS steps
without a change double it (the rule of torch.amp.GradScaler, which drops the step instead).
"""

from __future__ import annotations

from dataclasses import dataclass

LOSS_SCALE = "loss_scale"
"""Scalar of a manifest: the newest changes of the scale, as `LossScales.text` has them."""
GROWTH_STEPS = 2000
FIRST_EXPONENT = 10
"""Exponent of a run's first scale. Gradients are of the sum of a microbatch's losses, not of their
mean, so it is smaller than GradScaler's 16.
"""
LEAST_EXPONENT = -16
MOST_EXPONENT = 24
MOST_CHANGES = 16
"""Number of changes that are remembered, for steps that a run goes back to."""


@dataclass(frozen=True)
class LossScale:
    """Scale 2**exponent, in use since the step `since`."""

    since: int = 0
    exponent: int = FIRST_EXPONENT

    @property
    def factor(self) -> float:
        return float(2.0**self.exponent)

    @property
    def can_halve(self) -> bool:
        return self.exponent > LEAST_EXPONENT

    def at(self, step: int) -> LossScale:
        """Return the scale with which `step` begins, if all steps since `since` used this one."""
        if step - self.since < GROWTH_STEPS or self.exponent >= MOST_EXPONENT:
            return self
        return LossScale(step, self.exponent + 1)

    def halved(self, step: int) -> LossScale:
        """Return the scale with which `step` is run again."""
        return LossScale(step, self.exponent - 1)


FIRST_SCALE = LossScale()


class LossScales:
    """Changes of the scale in a run's present history, oldest first.

    `before` gives each step the scale that it had, also when the run goes back to it.
    """

    def __init__(self, text: str = "") -> None:
        self._changes: list[LossScale] = []
        for change in text.split():
            since, _, exponent = change.partition(":")
            self._changes.append(LossScale(int(since), int(exponent)))

    def take(self, scale: LossScale) -> None:
        """Keep the scale of the newest step.

        Later ones are of a history that the run has gone back behind.
        """
        if self._changes and self._changes[-1] == scale:
            return
        kept = [each for each in self._changes if each.since < scale.since]
        self._changes = [*kept, scale][-MOST_CHANGES:]

    def before(self, step: int) -> LossScale:
        """Return the scale in use before `step`; the first one if it is not known."""
        known = [each for each in self._changes if each.since < step]
        return known[-1] if known else FIRST_SCALE

    @property
    def text(self) -> str:
        """Changes for a manifest: `step:exponent` of each. Empty without a stage in fp16."""
        changes = [f"{each.since}:{each.exponent}" for each in self._changes]
        return " ".join(changes)
