"""Base of all trainers: how a step is committed and applied, and its results.

A step is committed by all workers or by none. Its vote is one all-reduce over every worker. When it
ends at one worker, every worker has contributed and is *prepared*: it has the summed gradients of
the state that it keeps. A survivor that was interrupted before it saw the result can still apply
the step with the result that another survivor saw (`apply_prepared`), and must, since that one has
applied it.

The update itself does not communicate, even if state is sharded: weights that others need are sent
at the beginning of the next step. So each worker's part of the layout is whole as soon as its own
update is. Survivors go forward over a step exactly if every shard of it has a live holder;
otherwise the run goes back to the newest step whose missing shards have copies.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.groups import Group, Interrupted, PeerLost
from autohet.runtime.groups.clock import StreamClock
from autohet.runtime.messages import (
    AuditCause,
    AuditMismatch,
    AuditRecord,
    EvaluationRecord,
    ReplicaMismatch,
    Skipped,
    SkipReason,
    StepRecord,
)
from autohet.runtime.parallel.executor import Batch
from autohet.runtime.parallel.gradient_sync import GradientSync
from autohet.runtime.parallel.message_sums import changed_borders
from autohet.runtime.step.audit import Audit
from autohet.runtime.step.batches import EvaluationRows
from autohet.runtime.step.generation import TrainerHooks, TrainingSetup, WorkerGeneration
from autohet.runtime.step.loss_scale import LossScale
from autohet.runtime.step.replica_check import ReplicaCheck, ReplicasDiffer, exchange
from autohet.runtime.step.row_count import RowsDiffer
from autohet.runtime.step.votes import Vote, Voter, check_rows, skip_reason
from planner.plans.plan import Pipeline

MOST_REPAIRS = 2
MAX_NAMED = 16
"""Limit on the tensors that a worker names as the cause of a skipped step."""


@dataclass(frozen=True)
class StateVersion:
    """Version of a state: its number of steps, and whether all of it is at that step.

    A state is not whole during an update and after one that failed midway. Some tensors are then at
    `step` and others at the next one, and nothing may use the state.
    """

    step: int
    whole: bool = True


class HalfUpdated(RuntimeError):
    """Failure of an update after it had changed tensors: the state is of no step any more."""


@dataclass(frozen=True)
class EvaluationEnded:
    """Evaluation that all workers stopped after the same global batch, on a stop request.

    checkpoint: True if a checkpoint is wanted of the step after which they stop.
    """

    checkpoint: bool


@dataclass(frozen=True)
class KeptPasses:
    """Passes of a step, all ended, of a worker whose pipeline has outlived another.

    gradients: accumulated and not summed. The rest is this worker's part of the vote; voter: counts
    rows, messages and pairs.
    """

    step: int
    gradients: GradientSync
    loss: Tensor
    num_targets: Tensor
    voter: Voter
    overflows: Tensor | None

    def add_to(self, voter: Voter, overflows: Tensor | None) -> None:
        """Add rows, messages, pairs and overflows to those of this worker's rest of the step."""
        if voter.rows is not None and self.voter.rows is not None:
            voter.rows.add_all(self.voter.rows)
        if voter.messages is not None and self.voter.messages is not None:
            voter.messages.add_all(self.voter.messages)
        if voter.preference is not None and self.voter.preference is not None:
            for name, value in self.voter.preference.sums.items():
                voter.preference.sums[name] = voter.preference.sums[name] + value
        if overflows is not None and self.overflows is not None:
            overflows += self.overflows


class UpdateTimes:
    """Device times of a trainer's updates, for which the host does not wait."""

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._marks: list[tuple[Any, Any]] = []
        """Marks of the stream before and after each of the last two updates."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the update that the context launches; one that fails is left out."""
        begin = self._clock.mark()
        yield
        newest = (begin, self._clock.mark())
        self._marks = [*self._marks[-1:], newest]

    @property
    def newest_s(self) -> float:
        """Seconds of the newest update known to have ended; 0 before the first."""
        # On a GPU the newest update may still run when the host has launched it.
        ended = self._marks if self._clock.in_step_with_host else self._marks[:-1]
        if not ended:
            return 0.0
        begin, end = ended[-1]
        return self._clock.seconds(begin, end)


class Trainer(ABC):
    """Owner of the training state of one worker for one generation.

    `train_step` is called from one thread. A step whose summed gradient is not finite, or that the
    job asks to skip, is committed without an update, by all workers alike.

    voter: takes stop requests. world, counts_loss: as `Voter` has them.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        generation: WorkerGeneration,
        hooks: TrainerHooks,
        world: Group,
        *,
        counts_loss: bool,
    ) -> None:
        self.training = setup.training
        self._device = setup.device
        self.state = generation.state
        self.version = StateVersion(generation.step)
        self.groups = generation.groups
        self.voter = Voter(
            world, generation.groups, setup.device, counts_loss, hooks.preservation_status
        )
        self._clock = generation.groups.back_end.clock
        self.hooks = hooks
        self.prepared: int | None = None
        """Step whose gradients are summed and whose vote is cast, but not applied; None: none."""
        self.last_vote: tuple[int, Vote] | None = None
        """Newest vote that this worker knows the result of, with its step."""
        self.phase = "idle"
        # A roll-forward comes from another thread than the step.
        self._applying = threading.Lock()
        self._updates = UpdateTimes(self._clock)
        self.loss_scale: LossScale | None = None
        """Scale of gradients in fp16 stages, equal at all workers; None: the plan has none."""
        self.pipelines = generation.plan.pipelines
        self.num_rows = generation.plan.global_batch_sequences
        """Rows of a step's global batch."""
        self.kept: KeptPasses | None = None
        """Passes of a step that a death has ended at the gate."""
        self.replicas: ReplicaCheck | None = None
        """Check that holders of a shard are still bit-equal, part of each vote.

        All workers have one, or none has.
        """
        self.audit: Audit | None = None
        """Audit of the devices' arithmetic; all workers have one, or none has."""

    @abstractmethod
    def _gradients_of(
        self, batch: Callable[[int, range], Batch]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Any, Any, Any]]:
        """Run the passes and sum the gradients.

        Return this worker's part of the squared norm, its losses, its targets, and three marks of
        the stream: at the begin of the passes, at their end and at the end of the sums.
        """

    @property
    @abstractmethod
    def compute_s(self) -> float:
        """Seconds of the last step's forward and backward passes on the device.

        The host must have waited for the end of the step.
        """

    @property
    def relative_work(self) -> float:
        """Work of the last step's microbatches relative to average rows."""
        return 1.0

    @abstractmethod
    def apply_update(self, vote: Vote) -> None:
        """Change the state in place with the summed gradients of the prepared step."""

    def _bad_gradients(self) -> tuple[str, ...]:
        """Return the names of parameters whose summed gradient on this worker is not finite."""
        return ()

    def _overflows(self) -> Tensor | None:
        """Return the number of this worker's microbatches that overflowed in fp16, on the device.

        None if it computes in another format.
        """
        return None

    def _explain_skip(self, vote: Vote) -> Skipped | None:
        """Return this worker's view of the cause of a skip; None if the step changes weights."""
        reason = skip_reason(vote, self.step, self.training)
        if reason is None:
            return None
        if reason is SkipReason.GRADIENT_NORM:
            return Skipped(reason, f"{vote.gradient_norm:.4g}")
        if reason is SkipReason.REQUESTED:
            return Skipped(reason)
        return Skipped(
            reason,
            parameters=not_finite(self.state, "param/")[:MAX_NAMED],
            gradients=self._bad_gradients()[:MAX_NAMED],
            loss_not_finite=not math.isfinite(vote.loss_sum),
        )

    def rebuild_derived(self, names: Collection[str]) -> None:  # noqa: B027
        """Rebuild everything derived from these state tensors, whose bits were repaired."""

    @property
    def step(self) -> int:
        """Number of committed updates in the state, which is the number of the next step."""
        return self.version.step

    def train_step(self, batch: Callable[[int, range], Batch]) -> StepRecord:
        """Run the next step; every worker of the plan calls it. Blocks.

        `last_vote` is then that of this step.

        `batch(step, sequences)` gives tokens and targets of these positions of the step's global
        batch.

        Raises:
            PeerLost, Interrupted: the step is not committed here; `prepared` tells whether it can
            still be.
        """
        started = time.perf_counter()
        assert self.prepared is None, f"step {self.prepared} is prepared: apply or discard it first"
        try:
            self.groups.check()
            vote, marks, parted, changed = self._run_and_vote(batch)
            audit = _settle(self.audit, self.replicas, self.step, vote)
            if changed:
                audit = (audit or AuditRecord(())).with_mismatches(changed)
        except (Interrupted, PeerLost):
            # Peers that wait for this worker, but not for the lost one, must wake up too. At the
            # gate nobody waits for it, and others of its pipeline may still be in their passes.
            if self.kept is None:
                self.groups.interrupt()
            raise
        voted = time.perf_counter()
        step = self.step
        skipped = self._explain_skip(vote)
        self.apply_prepared(vote)
        ended = time.perf_counter()
        parts = self._parts(started, voted, marks)
        parts["optimizer"] = self._updates.newest_s
        return StepRecord(
            step=step,
            loss=vote.loss,
            gradient_norm=vote.gradient_norm,
            tokens=vote.tokens,
            seconds=ended - started,
            generation=self.groups.generation,
            ended_at=time.monotonic(),
            parts_s=parts,
            parted=parted,
            skipped=skipped,
            relative_work=self.relative_work,
            peak_memory_bytes=_peak_memory_bytes(self._device),
            rewards=vote.rewards,
            loss_scale=self.loss_scale,
            audit=audit,
        )

    def evaluate(self, rows: EvaluationRows) -> EvaluationRecord | EvaluationEnded:
        """Return the mean loss over `rows`, by forward passes alone.

        Every worker of the plan calls it. Blocks. State, gradients and votes of steps stay as they
        are.

        Raises:
            PeerLost, Interrupted: another generation has to evaluate again.
        """
        started = time.perf_counter()
        try:
            self.groups.check()
            self._enter("evaluate")
            self._before_evaluation()
            seen = Vote()
            for index in range(rows.num_batches):
                loss, num_targets = self._evaluate_batch(rows, index)
                batch = self.voter.count_evaluation(loss, num_targets)
                check_rows(batch, self.voter, rows.num_in_batch(index), self.step)
                if batch.stops:
                    return EvaluationEnded(checkpoint=batch.checkpoints > 0)
                seen = seen.with_batch(batch)
        except (Interrupted, PeerLost):
            self.groups.interrupt()
            raise
        self.phase = "idle"
        return EvaluationRecord(
            step=self.step,
            loss=seen.loss,
            tokens=seen.tokens,
            sequences=rows.num_rows,
            seconds=time.perf_counter() - started,
            generation=self.groups.generation,
            rewards=seen.rewards,
        )

    def _before_evaluation(self) -> None:  # noqa: B027
        """Bring the weights that are computed with to the present step."""

    def _evaluate_batch(self, rows: EvaluationRows, index: int) -> tuple[Tensor, Tensor]:
        """Return this worker's losses and targets of one global batch of evaluation rows."""
        raise NotImplementedError

    def _run_and_vote(
        self, batch: Callable[[int, range], Batch]
    ) -> tuple[Vote, tuple[Any, Any, Any], tuple[ReplicaMismatch, ...], tuple[AuditMismatch, ...]]:
        """Compute the gradients and vote on them.

        If the vote reports a replica mismatch, repair the replicas and run the step again; if it
        reports messages that changed, run it again; if it reports an overflow in fp16, halve the
        scale and run it again.
        """
        found: tuple[ReplicaMismatch, ...] = ()
        changed: tuple[AuditMismatch, ...] = ()
        num_repairs = 0
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.at(self.step)
        while num_repairs <= MOST_REPAIRS:
            squares, loss, num_targets, marks = self._gradients_of(batch)
            vote = self._cast_vote(squares, loss, num_targets)
            if not self._must_repeat(vote):
                return vote, marks, found, changed
            if vote.has_changed_messages:
                changed += _find_changed(self.voter, self.pipelines, self.step)
                num_repairs += 1
            elif vote.parted:
                assert self.replicas is not None
                repaired = self.replicas.repair(self.step)
                self.rebuild_derived({each.tensor for each in repaired})
                found += repaired
                num_repairs += 1
            else:
                assert self.loss_scale is not None
                self.loss_scale = self.loss_scale.halved(self.step)
        raise ReplicasDiffer("; ".join(str(each) for each in (*found, *changed)))

    def _must_repeat(self, vote: Vote) -> bool:
        """Return True if the step did not happen and is run again, by all workers alike."""
        can_halve = self.loss_scale is not None and self.loss_scale.can_halve
        return vote.parted != 0 or vote.has_changed_messages or (vote.overflows > 0 and can_halve)

    def _parts(self, started: float, voted: float, marks: tuple[Any, Any, Any]) -> dict[str, float]:
        """Return seconds by part, on the device.

        The host has waited for the vote's end, so the vote gets the rest: its own time and waits.
        """
        begin, passes_done, summed = marks
        compute = self.compute_s
        passes = self._clock.seconds(begin, passes_done)
        sums = self._clock.seconds(passes_done, summed)
        vote = max(0.0, voted - started - passes - sums)
        return {
            "compute": compute,
            "wait": max(0.0, passes - compute),
            "gradient_sync": sums,
            "vote": vote,
        }

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if self.hooks.on_phase is not None:
            self.hooks.on_phase(phase, self.step)

    def _cast_vote(self, squares: Tensor, loss: Tensor, num_targets: Tensor) -> Vote:
        """Cast this worker's vote: one all-reduce over all workers, which decides the step."""
        checks: dict[str, Tensor | float] = {}
        if self.replicas is not None:
            checks["parted"] = self.replicas.contribution(self.step)
        if self.audit is not None:
            checks["audit"] = self.audit.contribution(self.step)
        overflows = self._overflows()
        if overflows is not None:
            checks["overflows"] = overflows
        mine = self.voter.contribution(self.step, squares, loss, num_targets, checks)
        # Before the vote is sent: a peer that sees its result may count on this worker's gradients.
        self.prepared = self.step
        self._enter("vote")
        vote = self.voter.count(mine)
        if self._must_repeat(vote):
            self.prepared = None
            return vote
        try:
            check_rows(vote, self.voter, self.num_rows, self.step)
        except RowsDiffer:
            self.prepared = None
            raise
        self.last_vote = (self.step, vote)
        return vote

    def apply_prepared(self, vote: Vote | None = None) -> bool:
        """Apply the prepared step, without communication.

        Return True if the weights changed (the step was not skipped). A call that failed before it
        changed a tensor may be repeated.

        vote: the vote that another survivor saw; not needed if this worker saw it (`last_vote`).

        Raises:
            HalfUpdated: an earlier call failed in the middle of the update.
        """
        with self._applying:
            if not self.version.whole:
                raise HalfUpdated(
                    f"the update of step {self.step} broke off: its state is of no step"
                )
            assert self.prepared == self.step, (
                f"step {self.prepared} is prepared, {self.step} is next"
            )
            # This worker may have seen the result itself, just before it was interrupted.
            if self.last_vote is not None:
                voted_step, seen = self.last_vote
                if voted_step == self.step:
                    vote = seen
            assert vote is not None, "without the vote's result the step did not happen"
            self.last_vote = (self.step, vote)
            self._enter("apply")
            if self.hooks.before_update is not None:
                self.hooks.before_update()
            changes = skip_reason(vote, self.step, self.training) is None
            if changes:
                with self._updates.measure():
                    # From the first changed tensor to the last the state is of no step.
                    self.version = StateVersion(self.step, whole=False)
                    self.apply_update(vote)
            self.prepared = None
            self.version = StateVersion(self.step + 1)
            self.phase = "idle"
            return changes


def _find_changed(
    voter: Voter, pipelines: Sequence[Pipeline], step: int
) -> tuple[AuditMismatch, ...]:
    """Return the borders whose messages changed in this step, the same at every worker.

    Blocks for an exchange.
    """
    assert voter.messages is not None
    table = exchange(voter.world, voter.messages.differences().tolist()).tolist()
    differences = dict(zip(voter.world.members, table, strict=True))
    found = []
    for layer, workers in changed_borders(pipelines, differences):
        found.append(AuditMismatch(step, layer, workers, (), AuditCause.MESSAGES))
    return tuple(found)


def _settle(
    audit: Audit | None, replicas: ReplicaCheck | None, step: int, vote: Vote
) -> AuditRecord | None:
    """Return the outcome of the step's audit; None if none was due."""
    record = None if audit is None else audit.settle(step, vote.audit)
    if record is not None and replicas is not None and record.weights_differ:
        replicas.request()
    return record


def _peak_memory_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.max_memory_allocated(device))


def not_finite(tensors: Mapping[str, Tensor], prefix: str) -> tuple[str, ...]:
    """Return the names of tensors under `prefix` with a value that is not finite.

    The names come without `prefix`.
    """
    found = []
    for name, tensor in tensors.items():
        if name.startswith(prefix) and not bool(torch.isfinite(tensor).all()):
            found.append(name.removeprefix(prefix))
    return tuple(found)
