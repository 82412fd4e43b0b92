"""The vote on a step: one all-reduce over all workers, and the decision that follows from it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.groups import GenerationGroups, Group, PeerLost
from autohet.runtime.job import TrainingSection
from autohet.runtime.messages import Rewards, SkipReason
from autohet.runtime.parallel.message_sums import MODULUS, MessageSums
from autohet.runtime.parallel.preference import PreferenceLoss
from autohet.runtime.step.row_count import RowCount, RowsDiffer, hashes_of
from recovery.peers.replication_rounds import PreservationStatus


@dataclass(frozen=True)
class Vote:
    """Sum of all workers' contributions to a step, or to a batch of evaluation rows.

    Its fields are the elements of the tensor that is summed, in this order (`Voter`).

    `tokens` counts targets. `pairs` counts pairs of answers of a preference job, `preferred` those
    whose chosen answer has the higher reward, and `reward_margin_sum` sums the differences of
    rewards. Of the workers, `replicating` counts those whose part of the open replication round is
    in flight, `replication_failures` those whose part has failed, and `writing` those that still
    write an earlier checkpoint. `parted` is not zero if holders of a shard are not bit-equal
    (`replica_check`): then the step did not happen, nor did it if `changed` says that messages
    between stages arrived otherwise than they were sent (`parallel.message_sums`). `audit` is not
    zero if equal devices computed one block to other bits (`audit`); the step counts. `overflows`
    is not zero if gradients of a stage in fp16 overflowed: then it is run again with a smaller
    scale. `rows` and `row_hashes` count the rows whose losses were computed (`row_count`). `ready`
    counts the workers that can begin the next generation after this step.

    `squared_norm` is that of the gradient of `loss_sum`, the sum (not the mean) of the global
    batch's losses; NaN or infinite if a gradient is.
    """

    squared_norm: float = 0.0
    loss_sum: float = 0.0
    tokens: int = 0
    stops: int = 0
    checkpoints: int = 0
    members: int = 0
    replicating: int = 0
    replication_failures: int = 0
    writing: int = 0
    parted: int = 0
    overflows: int = 0
    pairs: int = 0
    preferred: int = 0
    reward_margin_sum: float = 0.0
    rows: int = 0
    row_hashes: int = 0
    ready: int = 0
    audit: int = 0
    changed: int = 0

    @property
    def has_changed_messages(self) -> bool:
        return self.changed % MODULUS != 0

    @property
    def is_cut_over(self) -> bool:
        """True if the next generation begins after this step, for all workers alike."""
        return 0 < self.ready == self.members and not self.stops

    @property
    def num_losses(self) -> int:
        """Number of losses in `loss_sum`: of the pairs of a preference job, else of the targets."""
        return self.pairs or self.tokens

    @property
    def rewards(self) -> Rewards | None:
        """Rewards of a preference job's pairs; None: the job has none."""
        if not self.pairs:
            return None
        return Rewards(self.preferred / self.pairs, self.reward_margin_sum / self.pairs)

    @property
    def loss(self) -> float:
        """Mean loss over the targets, or pairs, of the global batch."""
        return self.loss_sum / max(1, self.num_losses)

    @property
    def gradient_norm(self) -> float:
        """Global norm of the mean loss's gradient, before clipping; NaN if it is not finite."""
        if not math.isfinite(self.squared_norm):
            return math.nan
        return math.sqrt(self.squared_norm) / max(1, self.num_losses)

    @property
    def is_finite(self) -> bool:
        """False if gradient or loss is not finite: no worker changes weights or moments.

        The step still counts; data and learning rate go on.
        """
        return math.isfinite(self.squared_norm) and math.isfinite(self.loss_sum)

    def with_batch(self, batch: Vote) -> Vote:
        """Return the sums of an evaluation with those of one more global batch."""
        return replace(
            self,
            loss_sum=self.loss_sum + batch.loss_sum,
            tokens=self.tokens + batch.tokens,
            pairs=self.pairs + batch.pairs,
            preferred=self.preferred + batch.preferred,
            reward_margin_sum=self.reward_margin_sum + batch.reward_margin_sum,
        )


PLACES = {each.name: place for place, each in enumerate(fields(Vote))}
"""Places of the vote's fields in the tensor that is summed."""
COUNTS = frozenset(each.name for each in fields(Vote) if each.type == "int")


def skip_reason(vote: Vote, step: int, training: TrainingSection) -> SkipReason | None:
    """Return the reason why a step changes no weights; None: it changes them.

    It is a function of vote, step and job alone, so that all workers, and survivors that roll
    forward, decide alike.
    """
    limit = training.skip_gradient_norm_above
    if not vote.is_finite:
        return SkipReason.NOT_FINITE
    if training.skips(step):
        return SkipReason.REQUESTED
    if limit is not None and vote.gradient_norm > limit:
        return SkipReason.GRADIENT_NORM
    return None


@dataclass
class Voter:
    """One worker's part of the sums over all workers that decide a step or an evaluation.

    world: all workers of the plan. counts_loss: True if the sums take this worker's losses and
    targets; of all workers that have the same ones, one has True.
    """

    world: Group
    groups: GenerationGroups
    device: torch.device
    counts_loss: bool
    preservation_status: Callable[[], PreservationStatus] | None = None
    """Returns the worker's contribution to the vote about its copies; None: it has none."""
    preference: PreferenceLoss | None = None
    """Loss of preferences, which counts pairs; None: another objective."""
    rows: RowCount | None = None
    """Rows whose losses this worker has computed; None: the plan's workers do not count them."""
    messages: MessageSums | None = None
    """Messages between stages; None: the plan's workers have none."""
    next_begins_at: int | None = None
    """Step at which this worker is ready to begin the next generation; None: it has none."""
    _readiness: threading.Lock = field(default_factory=threading.Lock)
    """Held while `next_begins_at` is put into a vote, or withdrawn."""
    _voted_step: int = -1
    """Newest step that this worker has contributed to."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _checkpoint: threading.Event = field(default_factory=threading.Event)
    _next_checkpoint: threading.Event = field(default_factory=threading.Event)

    def request_stop(self, *, checkpoint: bool = False) -> None:
        """Ask all workers to stop after the same step.

        It is the next step whose vote carries this worker's flag. Any thread may call it.
        """
        if checkpoint:
            self._checkpoint.set()
        self._stop.set()

    def request_checkpoint(self) -> None:
        """Ask all workers to make the next step durable that this worker votes on, and go on.

        Any thread may call it.
        """
        self._next_checkpoint.set()

    def withdraw(self, start_step: int) -> bool:
        """Do not begin the next generation at `start_step`; return False if the vote is cast.

        Any thread may call it.
        """
        with self._readiness:
            if self._voted_step >= start_step - 1:
                return False
            self.next_begins_at = None
            return True

    def contribution(
        self,
        step: int,
        squares: Tensor,
        loss: Tensor,
        num_targets: Tensor,
        checks: Mapping[str, Tensor | float],
    ) -> Tensor:
        """Return this worker's vote on `step`, whose gradients it has summed.

        squares: this worker's part of the squared norm. checks: its parts of `parted`, `audit` and
        `overflows`.
        """
        sums: dict[str, Tensor | float] = {"squared_norm": squares, **checks}
        with self._readiness:
            sums["ready"] = self.next_begins_at == step + 1
            self._voted_step = step
        if self.messages:
            sums["changed"] = self.messages.differences().sum()
        if self._next_checkpoint.is_set():
            self._next_checkpoint.clear()
            sums["checkpoints"] = 1.0
        if self.preservation_status is not None:
            status = self.preservation_status()
            sums["replicating"] = status.pending
            sums["replication_failures"] = status.failed
            sums["writing"] = status.writing
        return self._contribution(loss, num_targets, sums)

    def _contribution(
        self, loss: Tensor, num_targets: Tensor, sums: Mapping[str, Tensor | float]
    ) -> Tensor:
        """Return this worker's elements of a vote: losses, requests, and other `sums` by field."""
        sums = {"checkpoints": self._checkpoint.is_set(), **sums, "stops": self._stop.is_set()}
        if self.counts_loss:
            sums |= {"loss_sum": loss, "tokens": num_targets}
            if self.rows is not None:
                sums |= {"rows": self.rows.number, "row_hashes": self.rows.hashes}
            if self.preference is not None:
                sums |= self.preference.sums
        mine = torch.zeros(len(PLACES), dtype=torch.float64, device=self.device)
        for name, value in sums.items():
            mine[PLACES[name]] = value
        # Last, when all before it in the stream has ended.
        mine[PLACES["members"]].copy_(self.groups.alive[0], non_blocking=True)
        return mine

    def count(self, mine: Tensor) -> Vote:
        """Sum the contributions of all workers to a step; every worker calls it. Blocks.

        Raises:
            PeerLost, Interrupted: this worker does not know how the vote ended.
        """
        return self._count(mine, "voted")

    def count_evaluation(self, loss: Tensor, num_targets: Tensor) -> Vote:
        """Sum losses and targets of a global batch of evaluation rows; every worker calls it.

        The sum has stop requests as well, but no part of a step. Blocks.

        Raises:
            PeerLost, Interrupted: another generation has to evaluate again.
        """
        return self._count(self._contribution(loss, num_targets, {}), "evaluated")

    def _count(self, mine: Tensor, verb: str) -> Vote:
        work = self.world.start_all_reduce(mine)
        self.world.wait_on_host(work)
        totals: dict[str, Any] = dict(zip(PLACES, mine.tolist(), strict=True))
        totals |= {name: int(totals[name]) for name in COUNTS}
        vote = Vote(**totals)
        # The sums of a worker whose generation was over before are made up.
        if vote.members != self.world.size:
            raise PeerLost(f"{vote.members} of {self.world.size} workers {verb}")
        return vote


def check_rows(vote: Vote, voter: Voter, num_rows: int, step: int) -> None:
    """Check that the workers have computed the first rows of a global batch, each once.

    No-op if the plan's workers do not count rows.

    Raises:
        RowsDiffer: they have not; all workers raise it alike.
    """
    if voter.rows is None or (vote.rows, vote.row_hashes) == (num_rows, hashes_of(num_rows)):
        return
    raise RowsDiffer(
        f"step {step} did not happen: its workers computed {vote.rows} rows, which are not each of"
        f" the {num_rows} rows of its batch once; this is a fault of AutoHet"
    )
