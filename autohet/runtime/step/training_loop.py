"""Training of one generation: its steps, the evaluations that are due, and copies of the state."""

import logging
import threading
from dataclasses import dataclass, field

import torch

from autohet.runtime.copies.preservation import Preservation
from autohet.runtime.job import Job
from autohet.runtime.messages import (
    EvaluationProgress,
    EvaluationRecord,
    GenerationOrder,
    Phase,
    StepRecord,
)
from autohet.runtime.process.step_profile import StepProfiler
from autohet.runtime.step.batches import Batches, EvaluationRows
from autohet.runtime.step.step_commit import EvaluationEnded, Trainer
from autohet.runtime.step.votes import Vote
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


@dataclass
class TrainingLoop:
    """Steps of one generation on its trainer; the generation's thread runs it."""

    order: GenerationOrder
    trainer: Trainer
    resources: TrainingResources
    _progress: EvaluationProgress = field(init=False)

    def __post_init__(self) -> None:
        self._progress = self.order.evaluation_progress

    def run(self) -> Phase:
        """Train until the order's last step, a stop request or a cut-over; blocks.

        Phase.BUILDING: all workers begin the next generation at this step.

        Raises:
            PeerLost, Interrupted: the generation is over.
        """
        order = self.order
        trainer = self.trainer
        if trainer.step >= order.end_step:
            # The fleet changed on the last step: this generation has only that step to make
            # durable.
            self.resources.preservation.keep(trainer.step, trainer.state, durable=True)
        if not order.is_evaluated:
            ended = self._evaluate_when_due()
            if ended is not None:
                return ended
        try:
            return self._train_steps()
        finally:
            self.resources.profiler.stop(trainer.step - 1)

    def _train_steps(self) -> Phase:
        """Run the steps that are left, with the evaluations that are due."""
        profiler = self.resources.profiler
        while self.trainer.step < self.order.end_step:
            profiler.before(self.trainer.step)
            record = self.trainer.train_step(self.resources.batches)
            profiler.after(record.step)
            self.resources.records.add_step(record)
            assert self.trainer.last_vote is not None
            _, vote = self.trainer.last_vote
            self._keep_copies(vote)
            if vote.stops:
                return Phase.STOPPED
            if vote.is_cut_over:
                return Phase.BUILDING
            ended = self._evaluate_when_due()
            if ended is not None:
                return ended
        return Phase.FINISHED

    def _evaluate_when_due(self) -> Phase | None:
        """Evaluate the state if the job asks for it at this step.

        Return the phase in which the generation ends here, None if it goes on. All workers stop an
        evaluation if one is to stop: the next generation evaluates this step, which is made durable
        if a checkpoint is wanted. All end alike if early stopping ends the run.
        """
        order = self.order
        step = self.trainer.step
        section = self.resources.job.evaluation
        rows = self.resources.evaluation_rows
        if section is None or rows is None or not section.is_due(step, order.end_step):
            return None
        result = self.trainer.evaluate(rows)
        if isinstance(result, EvaluationEnded):
            if result.checkpoint:
                self._make_durable()
            return Phase.STOPPED
        self.resources.records.add_evaluation(result)
        self._progress = self._progress.after(result.loss, section)
        if not self._progress.ends_run(section):
            return None
        self._make_durable()
        return Phase.FINISHED

    def _make_durable(self) -> None:
        """Make the present step durable, at which the generation ends."""
        trainer = self.trainer
        try:
            self.resources.preservation.keep(trainer.step, trainer.state, durable=True)
        except RecoveryError as error:
            logger.warning("step %d is not preserved: %s", trainer.step, error)

    def _keep_copies(self, vote: Vote) -> None:
        """Keep copies of the state that a committed step left, as its vote decides."""
        order = self.order
        trainer = self.trainer
        preservation = self.resources.preservation
        try:
            preservation.record_vote(
                pending=vote.replicating > 0, failed=vote.replication_failures > 0
            )
            due = preservation.turns.take(
                trainer.step, writing=vote.writing > 0, asked=vote.checkpoints > 0
            )
            is_last = vote.checkpoints > 0 and vote.stops > 0
            durable = due or is_last or trainer.step == order.end_step
            preservation.keep(trainer.step, trainer.state, durable=durable)
        except RecoveryError as error:
            logger.warning("step %d is not preserved: %s", trainer.step, error)
