"""Record of a run so far, and the summary made of it.

Holds losses by step, step times, reconfigurations, snapshots and checkpoints.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from autohet.control.ledger.checkpoint_log import CheckpointLog
from autohet.control.ledger.failures import AuditLog, FailureCounts
from autohet.control.ledger.skipped_steps import SkippedSteps, skipped_by_vote
from autohet.control.planning.agent_gc import any_order
from autohet.control.values.effects import Effects, event
from autohet.control.values.evaluation_log import EvaluationLog
from autohet.runtime.messages import (
    EvaluationRecord,
    GenerationOrder,
    Rewards,
    StepRecord,
    WorkerReport,
)
from autohet.runtime.step.learning_rate import learning_rate
from autohet.runtime.step.loss_scale import LossScales

if TYPE_CHECKING:
    from autohet.control.values.change import Change, Timing
    from autohet.control.values.observation import Observation
    from autohet.runtime.job import Job


WARM_STEPS = 1
"""First steps of a generation, which pay for what later ones do not."""


@dataclass(frozen=True)
class ToldSteps:
    """Steps of a run that have an event.

    first: the step at which the run began; steps: those with an event; checkpoint_step: the newest
    checkpoint with one. newest: newest generation with a step's event, and its last such step.
    """

    first: int
    steps: frozenset[int]
    checkpoint_step: int | None = None
    newest: tuple[int, int] = (0, -1)

    @property
    def until(self) -> int:
        """Number of steps that are known to have been run: all before this one."""
        return max(self.steps, default=-1) + 1

    def until_in(self, generation: int) -> int:
        """Return the step behind the last one of this generation that has an event."""
        return self.newest[1] + 1 if self.newest[0] == generation else 0

    def missing(self, restored: int) -> list[int]:
        """Return the steps before `restored`, at which the run continues, that have no event."""
        if not self.steps:
            return []
        return [step for step in range(self.first, restored) if step not in self.steps]


NOTHING_TOLD = ToldSteps(0, frozenset())
"""For a run that no driver has logged before."""


class PaceLog:
    """Compute times of each worker's last steps, by which slow nodes are found.

    num_steps: steps of a worker that are judged. span_s: seconds that they must cover, in which
    arrivals settle.
    """

    def __init__(self, num_steps: int, span_s: float) -> None:
        self._num_steps = num_steps
        self._span_s = span_s
        self._is_new = False
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        """End and compute seconds of each worker's last steps."""

    def forget(self) -> None:
        """Reset the compute times.

        Those that follow are compared with another plan or other speeds.
        """
        self._recent = {}

    def take(self, worker: str, record: StepRecord) -> None:
        """Keep a worker's last steps, and more if they span too little time."""
        if "compute" not in record.parts_s:
            return
        self._is_new = True
        recent = self._recent.setdefault(worker, deque())
        # Steps whose rows are longer are no slower ones.
        compute_s = record.parts_s["compute"] / record.relative_work
        recent.append((record.ended_at, compute_s))
        while len(recent) > self._num_steps:
            # The first step goes if those after it span enough time without it.
            left_s = recent[-1][0] - recent[1][0]
            if left_s < self._span_s:
                break
            recent.popleft()

    def compute_s(self, workers: Collection[str]) -> dict[str, list[float]]:
        """Return the compute seconds of each worker's last steps.

        Empty until every worker has enough steps to be judged by, and there is something new.
        """
        if not self._is_new:
            return {}
        self._is_new = False
        found = {}
        for worker in workers:
            recent = self._recent.get(worker, deque())
            if len(recent) < self._num_steps:
                return {}
            spanned_s = recent[-1][0] - recent[0][0]
            if spanned_s < self._span_s:
                return {}
            found[worker] = [seconds for _, seconds in recent]
        return found


@dataclass(frozen=True)
class _SeenVote:
    """Vote of a step's workers, as one of them reported it."""

    generation: int
    vote: tuple[int, Any]
    """Step, and its result."""

    @property
    def step(self) -> int:
        return self.vote[0]


def _newest_vote(known: _SeenVote | None, report: WorkerReport) -> _SeenVote | None:
    """Return the newer one of a known vote and a worker's.

    Votes of a generation that is not known to be ready count, too: if it dies before that, it may
    have run a step.
    """
    vote = report.vote
    generation = report.live_generation
    if vote is None or generation is None:
        return known
    if known is not None and (generation, vote[0]) <= (known.generation, known.vote[0]):
        return known
    return _SeenVote(generation, vote)


def _usual_s(record: StepRecord, change: Change | None) -> float:
    """Return a step's seconds; those of a whole one if it went on from kept passes.

    change: the one whose first step it may be.
    """
    if change is None or not change.kept_share or change.generation != record.generation:
        return record.seconds
    return max(record.seconds, change.step_s or 0.0)


class Ledger:
    """The driver's memory of a run.

    `record` fills it from each observation; only the orders are set from outside. Methods that
    decide yield their effects.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.training = job.training
        """Training section of the job; `max_epochs` becomes steps once the rows are counted."""
        self.planned_end = job.training.last_step(0)
        """Steps of the whole run if nothing ends it early.

        None until `training.max_epochs` can be counted.
        """
        self.records: dict[int, StepRecord] = {}
        self._newest_step = -1
        """Highest step of `records`, which is asked for many times a tick; -1 without any."""
        self.step_seconds: dict[int, list[float]] = {}
        self.changes: list[Change] = []
        self.timings: list[Timing] = []
        """Timings of complete changes, oldest first."""
        self.open_change: Change | None = None
        self.orders: Mapping[str, GenerationOrder] = {}
        """Orders of the present generation, by worker."""
        self.checkpoints = CheckpointLog(job.checkpoint.fixed_steps)
        """Snapshots, checkpoints and transfers of the run."""
        self.paces = PaceLog(job.elastic.slow_steps, job.elastic.arrivals_debounce_s)
        """Compute times of the workers' last steps."""
        self._vote: _SeenVote | None = None
        """Newest vote of any generation."""
        self._generation = 0
        self.failures = FailureCounts()
        """Failures that have ended a generation since the last committed step, by cause."""
        self._predicted_step_s: float | None = None
        """Predicted seconds of a step of the present generation."""
        self._began_at: float | None = None
        """Moment at which the first step of this driver began; None: none has ended yet."""
        self._last_step_at: float | None = None
        """Moment at which the newest step ended."""
        self._first_step = 0
        self.resumed_at = 0
        """Step at which this driver began; the steps before are an earlier driver's."""
        self.told = NOTHING_TOLD
        self.evaluations: dict[int, EvaluationRecord] = {}
        """Evaluation records of this driver by step, of the present history."""
        self.evaluation_log = EvaluationLog(job.evaluation)
        self._told_evaluations: frozenset[int] = frozenset()
        """Steps of the present generation whose evaluation an earlier driver has logged."""
        self.peak_bytes: dict[str, int] = {}
        """Peak device memory by worker, in its newest step."""
        self._num_rows = 0
        """Rows of the data set; 0 until a node has prepared it."""
        self.skipped = SkippedSteps()
        self.loss_scales = LossScales()
        """Scale of gradients in fp16 stages."""
        self.audits = AuditLog()
        """Audits of the workers' arithmetic."""

    @property
    def committed_steps(self) -> int:
        """Number of steps whose update is applied; also the number of the next step."""
        return max(self._first_step, self._newest_step + 1)

    @property
    def last_step(self) -> int | None:
        """Steps of the whole run, which early stopping may have ended; None: not known yet."""
        if self.evaluation_log.section is None:
            return self.planned_end
        committed = self.committed_steps
        return committed if self.evaluation_log.ends_run(committed) else self.planned_end

    @property
    def steps_run(self) -> int:
        """Number of committed steps, with those that an earlier driver of this run has logged."""
        return max(self.committed_steps, self.told.until)

    def go_on_from(self, step: int, told: ToldSteps = NOTHING_TOLD, loss_scales: str = "") -> None:
        """Start at `step`; the steps before are an earlier driver's.

        told: steps of this run that the earlier driver has logged. loss_scales: text of the
        checkpoint's manifest.
        """
        self.loss_scales = LossScales(loss_scales)
        self._first_step = step
        self.resumed_at = step
        self.told = told

    def inherit(self, orders: Mapping[str, GenerationOrder]) -> None:
        """Go on with a generation of an earlier driver, at its first step without an event."""
        order = any_order(orders)
        assert order is not None
        self.orders = orders
        self._generation = order.generation
        self._first_step = max(order.start_step, self.told.until_in(order.generation))
        self.resumed_at = self._first_step
        self.step_seconds.setdefault(order.generation, [])
        self._told_evaluations = frozenset(self.evaluation_log.losses)

    def begin_generation(self, generation: int, change: Change) -> Effects:
        """Begin a generation at its first step; steps that were run beyond it are forgotten."""
        assert change.restore_step is not None
        first = change.restore_step
        # Those of this generation stay: its first steps came with the news of readiness.
        for step, record in list(self.records.items()):
            if step >= first and record.generation != generation:
                del self.records[step]
        self._newest_step = max(self.records, default=-1)
        for step, evaluation in list(self.evaluations.items()):
            if step > first and evaluation.generation != generation:
                del self.evaluations[step]
        if self.evaluation_log.section is not None:
            self.evaluation_log.go_back_to(max([first, *self.evaluations]))

        self._told_evaluations = frozenset()
        change.expect_step(self._predicted_step_s, self.measured_step_s(self._generation))
        self._predicted_step_s = change.predicted_step_s
        change.generation = generation
        self._first_step = first
        self._generation = generation
        self.paces.forget()
        yield from self._make_up_for(first - 1)
        self.step_seconds.setdefault(generation, [])
        if self.open_change is not None and self.open_change is not change:
            # The next change has overtaken it before its first step.
            yield from self._close(self.open_change, generation)
        self.open_change = change

    def _make_up_for(self, step: int) -> Effects:
        """Record a step over which the survivors rolled forward, from its vote.

        Its only witness died after the driver had seen the vote and before it saw the record. The
        vote knows the loss; nobody knows the time that the step took.
        """
        seen = self._vote
        if seen is None or seen.step != step:
            return
        if step in self.records or step < self.resumed_at:
            return
        _, result = seen.vote
        record = StepRecord(
            step=step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            tokens=result.tokens,
            seconds=0.0,
            generation=seen.generation,
            ended_at=0.0,
            skipped=skipped_by_vote(result.loss, result.gradient_norm),
        )
        yield from self.keep_step(record)

    def record(self, seen: Observation, generation: int) -> Effects:
        """Record an observation that was made in the time of `generation`.

        Yields its events, and a commit for each checkpoint whose every part is written.
        """
        yield from self._take_rows(seen)
        order = any_order(self.orders)
        if order is not None:
            self.checkpoints.begin(order.generation, order.layout, order.start_step)
        for report in seen.reports.values():
            self._vote = _newest_vote(self._vote, report)
            for record in report.steps:
                if record.skipped is not None:
                    self.skipped.take(report.worker, record.step, record.skipped)
                is_present = record.generation == self._generation
                if is_present and record.step >= self._first_step + WARM_STEPS:
                    self.paces.take(report.worker, record)
                if record.peak_memory_bytes is not None:
                    self.peak_bytes[report.worker] = record.peak_memory_bytes
                yield from self._take_step(record, generation, seen)
            for evaluation in report.evaluations:
                yield from self._take_evaluation(evaluation, generation)
            for receipt in report.receipts:
                yield from self._take_receipt(report.worker, receipt, seen.now)
        if not self.skipped.is_empty:
            workers = self.orders.keys()
            yield from self.skipped.log_finished(
                generation, self.records, self.committed_steps, workers
            )
        yield from self.checkpoints.record(seen, self.orders, generation)

    def _take_receipt(self, worker: str, receipt: Any, now: float) -> Effects:
        """Collect one worker's part of a checkpoint."""
        before = self.checkpoints.newest_complete
        yield from self.checkpoints.take_receipt(worker, receipt, now)
        newest = self.checkpoints.newest_complete
        if newest is not None and newest != before and newest[0] == self._generation:
            self.checkpoints.note_cost(_checkpoint_cost_s(self, newest[1], self._generation))

    def _take_evaluation(self, record: EvaluationRecord, generation: int) -> Effects:
        """Keep and log the first report of an evaluation; all workers report the same."""
        is_known = record.step in self.evaluations or record.step in self._told_evaluations
        if record.generation != generation or is_known:
            return
        self.evaluations[record.step] = record
        self.evaluation_log.take(record.step, record.loss)
        sentence = (
            f"Evaluation loss after step {record.step}: {record.loss:.4f} ({record.sequences}"
            f" sequences in {record.seconds:.1f} s)"
        )
        yield event(
            "evaluation",
            record.generation,
            sentence,
            step=record.step,
            evaluation_loss=record.loss,
            tokens=record.tokens,
            sequences=record.sequences,
            seconds=round(record.seconds, 6),
            **_reward_fields(record.rewards),
        )

    def _take_rows(self, seen: Observation) -> Effects:
        """Keep the number of rows of the data set, and so the run's last step.

        Every node has the same number.
        """
        if self._num_rows:
            return
        for view in seen.nodes.values():
            if view.data is not None:
                self._num_rows = max(self._num_rows, view.data.num_rows)
                sentence = self.evaluation_log.use_rows(view.data.evaluation_digest)
                if sentence is not None:
                    yield event("decision", self._generation, sentence)
        if self._num_rows:
            self.training = self.training.with_rows(self._num_rows)
            self.planned_end = self.training.last_step(0)

    def newest_vote(self) -> tuple[int, tuple[int, Any] | None]:
        """Return the newest vote that any worker saw: its generation; its step and its result.

        Votes that dead workers saw count, too. A vote of an older generation than the present one
        still counts for workers that are in it, as after a cut-over that some have not seen.
        """
        if self._vote is None:
            return 0, None
        return self._vote.generation, self._vote.vote

    def _take_step(self, record: StepRecord, generation: int, seen: Observation) -> Effects:
        if record.generation < self._generation:
            return  # the run has gone back behind that generation
        if record.generation == self._generation and record.step < self._first_step:
            return  # an earlier driver has logged it
        known = self.records.get(record.step)
        if known is not None:
            is_of_present = record.generation == generation
            # All workers report the same step: the first report is kept.
            if not is_of_present or known.generation >= record.generation:
                return

        yield from self.keep_step(record)
        self.checkpoints.note_step(record.step + 1, seen.now)
        self.step_seconds.setdefault(record.generation, []).append(
            _usual_s(record, self.open_change)
        )
        if self._began_at is None:
            self._began_at = seen.now - record.seconds
        last_step_at = self._last_step_at
        self._last_step_at = seen.now
        if record.generation == generation:
            # A step of the present generation shows that it works.
            if self.failures.total:
                self.failures.clear()
            yield from self._close_change(record, last_step_at, seen)

    def keep_step(self, record: StepRecord) -> Effects:
        """Keep the record of a committed step, and log it."""
        self.records[record.step] = record
        self._newest_step = max(self._newest_step, record.step)
        if record.skipped is not None:
            self.skipped.is_empty = False
        fields = _reward_fields(record.rewards)
        if record.loss_scale is not None:
            self.loss_scales.take(record.loss_scale)
            fields["loss_scale"] = record.loss_scale.factor
        for parted in record.parted:
            sentence = f"Replicas had parted: {parted}"
            yield event("parted", record.generation, sentence, **asdict(parted))
        if record.audit is not None:
            yield from self.audits.log_audit(record.audit, record.step, record.generation)
        # No seconds: a step that was rolled forward, whose time no worker measured.
        seconds = round(record.seconds, 6) if record.seconds else None
        yield event(
            "step",
            record.generation,
            step=record.step,
            loss=record.loss,
            gradient_norm=record.gradient_norm,
            tokens=record.tokens,
            seconds=seconds,
            learning_rate=learning_rate(self.training, record.step),
            epoch=self.epoch(record.step + 1),
            **fields,
        )

    def epoch(self, steps: int) -> float | None:
        """Return the epochs (passes over the data set) after `steps` steps.

        None until the rows are counted.
        """
        if not self._num_rows:
            return None
        return round(self.job.training.first_row(steps) / self._num_rows, 4)

    def _close_change(
        self, first: StepRecord, last_step_at: float | None, seen: Observation
    ) -> Effects:
        """Close the open change, since its first step is done; the step before ended then.

        The moment is on the driver's clock, as all other moments of a change: workers' clocks may
        disagree.
        """
        change = self.open_change
        if change is None:
            return
        change.first_step_at = seen.now
        change.last_step_at = last_step_at
        seconds = _usual_s(first, change)
        change.step_s = min(seconds, change.step_s or seconds)
        change.usd_per_hour = seen.usd_per_hour
        self.open_change = None
        yield from self._close(change, first.generation)

    def _close(self, change: Change, generation: int) -> Effects:
        self.changes.append(change)
        if change.is_complete:
            self.timings.append(change.timing())
        if change.is_told:
            share = self.goodput()
            yield event("reconfigure", generation, **change.to_document(), goodput=share)

    def measured_step_s(self, generation: int) -> float | None:
        """Return the median step seconds of a generation without its first step.

        None where nothing was measured.
        """
        seconds = self.step_seconds.get(generation, [])
        if not seconds:
            return None
        return statistics.median(seconds[WARM_STEPS:] or seconds)

    def goodput(self) -> float | None:
        """Return the usual time of this driver's steps that count over the time that passed.

        Evaluations are no part of that time. None before the first step.
        """
        if self._began_at is None or self._last_step_at is None:
            return None
        kept = Counter(record.generation for record in self.records.values())
        evaluated_s = sum(record.seconds for record in self.evaluations.values())
        elapsed_s = self._last_step_at - self._began_at - evaluated_s
        useful_s = 0.0
        for generation, number in kept.items():
            useful_s += number * (self.measured_step_s(generation) or 0.0)
        if not useful_s or elapsed_s <= 0:
            return None
        return round(min(1.0, useful_s / elapsed_s), 4)


def _checkpoint_cost_s(ledger: Ledger, step: int, generation: int) -> float:
    """Return the seconds by which steps of a generation took longer while `step` was stored."""
    usual_s = ledger.measured_step_s(generation)
    if usual_s is None:
        return 0.0
    seconds = []
    for other in range(step, ledger.committed_steps):
        if other in ledger.records:
            seconds.append(ledger.records[other].seconds)
    return max(0.0, sum(seconds) - len(seconds) * usual_s)


def _reward_fields(rewards: Rewards | None) -> dict[str, Any]:
    """Return the fields of an event about the rewards of a preference job; empty for other jobs."""
    if rewards is None:
        return {}
    return {"reward_accuracy": rewards.accuracy, "reward_margin": rewards.margin}
