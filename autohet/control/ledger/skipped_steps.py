"""Committed steps that changed no weights: their causes as events, and how many come in a row."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from autohet.control.values.effects import Decision, event
from autohet.runtime.messages import Skipped, SkipReason, StepRecord

SKIPPED_FROM = "skipped_from"
"""Scalar of a manifest: the first of the skipped steps that the run ended with; null: none."""
MAX_NAMED = 3
PATIENCE_STEPS = 2
"""Number of later steps after which an event no longer waits for missing workers' reports."""


def skipped_by_vote(loss: float, gradient_norm: float) -> Skipped | None:
    """Return the skip that a vote alone shows; None if its numbers are finite."""
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return None
    return Skipped(SkipReason.NOT_FINITE, loss_not_finite=not math.isfinite(loss))


def is_skipped(record: StepRecord) -> bool:
    """Return True if the step changed no weights although the job did not request that."""
    return record.skipped is not None and record.skipped.reason is not SkipReason.REQUESTED


class SkippedSteps:
    """Collector of workers' reports on skipped steps, for one event a step.

    It also knows the skipped steps that a run ends with so far.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, Skipped]] = {}
        self._earlier: int | None = None
        self.is_empty = True
        """True while no step of this driver was skipped: then there is nothing to log or count."""
        self.first: int | None = None
        """First of the newest steps, one after the other, that changed no weights.

        None: the newest step did, or this run has trained none yet.
        """
        self.in_a_row = 0
        self.cause = ""
        """Cause of the newest skipped step."""

    def go_on_from(self, first: int | None) -> None:
        """Note that the run's checkpoint ends with skipped steps, from `first` on."""
        self._earlier = first

    def take(self, worker: str, step: int, skipped: Skipped) -> None:
        """Keep a worker's report on a skipped step; a step that is run again counts anew."""
        self.is_empty = False
        self._waiting.setdefault(step, {})[worker] = skipped

    def log_finished(
        self,
        generation: int,
        records: Mapping[int, StepRecord],
        committed: int,
        workers: Collection[str],
    ) -> Iterator[Decision]:
        """Yield the events of finished steps, and count the newest skipped steps.

        A step is finished once all `workers` have reported it, or PATIENCE_STEPS later steps are
        committed.
        """
        for step in sorted(self._waiting):
            found = self._waiting[step]
            is_complete = found.keys() >= {*workers}
            if is_complete or committed > step + PATIENCE_STEPS:
                del self._waiting[step]
                yield self._event(generation, step, found)
        self._count(records, committed)

    def finish(self, generation: int) -> Iterator[Decision]:
        """Yield the events that still wait: the run ends."""
        for step in sorted(self._waiting):
            yield self._event(generation, step, self._waiting.pop(step))

    def _count(self, records: Mapping[int, StepRecord], committed: int) -> None:
        first = committed
        while first - 1 in records and is_skipped(records[first - 1]):
            first -= 1
        self.in_a_row = 0
        self.first = None
        if first == committed:
            return
        if first - 1 not in records and self._earlier is not None:
            # All steps of this driver are skipped ones: those before its checkpoint count, too.
            first = min(first, self._earlier)
        self.in_a_row = committed - first
        self.first = first

    def _event(self, generation: int, step: int, found: Mapping[str, Skipped]) -> Decision:
        reason = next(iter(found.values())).reason
        self.cause, detail = _cause(found)
        return event(
            "skipped",
            generation,
            f"Step {step} changed no weights, since {self.cause}",
            step=step,
            reason=self.cause,
            skip=reason.value,
            causes=detail,
        )


def _cause(found: Mapping[str, Skipped]) -> tuple[str, list[dict[str, Any]]]:
    """Return the cause in words, and by worker the names of what is not finite there."""
    reason = next(iter(found.values()))
    if reason.reason is SkipReason.REQUESTED:
        return "training.skip_steps names it", []
    if reason.reason is SkipReason.GRADIENT_NORM:
        return f"its gradient norm {reason.detail} is above training.skip_gradient_norm_above", []

    detail = []
    parameters = []
    gradients = []
    for worker, skipped in sorted(found.items()):
        detail.append(
            {
                "worker": worker,
                "parameters": list(skipped.parameters),
                "gradients": list(skipped.gradients),
                "loss": skipped.loss_not_finite,
            }
        )
        parameters += [f"{name} on {worker}" for name in skipped.parameters]
        gradients += [f"{name} on {worker}" for name in skipped.gradients]
    if parameters:
        return f"weights are not finite: {_first_of(parameters)}", detail

    what = "gradients"
    if any(skipped.loss_not_finite for skipped in found.values()):
        what = "loss and gradients"
    sentence = f"{what} are not finite, all weights are"
    if gradients:
        sentence += f": {_first_of(gradients)}"
    return sentence, detail


def _first_of(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    phrase = ", ".join(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        phrase += f" and {len(names) - MAX_NAMED} more"
    return phrase
