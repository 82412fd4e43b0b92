"""Training of one generation: its steps, the evaluations that are due, and copies of the state."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import torch

from autohet.runtime.copies.preservation import Preservation
from autohet.runtime.job import Job
from autohet.runtime.messages import EvaluationRecord, GenerationOrder, Phase, StepRecord
from autohet.runtime.process.step_profile import StepProfiler
from autohet.runtime.step.batches import Batches, EvaluationRows
from autohet.runtime.step.step_commit import EvaluationEnded, StepResult, Trainer
from recovery.errors import RecoveryError

logger = logging.getLogger("autohet.worker")


class UnreportedRecords:
    """Committed steps and evaluations that no report of the worker has contained yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[StepRecord] = []
        self._evaluations: list[EvaluationRecord] = []

    def add_step(self, record: StepRecord) -> None:
        with self._lock:
            self._steps.append(record)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        with self._lock:
            self._evaluations.append(record)

    def take(self) -> tuple[tuple[StepRecord, ...], tuple[EvaluationRecord, ...]]:
        """Return all records and forget them."""
        with self._lock:
            taken = tuple(self._steps), tuple(self._evaluations)
            self._steps = []
            self._evaluations = []
            return taken


@dataclass(frozen=True)
class TrainingResources:
    """What a worker trains with in all of its generations.

    evaluation_rows: None if the job has no evaluation. records: receives what is trained.
    """

    job: Job
    device: torch.device
    batches: Batches
    evaluation_rows: EvaluationRows | None
    preservation: Preservation
    profiler: StepProfiler
    records: UnreportedRecords


class TrainingLoop:
    """Steps of one generation on its trainer; the generation's thread runs it."""

    def __init__(
        self, order: GenerationOrder, trainer: Trainer, resources: TrainingResources
    ) -> None:
        self._order = order
        self._trainer = trainer
        self._resources = resources

    def run(self) -> Phase:
        """Train until the order's last step or a stop request; blocks.

        Raises:
            PeerLost, Interrupted: the generation is over.
        """
        order = self._order
        trainer = self._trainer
        if trainer.step >= order.end_step:
            # The fleet changed on the last step: this generation has only that step to make
            # durable.
            self._resources.preservation.keep(trainer.step, trainer.state, durable=True)
        if not order.is_evaluated and not self._evaluate_when_due():
            return Phase.STOPPED
        try:
            return self._train_steps()
        finally:
            self._resources.profiler.stop(trainer.step - 1)

    def _train_steps(self) -> Phase:
        """Run the steps that are left, with the evaluations that are due."""
        profiler = self._resources.profiler
        while self._trainer.step < self._order.end_step:
            profiler.before(self._trainer.step)
            result = self._trainer.train_step(self._resources.batches)
            profiler.after(result.step)
            self._committed(result)
            if result.stop or not self._evaluate_when_due():
                return Phase.STOPPED
        return Phase.FINISHED

    def _evaluate_when_due(self) -> bool:
        """Evaluate the state if the job asks for it at this step; return False to stop.

        All workers stop an evaluation if one is to stop; the next generation then evaluates. If a
        checkpoint is wanted too, the result is True and one more step is run: its vote makes that
        step durable and ends the generation.
        """
        order = self._order
        step = self._trainer.step
        section = self._resources.job.evaluation
        rows = self._resources.evaluation_rows
        if section is None or rows is None or not section.is_due(step, order.end_step):
            return True
        result = self._trainer.evaluate(rows)
        if isinstance(result, EvaluationEnded):
            return result.checkpoint and step < order.end_step
        record = EvaluationRecord(
            result.step,
            result.loss,
            result.tokens,
            result.sequences,
            result.seconds,
            order.generation,
            result.rewards,
        )
        self._resources.records.add_evaluation(record)
        return True

    def _committed(self, result: StepResult) -> None:
        """Record a committed step, and keep copies of the state that it left."""
        order = self._order
        trainer = self._trainer
        record = StepRecord(
            result.step,
            result.loss,
            result.gradient_norm,
            result.tokens,
            result.seconds,
            order.generation,
            time.monotonic(),
            result.parts_s,
            result.parted,
            result.skipped,
            result.relative_work,
            _peak_memory_bytes(self._resources.device),
            result.rewards,
            result.loss_scale,
        )
        self._resources.records.add_step(record)
        preservation = self._resources.preservation
        try:
            preservation.record_vote(pending=result.replicating, failed=result.replication_failed)
            due = preservation.is_turn(trainer.step, writing=result.writing)
            durable = due or result.checkpoint or trainer.step == order.end_step
            preservation.keep(trainer.step, trainer.state, durable=durable)
        except RecoveryError as error:
            logger.warning("step %d is not preserved: %s", trainer.step, error)


def _peak_memory_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.max_memory_allocated(device))
