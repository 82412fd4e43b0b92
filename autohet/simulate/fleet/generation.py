"""SIMULATED generation: its workers do the same, so one clock serves them all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autohet.runtime.messages import GenerationOrder, Phase, StepRecord
from autohet.simulate.trained_span import TrainedSpan

MOVING = (Phase.BUILDING, Phase.TRAINING)
MOST_UPLOADS = 2
"""Maximum checkpoints that are in flight or newly done between two looks of the controller.

Older ones are of no interest.
"""


@dataclass(frozen=True)
class SimulatedJob:
    """Settings of the simulated job.

    every_steps: steps between two checkpoints; None: the controller requests each. settle_s:
    seconds for which the controller gathers arrivals. replication_share: part of a node's network
    for copies to other nodes. end_s: nothing happens after it. last_step: number of steps after
    which the workers finish. on_cpu: groups are connected while the generation before trains.
    """

    every_steps: int | None
    settle_s: float
    replication_share: float = 0.25
    tokens_by_step: int = 0
    end_s: float = math.inf
    last_step: float = math.inf
    on_cpu: bool = False


@dataclass
class SimulatedGeneration:
    """Progress of the workers of one generation: they build, train and stop together."""

    orders: Mapping[str, GenerationOrder]
    order: GenerationOrder
    """Order of one of them."""
    ready_at: float
    step_s: float
    upload_s: float
    push_s: float
    span: TrainedSpan
    phase: Phase = Phase.BUILDING
    step: int = 0
    step_ends_at: float = math.inf
    stop: bool = False
    upload: bool = False
    """True if the step after which all stop is uploaded."""
    saves: bool = False
    """True if a checkpoint was requested that has not begun."""
    members: frozenset[str] = frozenset()
    first_member: str = ""
    records: list[StepRecord] = field(default_factory=list)
    uploads: list[tuple[float, int]] = field(default_factory=list)
    """Uploaded checkpoints, as (second of the upload's end, step)."""

    def due(self, now: float, due_in_steps: int | None, last_step: float) -> list[float]:
        """Return the times of events that the controller waits for, but the end of the building.

        They are the ends of uploads, the step after which all stand, the first step of a change,
        which ends it, the last step, and the step after `due_in_steps` steps: a checkpoint is
        requested then.
        """
        moments = []
        if self.phase is Phase.TRAINING and last_step < math.inf:
            moments.append(self.step_ends_at + (last_step - self.step - 1) * self.step_s)
        if self.phase is Phase.TRAINING and due_in_steps is not None:
            moments.append(self.step_ends_at + max(0, due_in_steps - 1) * self.step_s)
        is_awaited = self.stop or self.step == self.order.start_step
        if self.phase is Phase.TRAINING and is_awaited:
            moments.append(self.step_ends_at)
        moments += [ends_at for ends_at, _ in self.uploads if ends_at > now]
        return moments

    def is_at(self, step: float) -> bool:
        """Return True if it trains, and has committed the updates before this step."""
        return self.phase is Phase.TRAINING and self.step >= step

    def make_steps(self, moment: float, job: SimulatedJob, before: float) -> bool:
        """Make the steps that end until `moment`, all at once; return True if any was made.

        Only the records of the first and the last of these steps are kept. before: step at which
        the next generation begins.
        """
        if self.phase is not Phase.TRAINING or self.step_ends_at > moment:
            return False
        number = 1
        if not self.stop:
            number += int((moment - self.step_ends_at) / self.step_s)
        number = int(min(number, job.last_step - self.step, before - self.step))
        first = self.step
        first_ended_at = self.step_ends_at
        self.step += number
        self.step_ends_at += number * self.step_s
        self.span.num_steps = self.step - self.order.start_step

        self._record_steps(first, first_ended_at, job.tokens_by_step)
        if job.every_steps is None:
            self._begin_requested_upload(first, first_ended_at)
        else:
            self._begin_uploads(first, first_ended_at, job.every_steps)
        is_last = self.step >= job.last_step
        if self.stop or is_last:
            self.phase = Phase.FINISHED if is_last else Phase.STOPPED
            is_uploaded = any(step == self.step for _, step in self.uploads)
            if (self.upload or is_last) and not is_uploaded:
                ended_at = first_ended_at + (number - 1) * self.step_s
                self.uploads.append((ended_at + self.upload_s, self.step))
        return True

    def _record_steps(self, first: int, first_ended_at: float, tokens: int) -> None:
        """Record the step `first` and the last one, which is the same if only one was made."""
        for step in sorted({first, self.step - 1}):
            ended_at = first_ended_at + (step - first) * self.step_s
            generation = self.order.generation
            record = StepRecord(step, 0.0, 0.0, tokens, self.step_s, generation, ended_at)
            self.records.append(record)

    def _begin_uploads(self, first: int, first_ended_at: float, every_steps: int) -> None:
        """Begin to upload the newest checkpoints that are due since the step `first`."""
        last_due = self.step // every_steps
        first_due = max(first // every_steps, last_due - MOST_UPLOADS) + 1
        for checkpoint in range(first_due, last_due + 1):
            step = checkpoint * every_steps
            # The state of `step` is there when the step before it has ended.
            begun_at = first_ended_at + (step - 1 - first) * self.step_s
            self.uploads.append((begun_at + self.upload_s, step))

    def _begin_requested_upload(self, first: int, first_ended_at: float) -> None:
        """Begin to upload the first step from `first` on that ends once no upload is in flight."""
        if not self.saves:
            return
        free_at = max((ends_at for ends_at, _ in self.uploads), default=0.0)
        later = max(0, math.ceil((free_at - first_ended_at) / self.step_s))
        if first + later < self.step:
            self.saves = False
            begun_at = first_ended_at + later * self.step_s
            self.uploads.append((begun_at + self.upload_s, first + later + 1))

    def drop_news(self, now: float) -> None:
        """Drop the records and finished uploads that the controller has seen."""
        self.records = []
        self.uploads = [(ends_at, step) for ends_at, step in self.uploads if ends_at > now]
