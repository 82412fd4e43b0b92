"""Record of a run so far, and the summary made of it.

Holds losses by step, step times, reconfigurations, snapshots and checkpoints.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autohet.driver.control.actions import CommitCheckpoint
from autohet.driver.control.change import Change
from autohet.driver.control.effects import Deciding, Effects, event
from autohet.driver.control.failures import FailureCounts
from autohet.driver.control.observation import Age, Observation
from autohet.driver.control.skipped_steps import SkippedSteps
from autohet.driver.control.told_steps import NOTHING_TOLD, ToldSteps
from autohet.driver.control.transfers import EndedTransfers
from autohet.driver.control.upkeep import settled_age
from autohet.runtime.job import Job
from autohet.runtime.job.learning_rate import learning_rate
from autohet.runtime.messages import (
    EvaluationRecord,
    GenerationOrder,
    Rewards,
    StepRecord,
    UploadRetried,
    WorkerReport,
)
from planner.cluster import node_of
from planner.plan import Plan

WARM_STEPS = 1  # the first step of a generation pays for what later ones do not


@dataclass(frozen=True)
class FailingCheckpoint:
    """Checkpoint that is not in durable storage, and why."""

    generation: int
    step: int
    reason: str
    is_retried: bool

    @property
    def age(self) -> Age:
        return self.generation, self.step


class Ledger:
    """The driver's memory of a run.

    `record` fills it from each observation; only the orders are set from outside. Methods that
    decide yield their effects.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.training = job.training
        """Training section of the job; `max_epochs` becomes steps once the rows are counted."""
        self.records: dict[int, StepRecord] = {}
        self.step_seconds: dict[int, list[float]] = {}
        self.changes: list[Change] = []
        self.open_change: Change | None = None
        self.checkpoint_uri: str | None = None
        self.checkpoint_step: int | None = None
        self._checkpoints_taken = 0
        self.orders: Mapping[str, GenerationOrder] = {}
        """Orders of the present generation, by worker."""
        self._snapshot: Age = (0, 0)
        self.checkpoint_errors: dict[tuple[int, int], str] = {}
        """Reason by (generation, step) why a worker's part is not written and not retried."""
        self._shortages: dict[str, str] = {}
        """Logged shortage of host memory by node."""
        self.failing: FailingCheckpoint | None = None
        """The newest checkpoint that failed, until a later one is committed."""
        self._damaged_taken = 0
        self._vote: tuple[int, tuple[int, Any]] | None = None
        self._generation = 0
        self.failures = FailureCounts()
        """Failures that have ended a generation since the last committed step, by cause."""
        self._first_step = self._resumed_at = 0
        self.told = NOTHING_TOLD
        self._pace_is_new = False
        self._compute_s: dict[str, deque[tuple[float, float]]] = {}
        self._receipts: dict[tuple[int, int], dict[str, Any]] = {}
        self._due_at: dict[int, float] = {}
        """Time at which each step that is due for a checkpoint was seen.

        A step is kept here until all parts of its checkpoint are written.
        """
        self.upload_s: float | None = None
        """Longest time in seconds until all parts of a due checkpoint were written.

        It counts from the moment at which the step was seen; None before the first such checkpoint.
        """
        self._committed: set[tuple[int, int]] = set()
        self.evaluations: dict[int, EvaluationRecord] = {}
        """Evaluation records by step, of the present history."""
        self.peak_bytes: dict[str, int] = {}
        """Peak device memory by worker, in its newest step."""
        self._num_rows = 0
        """Rows of the data set; 0 until a node has prepared it."""
        self._transfers = EndedTransfers()
        self.skipped = SkippedSteps()

    @property
    def committed_steps(self) -> int:
        """Number of steps whose update is applied; also the number of the next step."""
        return max(self._first_step, max(self.records, default=-1) + 1)

    @property
    def steps_run(self) -> int:
        """Number of committed steps, with those that an earlier driver of this run has logged."""
        return max(self.committed_steps, self.told.until)

    def go_on_from(self, step: int, told: ToldSteps = NOTHING_TOLD) -> None:
        """Start at `step`; the steps before are an earlier driver's.

        told: steps of this run that the earlier driver has logged.
        """
        self._first_step = self._resumed_at = step
        self.told = told

    def begin_generation(self, generation: int, change: Change) -> Effects:
        """Begin a generation at its first step; steps that were run beyond it are forgotten."""
        assert change.restore_step is not None
        self.records = {
            step: record
            for step, record in self.records.items()
            if step < change.restore_step
            or record.generation == generation  # its first steps came with the news of readiness
        }
        self.evaluations = {
            step: record
            for step, record in self.evaluations.items()
            if step <= change.restore_step or record.generation == generation
        }
        self._first_step = change.restore_step
        self._generation = generation
        self.forget_pace()
        yield from self._make_up_for(change.restore_step - 1)
        self.step_seconds.setdefault(generation, [])
        if self.open_change is not None and self.open_change is not change:
            # overtaken by the next change before its first step
            yield from self._close(self.open_change, generation)
        self.open_change = change

    def _make_up_for(self, step: int) -> Effects:
        """Record a step over which the survivors rolled forward, from its vote.

        Its only witness died after the driver had seen the vote and before it saw the record. The
        vote knows the loss; nobody knows the time that the step took.
        """
        if (
            self._vote is None
            or self._vote[1][0] != step
            or step in self.records
            or step < self._resumed_at
        ):
            return
        generation, (_, vote) = self._vote
        yield from self.keep_step(
            StepRecord(step, vote.loss, vote.gradient_norm, vote.tokens, 0.0, generation, 0.0)
        )

    def forget_pace(self) -> None:
        """Reset the workers' compute times.

        Those that follow are compared with another plan or other speeds.
        """
        self._compute_s = {}

    def compute_s(self, workers: Collection[str]) -> dict[str, list[float]]:
        """Return the compute seconds of each worker's last steps.

        Empty until every worker has enough steps to be judged by, and there is something new.
        """
        elastic, found = self.job.elastic, {}
        if not self._pace_is_new:
            return {}
        self._pace_is_new = False
        for worker in workers:
            recent = self._compute_s.get(worker, deque())
            if (
                len(recent) < elastic.slow_steps
                or recent[-1][0] - recent[0][0] < elastic.arrivals_debounce_s
            ):
                return {}
            found[worker] = [seconds for _, seconds in recent]
        return found

    def _take_pace(self, worker: str, record: StepRecord, first_step: int) -> None:
        """Keep a worker's last `slow_steps` steps, and more if they span too little time.

        They must cover `elastic.arrivals_debounce_s`, in which arrivals settle.
        """
        warm = record.generation == self._generation and record.step >= first_step + WARM_STEPS
        if not warm or "compute" not in record.parts_s:
            return
        self._pace_is_new = True
        recent, elastic = self._compute_s.setdefault(worker, deque()), self.job.elastic
        recent.append((record.ended_at, record.parts_s["compute"] / record.relative_work))
        while (
            len(recent) > elastic.slow_steps
            and recent[-1][0] - recent[1][0] >= elastic.arrivals_debounce_s
        ):
            recent.popleft()

    def record(self, seen: Observation, generation: int) -> Effects:
        """Record an observation that was made in the time of `generation`.

        Yields its events, and a commit for each checkpoint whose every part is written.
        """
        self._take_rows(seen)
        for report in seen.reports.values():
            self._take_vote(report)
            for record in report.steps:
                self.skipped.take(report.worker, record)
                self._take_pace(report.worker, record, self._first_step)
                if record.peak_memory_bytes is not None:
                    self.peak_bytes[report.worker] = record.peak_memory_bytes
                yield from self._take_step(record, generation, seen.now)
            for evaluation in report.evaluations:
                yield from self._take_evaluation(evaluation, generation)
            for receipt in report.receipts:
                yield from self._take_receipt(report.worker, receipt, generation, seen.now)
        yield from self.skipped.log_finished(
            generation, self.records, self.committed_steps, self.orders.keys()
        )
        self._transfers.take(seen)
        has_snapshot = yield from self._take_snapshots(seen)
        has_checkpoint = yield from self._take_checkpoints(seen, generation)
        if has_snapshot or has_checkpoint:
            yield from self.log_transfers(generation)
        yield from self._take_checkpoint_errors(seen)
        yield from self._take_shortages(seen, generation)
        yield from self._take_damaged(seen, generation)

    def _take_evaluation(self, record: EvaluationRecord, generation: int) -> Effects:
        """Keep and log the first report of an evaluation; all workers report the same."""
        if record.generation != generation or record.step in self.evaluations:
            return
        self.evaluations[record.step] = record
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

    @property
    def newest_evaluation(self) -> EvaluationRecord | None:
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    def _take_rows(self, seen: Observation) -> None:
        """Keep the number of rows of the data set, and so the run's last step.

        Every node has the same number.
        """
        if self._num_rows:
            return
        counts = [view.data.num_rows for view in seen.nodes.values() if view.data is not None]
        self._num_rows = max(counts, default=0)
        self.training = self.training.with_rows(self._num_rows)

    @property
    def last_step(self) -> int | None:
        """Number of steps of the whole run; None until `training.max_epochs` can be counted."""
        return self.training.last_step(0)

    def log_transfers(self, generation: int) -> Effects:
        """Log the transfers that have ended since the last event of this kind.

        Called with each snapshot and checkpoint, and at the run's end.
        """
        if told := self._transfers.told():
            yield event("transfers", generation, transfers=told)

    def _take_snapshots(self, seen: Observation) -> Deciding[bool]:
        """Log the newest step that all workers keep in host memory, if it is a new one.

        Copies on other nodes must exist, too, where they are asked for. Returns True if the step is
        new.
        """
        age = settled_age(self.orders, seen.reports)
        if age is None or age <= self._snapshot:
            return False
        self._snapshot = age
        yield event("snapshot", age[0], step=age[1])
        return True

    def _take_checkpoints(self, seen: Observation, generation: int) -> Deciding[bool]:
        """Log the checkpoints that were committed since the last look.

        Returns True if there are any.
        """
        new = seen.checkpoint.committed[self._checkpoints_taken :]
        for step, uri in new:
            self.checkpoint_step, self.checkpoint_uri = step, uri
            if self.failing is not None and step >= self.failing.step:
                self.failing = None
            yield event("checkpoint", generation, step=step, uri=uri)
        self._checkpoints_taken += len(new)
        return bool(new)

    def _take_checkpoint_errors(self, seen: Observation) -> Effects:
        """Note a failure of the driver's part of a checkpoint: the commit."""
        found = seen.checkpoint
        if found.error and found.error_step is not None and found.error_generation is not None:
            yield from self._note_failing(
                found.error_generation, found.error_step, found.error, retried=found.is_retried
            )

    def _take_damaged(self, seen: Observation, generation: int) -> Effects:
        """Log each checkpoint that is passed over as damaged, once."""
        damaged = seen.checkpoint.damaged
        for reason in damaged[self._damaged_taken :]:
            sentence = f"Deciding to go on from an older checkpoint, since {reason}"
            yield event("decision", generation, sentence)
        self._damaged_taken = len(damaged)

    def _take_shortages(self, seen: Observation, generation: int) -> Effects:
        """Log once for each node, and again if it changes, what its host memory has no room for."""
        for worker, report in seen.reports.items():
            node, sentence = node_of(worker), report.memory_shortage
            if sentence is None or self._shortages.get(node) == sentence:
                continue
            self._shortages[node] = sentence
            yield event(
                "memory_shortage", generation, f"{node}: {sentence}", node=node, reason=sentence
            )

    def _note_failing(self, generation: int, step: int, reason: str, *, retried: bool) -> Effects:
        """Log each failed checkpoint once, with the newest step that is safe."""
        found, known = FailingCheckpoint(generation, step, reason, retried), self.failing
        if known is not None and known.age > found.age:
            return
        self.failing = found
        if known is not None and known.age == found.age:
            return
        if self.checkpoint_step is None:
            safe = "no step of this job is in durable storage"
        else:
            safe = f"step {self.checkpoint_step} is safe ({self.checkpoint_uri})"
        then = "it is tried again" if retried else "it is not tried again"
        yield event(
            "checkpoint_failed",
            generation,
            f"The checkpoint of step {step} failed: {reason}; {safe}; {then}",
            step=step,
            error=reason,
            is_retried=retried,
            safe_step=self.checkpoint_step,
            safe_checkpoint=self.checkpoint_uri,
        )

    def newest_vote(self, generation: int) -> tuple[int, Any] | None:
        """Return the newest step of this generation whose vote any worker saw, and its result.

        Votes that dead workers saw count, too.
        """
        return self._vote[1] if self._vote is not None and self._vote[0] == generation else None

    def _take_vote(self, report: WorkerReport) -> None:
        """Keep a worker's vote if it is the newest.

        Votes of a generation that is not known to be ready count, too: if it dies before that, it
        may have run a step.
        """
        if report.vote is None or report.live_generation is None:
            return
        known = (0, -1) if self._vote is None else (self._vote[0], self._vote[1][0])
        if (report.live_generation, report.vote[0]) > known:
            self._vote = (report.live_generation, report.vote)

    def _take_step(self, record: StepRecord, generation: int, now: float) -> Effects:
        if record.generation < self._generation:
            return  # of a generation that has been gone back behind
        if record.generation != generation and record.step in self.records:
            return
        if (
            record.step in self.records
            and self.records[record.step].generation >= record.generation
        ):
            return
        yield from self.keep_step(record)
        due = record.step + 1 - (record.step + 1) % self.job.checkpoint.every_steps
        if due == record.step + 1 or due not in self._due_at:
            self._due_at[due] = now
        self.step_seconds.setdefault(record.generation, []).append(record.seconds)
        if record.generation == generation:
            self.failures.clear()
            yield from self._close_change(generation, now)

    def keep_step(self, record: StepRecord) -> Effects:
        """Keep the record of a committed step, and log it."""
        self.records[record.step] = record
        for parted in record.parted:
            yield event(
                "parted", record.generation, f"Replicas had parted: {parted}", **asdict(parted)
            )
        seconds = round(record.seconds, 6) if record.seconds else None  # None: nobody measured it
        yield event(
            "step",
            record.generation,
            step=record.step,
            loss=record.loss,
            gradient_norm=record.gradient_norm,
            tokens=record.tokens,
            seconds=seconds,
            learning_rate=learning_rate(self.training, record.step),
            epoch=self._epoch(record.step + 1),
            **_reward_fields(record.rewards),
        )

    def _epoch(self, steps: int) -> float | None:
        """Return the epochs (passes over the data set) after `steps` steps.

        None until the rows are counted.
        """
        if not self._num_rows:
            return None
        return round(steps * self.job.training.global_batch_sequences / self._num_rows, 4)

    def _close_change(self, generation: int, now: float) -> Effects:
        """Close the open change, since its first step is done.

        The moment is on the driver's clock, as all other moments of a change: workers' clocks may
        disagree.
        """
        change = self.open_change
        if change is None:
            return
        change.first_step_at = now
        self.open_change = None
        yield from self._close(change, generation)

    def _close(self, change: Change, generation: int) -> Effects:
        self.changes.append(change)
        if change.is_told:
            yield event("reconfigure", generation, **change.to_document())

    def _take_receipt(self, worker: str, receipt: Any, present: int, now: float) -> Effects:
        """Collect one worker's part of a checkpoint; yield the commit once all parts are in.

        All may be in before the generation is known to be ready: a generation that begins at the
        last step has nothing else to do.
        """
        generation, step, parts = receipt
        if generation != present or not self.orders or (generation, step) in self._committed:
            return
        if isinstance(parts, UploadRetried):
            yield from self._note_failing(
                generation, step, f"{worker}: {parts.reason}", retried=True
            )
            return
        if isinstance(parts, str):
            self.checkpoint_errors[generation, step] = f"{worker}: {parts}"
            yield from self._note_failing(generation, step, f"{worker}: {parts}", retried=False)
            return
        got = self._receipts.setdefault((generation, step), {})
        got[worker] = parts
        layout = next(iter(self.orders.values())).layout
        if not got.keys() >= set(layout.workers):
            return
        self._committed.add((generation, step))
        if step in self._due_at:
            self.upload_s = max(self.upload_s or 0.0, now - self._due_at[step])
        self._due_at = {due: at for due, at in self._due_at.items() if due > step}
        self._receipts = {
            key: value for key, value in self._receipts.items() if key > (generation, step)
        }
        yield CommitCheckpoint(step, generation, layout, tuple(got.values()))

    def measured_step_s(self, generation: int) -> float | None:
        """Return the median step seconds of a generation without its first step.

        None where nothing was measured.
        """
        seconds = self.step_seconds.get(generation, [])
        seconds = seconds[WARM_STEPS:] or seconds
        return statistics.median(seconds) if seconds else None

    @property
    def _computed_tokens(self) -> int:
        """Tokens that one step computes, whether they count as targets or not."""
        training = self.job.training
        return training.global_batch_sequences * training.sequence_length

    def status(self) -> dict[str, Any]:
        last = self.records.get(self.committed_steps - 1)
        evaluation = self.newest_evaluation
        return {
            "step": self.committed_steps,
            "steps": self.last_step,
            "loss": None if last is None else last.loss,
            "gradient_norm": None if last is None else last.gradient_norm,
            "learning_rate": (None if last is None else learning_rate(self.training, last.step)),
            "epoch": None if last is None else self._epoch(last.step + 1),
            "tokens_per_s": (
                None if last is None or not last.seconds else last.tokens / last.seconds
            ),
            "computed_tokens_per_s": (
                None if last is None or not last.seconds else self._computed_tokens / last.seconds
            ),
            "evaluation_loss": None if evaluation is None else evaluation.loss,
            "evaluation_step": None if evaluation is None else evaluation.step,
            "checkpoint": self.checkpoint_uri,
            "checkpoint_step": self.checkpoint_step,
            "checkpoint_failing": None if self.failing is None else asdict(self.failing),
            "reconfigurations": len([c for c in self.changes if c.cause != "start"]),
        }

    def summary(
        self, generations: int, plans: Iterable[tuple[int, Plan, float | None]], events: Path | None
    ) -> dict[str, Any]:
        """Return the document that `autohet train --json` prints.

        events: the file that the run's events are in, if any.
        """
        first = min(self.records, default=self._resumed_at)
        # A step that nobody alive saw and that only a snapshot proves has its place, and no loss.
        steps = range(first, max(self.committed_steps, first))
        losses = [self.records[step].loss if step in self.records else None for step in steps]
        changes = [change for change in self.changes if change.is_told]
        return {
            "steps": len(losses),
            "first_step": first,
            "final_loss": next((loss for loss in reversed(losses) if loss is not None), None),
            "losses": losses,
            "evaluations": [
                {"step": step, "loss": record.loss, "sequences": record.sequences}
                for step, record in sorted(self.evaluations.items())
            ],
            "generations": generations,
            "steps_lost": sum(change.steps_lost for change in changes),
            "reconfigurations": [change.to_document() for change in changes],
            "plans": [
                {
                    "generation": generation,
                    "plan": plan.to_document(),
                    "predicted_step_s": predicted,
                    "measured_step_s": self.measured_step_s(generation),
                }
                for generation, plan, predicted in plans
            ],
            "checkpoint": self.checkpoint_uri,
            "checkpoint_failing": None if self.failing is None else asdict(self.failing),
            "events": None if events is None else str(events),
        }


def _reward_fields(rewards: Rewards | None) -> dict[str, Any]:
    """Return the fields of an event about the rewards of a preference job; empty for other jobs."""
    if rewards is None:
        return {}
    return {"reward_accuracy": rewards.accuracy, "reward_margin": rewards.margin}
