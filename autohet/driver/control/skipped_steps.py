"""Committed steps that changed no weights: their causes as events, and how many come in a row."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from autohet.driver.control.decisions import Untold
from autohet.runtime.messages import Skipped, SkipReason, StepRecord

SKIPPED_FROM = "skipped_from"
"""Scalar of a manifest: the first of the skipped steps that the run ended with; null: none."""
MAX_NAMED = 3
PATIENCE_STEPS = 2
"""Later steps after which an event does not wait any more for workers that have not reported."""


def is_skipped(record: StepRecord) -> bool:
    """Whether the step changed no weights, though nobody asked for that."""
    if record.skipped is not None:
        return record.skipped.reason is not SkipReason.REQUESTED
    return not (math.isfinite(record.loss) and math.isfinite(record.gradient_norm))


class SkippedSteps:
    """Collects what each worker says of a skipped step, for one event a step, and knows the skipped
    steps that a run ends with so far.
    """

    def __init__(self, untold: Untold) -> None:
        self._untold = untold
        self._waiting: dict[int, dict[str, Skipped]] = {}
        self._earlier: int | None = None
        self.first: int | None = None
        """The first of the newest steps that changed no weights, one after the other; None: the
        newest step did, or this run has trained none yet.
        """
        self.in_a_row = 0
        self.cause = ""
        """Of the newest skipped step."""

    def go_on_from(self, first: int | None) -> None:
        """The checkpoint that the run goes on from ends with skipped steps, from `first` on."""
        self._earlier = first

    def take(self, worker: str, record: StepRecord) -> None:
        """Keep what a worker says of a step; of a step that is run again it counts anew."""
        if record.skipped is not None:
            self._waiting.setdefault(record.step, {})[worker] = record.skipped

    def look(
        self,
        generation: int,
        records: Mapping[int, StepRecord],
        committed: int,
        workers: Collection[str],
    ) -> None:
        """Emit events of steps that all `workers` have reported, or that are long gone, and count
        the newest skipped steps.
        """
        for step in sorted(self._waiting):
            found = self._waiting[step]
            if found.keys() >= {*workers} or committed > step + PATIENCE_STEPS:
                del self._waiting[step]
                self._emit(generation, step, found)
        self._count(records, committed)

    def finish(self, generation: int) -> None:
        """Emit the events that still wait: the run ends."""
        for step in sorted(self._waiting):
            self._emit(generation, step, self._waiting.pop(step))

    def _count(self, records: Mapping[int, StepRecord], committed: int) -> None:
        first = committed
        while first - 1 in records and is_skipped(records[first - 1]):
            first -= 1
        self.in_a_row, self.first = 0, None
        if first == committed:
            return
        if first - 1 not in records and self._earlier is not None:
            first = min(first, self._earlier)
        self.in_a_row, self.first = committed - first, first

    def _emit(self, generation: int, step: int, found: Mapping[str, Skipped]) -> None:
        reason = next(iter(found.values())).reason
        self.cause, detail = _cause(found)
        self._untold.add(
            "skipped",
            generation,
            f"Step {step} changed no weights, since {self.cause}",
            step=step,
            reason=self.cause,
            skip=reason.value,
            causes=detail,
        )


def _cause(found: Mapping[str, Skipped]) -> tuple[str, list[dict[str, Any]]]:
    """The cause in words, and by worker the names of what is not finite there."""
    reason = next(iter(found.values()))
    if reason.reason is SkipReason.REQUESTED:
        return "training.skip_steps names it", []
    if reason.reason is SkipReason.GRADIENT_NORM:
        return f"its gradient norm {reason.detail} is above training.skip_gradient_norm_above", []
    detail = [
        {
            "worker": worker,
            "parameters": list(each.parameters),
            "gradients": list(each.gradients),
            "loss": each.loss_not_finite,
        }
        for worker, each in sorted(found.items())
    ]
    broken = {w: each.parameters for w, each in sorted(found.items()) if each.parameters}
    if broken:
        return f"weights are not finite: {_named(broken)}", detail
    gradients = {w: each.gradients for w, each in sorted(found.items()) if each.gradients}
    what = "loss and gradients" if any(s.loss_not_finite for s in found.values()) else "gradients"
    if gradients:
        return f"{what} are not finite, all weights are: {_named(gradients)}", detail
    return f"{what} are not finite, all weights are", detail


def _named(by_worker: Mapping[str, tuple[str, ...]]) -> str:
    named = [f"{name} on {worker}" for worker, names in by_worker.items() for name in names]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return ", ".join(named[:MAX_NAMED]) + more
