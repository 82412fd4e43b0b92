"""Reconfiguration from its cause to its first step: the time each part ended, and the cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autohet.runtime.messages import RestoreRecord
    from planner.plans.plan import Plan


@dataclass(frozen=True)
class Timing:
    """Seconds of a complete change's parts.

    is_move: False for the first start, which moves no state. fixed_s: seconds without its bytes,
    which are those of rebuilding groups, and of the first step beyond what a step takes anyway.
    """

    is_move: bool
    replan_s: float
    rebuild_s: float
    restore_s: float
    first_step_s: float
    fixed_s: float


@dataclass
class Change:
    """Reconfiguration under way.

    Times are on the controller's clock; the controller fills them in as they pass.
    """

    cause: str
    nodes: tuple[str, ...]
    happened_at: float
    detected_at: float
    step_before: int
    plan_before: Plan | None
    reason: str = ""
    plan_after: Plan | None = None
    predicted_step_s: float | None = None
    restore_step: int | None = None
    stood_at: float | None = None
    replan_s: float = 0.0
    begun_at: float | None = None
    ready_at: float | None = None
    first_step_at: float | None = None
    last_step_at: float | None = None
    """End of the last step before it; None: this driver has seen none."""
    generation: int = 0
    """Generation that it began; 0 until then."""
    step_s: float | None = None
    """Usual seconds of a step of that generation, as far as they are known."""
    step_before_s: float | None = None
    """Usual seconds of a step of the generation before it."""
    usd_per_hour: float | None = None
    """Price of the fleet at its first step; None: unknown."""
    attempts: int = 0
    kept_share: float = 0.0
    """Share of the rows of the step that a death broke off whose passes are kept."""
    restores: dict[str, RestoreRecord] = field(default_factory=dict)

    @property
    def steps_lost(self) -> int:
        """Number of committed steps that must be run again."""
        if self.restore_step is None:
            return 0
        return max(0, self.step_before - self.restore_step)

    @property
    def is_complete(self) -> bool:
        """True once the first step after it has been taken."""
        return self.first_step_at is not None

    def expect_step(self, predicted_before_s: float | None, before_s: float | None) -> None:
        """Expect the new plan's steps to miss their prediction as those before it did.

        predicted_before_s, before_s: seconds of a step before it; None where they are unknown.
        """
        self.step_before_s = before_s
        self.step_s = self.predicted_step_s
        if self.step_s is not None and predicted_before_s and before_s:
            self.step_s *= before_s / predicted_before_s

    @property
    def redone_s(self) -> float:
        """Seconds of work that was lost: of lost steps, and of the step that a death broke off.

        Of the latter, the share of the rows that are run again.
        """
        broken_off_s = (1.0 - self.kept_share) * self._broken_off_s
        return self.steps_lost * (self.step_before_s or 0.0) + broken_off_s

    @property
    def _broken_off_s(self) -> float:
        """Seconds of the step that a death broke off, unless survivors rolled over it."""
        ran_on = self.restore_step is not None and self.restore_step > self.step_before
        if self.cause != "death" or self.last_step_at is None or ran_on:
            return 0.0
        return max(0.0, self.happened_at - self.last_step_at)

    @property
    def stalled_s(self) -> float:
        """Seconds from the last step's end to the next one's, without its usual time.

        Work that a death broke off is no part of it.
        """
        if self.first_step_at is None or self.last_step_at is None:
            return 0.0
        passed_s = self.first_step_at - self.last_step_at
        num_steps = 1 + max(0, (self.restore_step or 0) - self.step_before)
        # What was done before the death is a part of a step that goes on.
        broken_off_s = 0.0 if self.kept_share else self._broken_off_s
        return max(0.0, passed_s - num_steps * (self.step_s or 0.0) - broken_off_s)

    @property
    def usd_lost(self) -> float | None:
        """Price of the fleet while it stalled or did work that was lost; None: unknown."""
        if self.usd_per_hour is None:
            return None
        return round((self.stalled_s + self.redone_s) * self.usd_per_hour / 3600, 6)

    def timing(self) -> Timing:
        """Return what its parts took, for the expectations of later changes."""
        parts = self.seconds()
        step_s = self.predicted_step_s or 0.0
        return Timing(
            is_move=self.cause != "start",
            replan_s=parts["replan"],
            rebuild_s=parts["rebuild"],
            restore_s=parts["restore"],
            first_step_s=parts["first_step"],
            fixed_s=parts["rebuild"] + max(0.0, parts["first_step"] - step_s),
        )

    @property
    def is_told(self) -> bool:
        """True if this counts as a reconfiguration.

        The first start does not count; a restart of the driver that cost steps does.
        """
        return self.cause != "start" or self.steps_lost > 0

    def overtaken(
        self, nodes: Collection[str], happened_at: float, now: float, reason: str
    ) -> None:
        """Turn this change into a death's: a worker died before its first step.

        It is timed from that death, or from the moment at which all workers stood for it.
        """
        if self.cause != "death":
            if self.stood_at is None:
                self.nodes = ()
                self.happened_at = happened_at
                self.detected_at = now
            else:
                self.happened_at = self.stood_at
                self.detected_at = self.stood_at
        self.cause = "death"
        self.reason = reason
        self.happened_at = min(self.happened_at, happened_at)
        self.nodes = tuple(sorted({*self.nodes, *nodes}))

    def bytes_by_tier(self) -> dict[str, int]:
        """Return the bytes that all workers restored, by the tier that they came from."""
        total: Counter[str] = Counter(memory=0, disk=0, peer=0, s3=0)
        for record in self.restores.values():
            total.update(record.bytes_by_tier)
        return dict(total)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part of the time without a step.

        `detect` runs from the last sign of life of the lost workers. After a notice or an arrival
        training continues until all workers stand, so `total` starts at that moment. `stalled` and
        `redone` are what the change cost beside the steps that count.
        """
        restore = max((record.restore_s for record in self.restores.values()), default=0.0)
        stood = self.detected_at if self.stood_at is None else self.stood_at
        ready = self.ready_at or stood
        first = self.first_step_at or ready
        if self.cause == "death":
            start = self.happened_at
            detect = self.detected_at - self.happened_at
            rebuild = max(0.0, ready - start - detect - self.replan_s - restore)
        else:
            # The search ran while training continued: it is no part of the time without a step.
            start = stood
            detect = 0.0
            rebuild = max(0.0, ready - stood - restore)
        parts = {
            "detect": detect,
            "replan": self.replan_s,
            "rebuild": rebuild,
            "restore": restore,
            "first_step": first - ready,
            "total": first - start,
            "stalled": self.stalled_s,
            "redone": self.redone_s,
        }
        return {name: round(value, 4) for name, value in parts.items()}

    def to_document(self) -> dict[str, Any]:
        """Return the entry of `reconfigurations` in the summary."""
        plan_before = None
        if self.plan_before is not None:
            plan_before = self.plan_before.to_document()
        plan_after = None
        if self.plan_after is not None:
            plan_after = self.plan_after.to_document()
        return {
            "cause": self.cause,
            "nodes": list(self.nodes),
            "reason": self.reason,
            "step": self.restore_step,
            "plan_before": plan_before,
            "plan_after": plan_after,
            "predicted_step_s": self.predicted_step_s,
            "steps_lost": self.steps_lost,
            "bytes_by_tier": self.bytes_by_tier(),
            "seconds": self.seconds(),
            "usd_lost": self.usd_lost,
            "attempts": self.attempts,
        }
