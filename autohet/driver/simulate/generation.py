"""SIMULATED generation: its workers do the same, so one clock serves them all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autohet.driver.simulate.trained_span import TrainedSpan
from autohet.runtime.messages import GenerationOrder, Phase, StepRecord

MOVING = (Phase.BUILDING, Phase.TRAINING)
MOST_UPLOADS = 2
"""Maximum checkpoints that are in flight or newly done between two looks of the controller.

Older ones are of no interest.
"""


@dataclass(frozen=True)
class SimulatedJob:
    """Settings of the simulated job.

    every_steps: steps between two checkpoints. settle_s: seconds for which the controller gathers
    arrivals. replication_share: part of a node's network for copies to other nodes. end_s: nothing
    happens after it.
    """

    every_steps: int
    settle_s: float
    replication_share: float = 0.25
    tokens_by_step: int = 0
    end_s: float = math.inf


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
    members: frozenset[str] = frozenset()
    first_member: str = ""
    records: list[StepRecord] = field(default_factory=list)
    uploads: list[tuple[float, int]] = field(default_factory=list)
    """Uploaded checkpoints, as (second of the upload's end, step)."""

    def due(self, now: float) -> list[float]:
        """Return the times of events that the controller waits for, but the end of the building.

        They are the ends of uploads, the step after which all stand, and the first step of a
        change, which ends it.
        """
        awaited = self.stop or self.step == self.order.start_step
        moments = [self.step_ends_at] if self.phase is Phase.TRAINING and awaited else []
        return moments + [at for at, _ in self.uploads if at > now]

    def make_steps(self, moment: float, job: SimulatedJob) -> bool:
        """Make the steps that end until `moment`, all at once; return True if any was made.

        Only the records of the first and the last of these steps are kept.
        """
        if self.phase is not Phase.TRAINING or self.step_ends_at > moment:
            return False
        number = 1 if self.stop else 1 + int((moment - self.step_ends_at) / self.step_s)
        first = self.step
        ended_at = self.step_ends_at
        self.step += number
        self.step_ends_at += number * self.step_s
        for step in sorted({first, self.step - 1}):
            at = ended_at + (step - first) * self.step_s
            self.records.append(
                StepRecord(
                    step, 0.0, 0.0, job.tokens_by_step, self.step_s, self.order.generation, at
                )
            )
        last = self.step // job.every_steps
        due = range(max(first // job.every_steps, last - MOST_UPLOADS) + 1, last + 1)
        for checkpoint in due:
            step = checkpoint * job.every_steps
            begun_at = ended_at + (step - 1 - first) * self.step_s
            self.uploads.append((begun_at + self.upload_s, step))
        self.span.num_steps = self.step - self.order.start_step
        if self.stop:
            self.phase = Phase.STOPPED
            if self.upload and self.step % job.every_steps:
                self.uploads.append((ended_at + self.upload_s, self.step))
        return True

    def drop_news(self, now: float) -> None:
        """Drop the records and finished uploads that the controller has seen."""
        self.records = []
        self.uploads = [upload for upload in self.uploads if upload[0] > now]
