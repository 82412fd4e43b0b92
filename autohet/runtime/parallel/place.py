"""Place of one worker in a plan: its stage, and its transfers at the stage's borders.

`planner.cost.links.traffic` decides the transfers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.links.traffic import Transfer, transfers_between
from planner.plans.plan import Pipeline, Plan, Stage, TensorShare


@dataclass(frozen=True)
class Deal:
    """Positions of the global batch that one pipeline computes in a step, by microbatch.

    Rows, document begins, dropout and evaluation rows all follow from it alone.
    """

    microbatches: tuple[range, ...]

    @classmethod
    def consecutive(cls, first: int, sizes: Sequence[int]) -> Deal:
        """Deal consecutive positions from `first` on to microbatches of these sizes."""
        starts = itertools.accumulate(sizes, initial=first)
        return cls(tuple(range(start, end) for start, end in itertools.pairwise(starts)))

    @property
    def count(self) -> int:
        return len(self.microbatches)


@dataclass(frozen=True)
class Place:
    """Place of one worker in a plan, with the part of the global batch of its pipeline."""

    worker: str
    stage_index: int
    tp_rank: int
    pipeline: Pipeline
    deal: Deal

    @property
    def stage(self) -> Stage:
        return self.pipeline.stages[self.stage_index]

    @property
    def tp_degree(self) -> int:
        return self.stage.tp_degree

    @property
    def share(self) -> TensorShare:
        """Share of this worker in each tensor that its stage cuts."""
        return self.stage.share(self.tp_rank)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == len(self.pipeline.stages) - 1

    def sequences(self, microbatch: int) -> range:
        """Return the positions of a microbatch's sequences within the global batch."""
        return self.deal.microbatches[microbatch]

    def share_of(self, microbatch: int) -> float:
        """Return the rows of a microbatch, as a part of those of a whole one."""
        return len(self.sequences(microbatch)) / self.pipeline.microbatch_sequences

    def transfer_from(self, offset: int) -> Transfer | None:
        """Return the transfer to this worker from the stage before (-1) or after (+1), if any.

        Hidden states come from the stage before, gradients from the one after.
        """
        neighbour = self._neighbour(offset)
        if neighbour is None:
            return None
        return transfers_between(neighbour, self.stage)[self.tp_rank]

    def transfers_to(self, offset: int) -> tuple[Transfer, ...]:
        """Return the transfers from this worker to the stage before (-1) or after (+1).

        They are in the order of that stage's ranks: all that name this worker as source.
        """
        neighbour = self._neighbour(offset)
        if neighbour is None:
            return ()
        transfers = transfers_between(self.stage, neighbour)
        return tuple(each for each in transfers if each.source == self.worker)

    def _neighbour(self, offset: int) -> Stage | None:
        is_end = self.is_first if offset < 0 else self.is_last
        return None if is_end else self.pipeline.stages[self.stage_index + offset]


def redeal(before: Plan, after: Plan) -> dict[tuple[Stage, ...], Deal]:
    """Deal rows of lost pipelines to those that go on, for a step whose other rows are computed.

    before, after: plans of one batch; `after` has whole pipelines of `before` alone. Each pipeline,
    known by its stages, gets the number of rows by which its share has grown.
    """
    more = {pipeline.stages: pipeline.num_sequences for pipeline in after.pipelines}
    lost: list[range] = []
    first = 0
    for pipeline in before.pipelines:
        end = first + pipeline.num_sequences
        if pipeline.stages in more:
            more[pipeline.stages] = max(0, more[pipeline.stages] - (end - first))
        else:
            lost.append(range(first, end))
        first = end
    # Where a share has shrunk, the others have grown by more than is lost: the last get less.
    dealt: dict[tuple[Stage, ...], Deal] = {}
    for pipeline in after.pipelines:
        microbatches: list[range] = []
        wanted = more[pipeline.stages]
        while wanted and lost:
            rows = lost.pop(0)
            taken = rows[: min(wanted, pipeline.microbatch_sequences)]
            microbatches.append(taken)
            wanted -= len(taken)
            if len(taken) < len(rows):
                lost.insert(0, rows[len(taken) :])
        dealt[pipeline.stages] = Deal(tuple(microbatches))
    return dealt


def place_of(plan: Plan, worker: str) -> Place | None:
    """Return the place of a worker; None if the plan does not use it."""
    first = 0
    for pipeline in plan.pipelines:
        for s, stage in enumerate(pipeline.stages):
            if worker in stage.workers:
                tp_rank = stage.workers.index(worker)
                deal = Deal.consecutive(first, pipeline.sizes)
                return Place(worker, s, tp_rank, pipeline, deal)
        first += pipeline.num_sequences
    return None
