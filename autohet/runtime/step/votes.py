"""The vote on a step: one all-reduce over all workers, and the decision that follows from it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autohet.runtime.groups import GenerationGroups, Group, PeerLost
from autohet.runtime.job import TrainingSection
from autohet.runtime.messages import Rewards, SkipReason
from autohet.runtime.parallel.preference import PreferenceLoss
from recovery.peers.replication_rounds import PreservationStatus


@dataclass(frozen=True)
class Vote:
    """Sum of all workers' contributions to a step.

    `tokens` counts targets. `pairs` counts pairs of answers of a preference job, `preferred` those
    whose chosen answer has the higher reward, and `reward_margin_sum` sums the differences of
    rewards. Of the workers, `replicating` counts those whose part of the open
    replication round is in flight, `replication_failures` those whose part has failed, and
    `writing` those that still write an earlier checkpoint. `parted` is not zero if holders of a
    shard are not bit-equal (`replica_check`): then the step did not happen. `overflows` is not zero
    if gradients of a stage in fp16 overflowed: then it is run again with a smaller scale.

    `squared_norm` is that of the gradient of `loss_sum`, the sum (not the mean) of the global
    batch's losses; NaN or infinite if a gradient is.
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
    overflows: int = 0
    pairs: int = 0
    preferred: int = 0
    reward_margin_sum: float = 0.0

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


class Voter:
    """One worker's part of the sums over all workers that decide a step or an evaluation.

    world: all workers of the plan. counts_loss: True if the sums take this worker's losses and
    targets; of all workers that have the same ones, one has True.
    """

    def __init__(
        self, world: Group, groups: GenerationGroups, device: torch.device, *, counts_loss: bool
    ) -> None:
        self.world = world
        self._groups = groups
        self._device = device
        self._counts_loss = counts_loss
        self._stop = threading.Event()
        self._checkpoint = threading.Event()
        self.preference: PreferenceLoss | None = None
        """Loss of preferences, which counts pairs; None: another objective."""
        self.preservation_status: Callable[[], PreservationStatus] | None = None
        """Returns the worker's contribution to the vote about its copies; None: it has none."""

    def request_stop(self, *, checkpoint: bool = False) -> None:
        """Ask all workers to stop after the same step.

        It is the next step whose vote carries this worker's flag. Any thread may call it.
        """
        if checkpoint:
            self._checkpoint.set()
        self._stop.set()

    def contribution(
        self,
        squares: Tensor,
        loss: Tensor,
        num_targets: Tensor,
        parted: Tensor | float,
        overflows: Tensor | None,
    ) -> Tensor:
        """Return this worker's vote on a step, whose gradients it has summed.

        squares: this worker's part of the squared norm. parted, overflows: as those of `Vote`;
        overflows is None if the worker computes in another format.
        """
        mine = torch.zeros(14, dtype=torch.float64, device=self._device)
        mine[0] = squares
        if self._counts_loss:
            mine[1] = loss
            mine[2] = num_targets
            self._add_preference(mine[11:])
        mine[3] = float(self._stop.is_set())
        mine[4] = float(self._checkpoint.is_set())
        if self.preservation_status is not None:
            status = self.preservation_status()
            mine[6] = float(status.pending)
            mine[7] = float(status.failed)
            mine[8] = float(status.writing)
        mine[9] = parted
        if overflows is not None:
            mine[10] = overflows
        # Last, when all before it in the stream has ended.
        mine[5:6].copy_(self._groups.alive, non_blocking=True)
        return mine

    def count(self, mine: Tensor) -> Vote:
        """Sum the contributions of all workers; every worker calls it. Blocks.

        Raises:
            PeerLost, Interrupted: this worker does not know how the vote ended.
        """
        squared_norm, loss_sum, *totals = self._summed(mine)
        *counts, margins = totals
        # The elements of `contribution` are in the order of the vote's fields.
        vote = Vote(squared_norm, loss_sum, *[int(count) for count in counts])
        vote = replace(vote, reward_margin_sum=margins)
        self._check_members(vote, "voted")
        return vote

    def count_evaluation(self, loss: Tensor, num_targets: Tensor) -> Vote:
        """Sum losses and targets of a global batch of evaluation rows; every worker calls it.

        The sum has stop requests as well, but no part of a step. Blocks.

        Raises:
            PeerLost, Interrupted: another generation has to evaluate again.
        """
        mine = torch.zeros(8, dtype=torch.float64, device=self._device)
        if self._counts_loss:
            mine[0] = loss
            mine[1] = num_targets
            self._add_preference(mine[5:])
        mine[2] = float(self._stop.is_set())
        mine[3] = float(self._checkpoint.is_set())
        mine[4:5].copy_(self._groups.alive, non_blocking=True)
        loss_sum, *counts, margins = self._summed(mine)
        tokens, stops, checkpoints, members, pairs, preferred = [int(count) for count in counts]
        found = Vote(
            0.0,
            loss_sum,
            tokens,
            stops,
            checkpoints,
            members,
            pairs=pairs,
            preferred=preferred,
            reward_margin_sum=margins,
        )
        self._check_members(found, "evaluated")
        return found

    def _summed(self, mine: Tensor) -> list[float]:
        work = self.world.start_all_reduce(mine)
        self.world.wait_on_host(work)
        totals: list[float] = mine.tolist()
        return totals

    def _check_members(self, vote: Vote, verb: str) -> None:
        """Raise PeerLost if a worker's generation was over before: its sums are made up."""
        if vote.members != self.world.size:
            raise PeerLost(f"{vote.members} of {self.world.size} workers {verb}")

    def _add_preference(self, sums: Tensor) -> None:
        """Write this worker's sums of preferences, which take three elements."""
        if self.preference is not None:
            sums.copy_(self.preference.sums)
