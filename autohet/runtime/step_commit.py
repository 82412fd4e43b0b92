"""What every trainer of a generation shares: the vote that commits a step, the update that follows,
and what is reported of both.

A step is committed by all or by none. Its vote is one all-reduce over every worker; when it ends at
anyone, everyone has contributed, so everyone has the summed gradients of what it keeps the state
of: is *prepared*. A survivor that was interrupted before it saw the result can still apply the step
with the result that another survivor saw (`apply_prepared`), and must, since that one has applied
it. The update itself talks to nobody, where state is sharded, too: what the others compute with is
sent at the begin of the next step. So each worker's part of the layout is whole as soon as its own
update is, and survivors go forward over a step exactly if every shard of it has a live holder; else
the run goes back to the newest step of which copies have what is missing.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.batches import Batch, EvaluationRows
from autohet.runtime.generation import TrainerHooks, TrainingSetup, WorkerGeneration
from autohet.runtime.groups import Group, PeerLost
from autohet.runtime.messages import Parted, Skipped, SkipReason
from autohet.runtime.replica_check import ReplicaCheck, ReplicasParted

MOST_REPAIRS = 2
MAX_NAMED = 16
"""Tensors that a worker names as the cause of a skipped step."""
PHASES = ("forward", "backward", "gradient_sync", "vote", "apply")


@dataclass(frozen=True)
class Vote:
    """What all workers' contributions to a step add up to. `tokens` counts targets; `replicating`
    and the two after it count workers whose part of the open replication round is still under way,
    or has failed, and those that still write an earlier checkpoint. `parted` is not zero where
    holders of a shard are not bit-equal (`replica_check`): then the step did not happen.

    `squared_norm` is of the gradient of `loss_sum`, the sum (not the mean) of the global batch's
    losses; NaN or infinite where a gradient is.
    """

    squared_norm: float
    loss_sum: float
    tokens: int
    stops: int
    checkpoints: int
    members: int
    replicating: int = 0
    replication_failures: int = 0
    writing: int = 0
    parted: int = 0

    @property
    def loss(self) -> float:
        """Mean over the targets of the global batch."""
        return self.loss_sum / max(1, self.tokens)

    @property
    def gradient_norm(self) -> float:
        """Global norm of the mean loss's gradient, before clipping; NaN where it is not finite."""
        return (
            math.sqrt(self.squared_norm) / max(1, self.tokens)
            if math.isfinite(self.squared_norm)
            else math.nan
        )

    @property
    def is_finite(self) -> bool:
        """False: no worker changes weights or moments; the step counts, and data and learning rate
        go on.
        """
        return math.isfinite(self.squared_norm) and math.isfinite(self.loss_sum)


@dataclass(frozen=True)
class StateVersion:
    """What a state is: after how many steps, and whether all of it is. In the middle of an update,
    and for good once one has failed there, it is `step`'s in some tensors and the next one's in
    others: nobody may use it.
    """

    step: int
    whole: bool = True


class HalfUpdated(RuntimeError):
    """An update broke off after it had changed tensors; this process's state is of no step any
    more.
    """


@dataclass(frozen=True)
class StepResult:
    """A committed step.

    `gradient_norm` is before clipping; `parts_s` where this worker's time went. On a GPU its
    `optimizer` is the update before, since the host does not wait for this step's.
    """

    step: int
    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    stop: bool
    checkpoint: bool
    applied: bool
    replicating: bool = False
    replication_failed: bool = False
    writing: bool = False
    parts_s: Mapping[str, float] = field(default_factory=dict)
    parted: tuple[Parted, ...] = ()
    """Shards whose holders had parted and were made equal before the step was run."""
    skipped: Skipped | None = None
    """Why no weight was changed."""
    relative_work: float = 1.0
    """Work of this worker's microbatches by that of average rows."""


@dataclass(frozen=True)
class EvaluationResult:
    """Mean cross entropy over all targets of the evaluation rows, of the state after `step`
    updates. `seconds`: this worker's.
    """

    step: int
    loss: float
    tokens: int
    sequences: int
    seconds: float


@dataclass(frozen=True)
class EvaluationEnded:
    """An evaluation that all workers gave up after the same global batch, since one is to stop.
    checkpoint: whether a checkpoint is wanted of the step that they stop after.
    """

    checkpoint: bool


class Trainer(ABC):
    """Owns the training state of one worker for one generation. `train_step` is called from one
    thread.

    A step whose summed gradient is not finite, or that the job asks to skip, is committed without
    an update, by all workers alike.

    world: all workers of the plan, for the vote. counts_loss: whether this worker's losses and
    targets are the vote's: of all workers that have the same ones, one.
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
        self.training, self._device = setup.training, setup.device
        self.state, self.version = generation.state, StateVersion(generation.step)
        self._groups, self._world, self._clock = (
            generation.groups,
            world,
            generation.groups.back_end.clock,
        )
        self._hooks, self._counts_loss = hooks, counts_loss
        self.prepared: int | None = None
        self.last_vote: tuple[int, Vote] | None = None
        self.phase = "idle"
        self._applying = threading.Lock()  # a roll-forward comes from another thread than the step
        self._stop, self._checkpoint = threading.Event(), threading.Event()
        self._updates: list[tuple[Any, Any]] = []  # marks of the last two
        self.replicas: ReplicaCheck | None = None
        """Asked in each vote whether holders of a shard are still bit-equal; all workers have one,
        or none has.
        """

    @abstractmethod
    def _gradients_of(
        self, batch: Callable[[int, range], Batch]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Any, Any, Any]]:
        """Passes and gradient sums: this worker's part of the squared norm, its losses, its
        targets; marks of the stream at the begin of the passes, at their end and at the end of the
        sums.
        """

    @property
    @abstractmethod
    def compute_s(self) -> float:
        """What the last step's forward and backward passes took on the device; the host has waited
        for the end of the step.
        """

    @property
    def relative_work(self) -> float:
        """Work of the last step's microbatches by that of average rows."""
        return 1.0

    @abstractmethod
    def _update(self, vote: Vote) -> None:
        """Change the state in place with the summed gradients of the prepared step."""

    def _bad_gradients(self) -> tuple[str, ...]:
        """Names of parameters whose summed gradient here is not finite."""
        return ()

    def _skip_reason(self, vote: Vote) -> SkipReason | None:
        """Why the step changes no weights: a function of vote, step and job alone, so that all
        workers, and survivors that roll forward, decide alike. None: it changes them.
        """
        limit = self.training.skip_gradient_norm_above
        if not vote.is_finite:
            return SkipReason.NOT_FINITE
        if self.training.skips(self.step):
            return SkipReason.REQUESTED
        if limit is not None and vote.gradient_norm > limit:
            return SkipReason.GRADIENT_NORM
        return None

    def _skipped(self, vote: Vote) -> Skipped | None:
        """What this worker knows of the cause of a skip; None where the step changes weights."""
        reason = self._skip_reason(vote)
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

    def _state_mended(self, names: Collection[str]) -> None:  # noqa: B027
        """These tensors of the state have got other bits: what is made of them is made anew."""

    @property
    def step(self) -> int:
        """Committed updates in the state: the number of the next step."""
        return self.version.step

    def request_stop(self, *, checkpoint: bool = False) -> None:
        """Any thread: all workers stop after the same step, the one whose vote next carries this
        worker's flag.
        """
        if checkpoint:
            self._checkpoint.set()
        self._stop.set()

    def train_step(self, batch: Callable[[int, range], Batch]) -> StepResult:
        """Run the next step; every worker of the plan calls it. Blocks.

        `batch(step, sequences)` gives tokens and targets of these positions of the step's global
        batch.

        Raises:
            PeerLost, Interrupted: the step is not committed here; `prepared` tells whether it can
            still be.
        """
        started = time.perf_counter()
        assert self.prepared is None, f"step {self.prepared} is prepared: apply or discard it first"
        try:
            self._groups.check()
            vote, marks, parted = self._voted(batch)
        except PeerLost:
            # whoever waits for this worker, though not for the lost one, is woken too
            self._groups.interrupt()
            raise
        voted = time.perf_counter()
        step, skipped = self.step, self._skipped(vote)
        self.apply_prepared(vote)
        ended = time.perf_counter()
        parts = self._parts(started, voted, marks) | {"optimizer": self._update_s()}
        return StepResult(
            step,
            vote.loss,
            vote.gradient_norm,
            vote.tokens,
            ended - started,
            vote.stops > 0,
            vote.checkpoints > 0,
            skipped is None,
            vote.replicating > 0,
            vote.replication_failures > 0,
            vote.writing > 0,
            parts,
            parted,
            skipped,
            self.relative_work,
        )

    def evaluate(self, rows: EvaluationRows) -> EvaluationResult | EvaluationEnded:
        """Mean loss over `rows`, by forward passes alone; every worker of the plan calls it.
        Blocks. State, gradients and votes of steps stay as they are.

        Raises:
            PeerLost, Interrupted: another generation has to evaluate again.
        """
        started = time.perf_counter()
        try:
            self._groups.check()
            self._enter("evaluate")
            self._before_evaluation()
            loss_sum, tokens = 0.0, 0
            for index in range(rows.num_batches):
                loss, num_targets = self._evaluate_batch(rows, index)
                totals = self._sum_evaluation(loss, num_targets)
                if totals[2]:
                    return EvaluationEnded(checkpoint=totals[3] > 0)
                loss_sum += totals[0]
                tokens += int(totals[1])
        except PeerLost:
            self._groups.interrupt()
            raise
        self.phase = "idle"
        seconds = time.perf_counter() - started
        return EvaluationResult(
            self.step, loss_sum / max(1, tokens), tokens, rows.num_rows, seconds
        )

    def _before_evaluation(self) -> None:  # noqa: B027
        """Make sure that what is computed with is of the present step."""

    def _evaluate_batch(self, rows: EvaluationRows, index: int) -> tuple[Tensor, Tensor]:
        """This worker's losses and targets of one global batch of evaluation rows."""
        raise NotImplementedError

    def _sum_evaluation(self, loss: Tensor, num_targets: Tensor) -> list[float]:
        """Losses, targets, stop and checkpoint flags of all workers: one all-reduce for a global
        batch.
        """
        mine = torch.zeros(5, dtype=torch.float64, device=self._device)
        if self._counts_loss:
            mine[0], mine[1] = loss, num_targets
        mine[2], mine[3] = float(self._stop.is_set()), float(self._checkpoint.is_set())
        mine[4:5].copy_(self._groups.alive, non_blocking=True)
        self._world.wait_on_host(self._world.start_all_reduce(mine))
        totals: list[float] = mine.tolist()
        if totals[4] != self._world.size:
            raise PeerLost(f"{totals[4]:.0f} of {self._world.size} workers evaluated")
        return totals

    def _voted(
        self, batch: Callable[[int, range], Batch]
    ) -> tuple[Vote, tuple[Any, Any, Any], tuple[Parted, ...]]:
        """Gradients and their vote; where it finds that replicas have parted they are made equal,
        and the step is run again.
        """
        found: tuple[Parted, ...] = ()
        for _ in range(MOST_REPAIRS + 1):
            squares, loss, num_targets, marks = self._gradients_of(batch)
            vote = self._cast_vote(squares, loss, num_targets)
            if not vote.parted:
                return vote, marks, found
            assert self.replicas is not None
            mended = self.replicas.mend(self.step)
            self._state_mended({each.tensor for each in mended})
            found += mended
        raise ReplicasParted("; ".join(str(each) for each in found))

    def _parts(self, started: float, voted: float, marks: tuple[Any, Any, Any]) -> dict[str, float]:
        """Seconds by part, on the device.

        The vote, whose end the host has waited for, has what is left: what it took, and what
        waited.
        """
        begin, passes_done, summed = marks
        compute = self.compute_s
        passes, sums = (
            self._clock.seconds(begin, passes_done),
            self._clock.seconds(passes_done, summed),
        )
        vote = max(0.0, voted - started - passes - sums)
        return {
            "compute": compute,
            "wait": max(0.0, passes - compute),
            "gradient_sync": sums,
            "vote": vote,
        }

    def _update_s(self) -> float:
        """Seconds of the newest update that the host knows to have ended; 0 before there is one."""
        ended = self._updates if self._clock.in_step_with_host else self._updates[:-1]
        return self._clock.seconds(*ended[-1]) if ended else 0.0

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if self._hooks.on_phase is not None:
            self._hooks.on_phase(phase, self.step)

    def _cast_vote(self, squares: Tensor, loss: Tensor, num_targets: Tensor) -> Vote:
        """One all-reduce over all workers: it decides the step.

        Loss and tokens come from workers that count them.
        """
        mine = torch.zeros(10, dtype=torch.float64, device=self._device)
        mine[0] = squares
        mine[1], mine[2] = (loss, num_targets) if self._counts_loss else (0.0, 0.0)
        mine[3], mine[4] = float(self._stop.is_set()), float(self._checkpoint.is_set())
        mine[5:6].copy_(
            self._groups.alive, non_blocking=True
        )  # last, when all before it in the stream has ended
        if self._hooks.preservation_status is not None:
            status = self._hooks.preservation_status()
            mine[6], mine[7], mine[8] = (
                float(status.pending),
                float(status.failed),
                float(status.writing),
            )
        mine[9] = 0.0 if self.replicas is None else self.replicas.contribution(self.step)
        self.prepared = self.step  # before anything leaves: whoever sees the result may count on it
        self._enter("vote")
        self._world.wait_on_host(self._world.start_all_reduce(mine))
        totals = mine.tolist()
        vote = Vote(totals[0], totals[1], *(int(total) for total in totals[2:]))
        if (
            vote.members != self._world.size
        ):  # the others' generation was over before they voted: their sums are made up
            raise PeerLost(f"{vote.members} of {self._world.size} workers voted")
        if vote.parted:
            self.prepared = None
        else:
            self.last_vote = (self.step, vote)
        return vote

    def apply_prepared(self, vote: Vote | None = None) -> bool:
        """Apply the prepared step; talks to nobody, and may be called again where it failed before
        it changed a tensor.

        True if the weights changed (the step was not skipped).

        vote: what another survivor saw; not needed where this worker saw it itself (`last_vote`).

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
            if self.last_vote is not None and self.last_vote[0] == self.step:
                vote = self.last_vote[1]
            assert vote is not None, "without the vote's result the step did not happen"
            self.last_vote = (self.step, vote)
            self._enter("apply")
            if self._hooks.before_update is not None:
                self._hooks.before_update()
            changes = self._skip_reason(vote) is None
            if changes:
                begin = self._clock.mark()
                # From the first tensor on it is not whole until this call says so.
                self.version = StateVersion(self.step, whole=False)
                self._update(vote)
                self._updates = [*self._updates[-1:], (begin, self._clock.mark())]
            self.prepared = None
            self.version = StateVersion(self.step + 1)
            self.phase = "idle"
            return changes


def not_finite(tensors: Mapping[str, Tensor], prefix: str) -> tuple[str, ...]:
    """Names, without `prefix`, of the tensors under it that hold a value that is not finite."""
    return tuple(
        name.removeprefix(prefix)
        for name, tensor in tensors.items()
        if name.startswith(prefix) and not bool(torch.isfinite(tensor).all())
    )


__all__ = [
    "PHASES",
    "EvaluationEnded",
    "EvaluationResult",
    "HalfUpdated",
    "StateVersion",
    "StepResult",
    "Trainer",
    "Vote",
]
