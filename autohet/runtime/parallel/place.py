"""Place of one worker in a plan: its stage, and its transfers at the stage's borders.

`planner.cost.links.traffic` decides the transfers.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.links.traffic import Transfer, transfers_between
from planner.plans.plan import Pipeline, Plan, Stage, TensorShare


@dataclass(frozen=True)
class Place:
    """Place of one worker in a plan.

    `first_sequence` is the first sequence of its pipeline's part of the global batch.
    """

    worker: str
    pipeline_index: int
    stage_index: int
    tp_rank: int
    pipeline: Pipeline
    first_sequence: int

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
        size = self.pipeline.microbatch_sequences
        start = self.first_sequence + microbatch * size
        return range(start, start + size)

    @property
    def takes_forward(self) -> Transfer | None:
        """Transfer of hidden states to this worker from the stage before; None if first."""
        if self.is_first:
            return None
        before = self._stage(-1)
        return transfers_between(before, self.stage)[self.tp_rank]

    @property
    def takes_backward(self) -> Transfer | None:
        """Transfer of gradients from the stage after to this worker; None at the last stage."""
        if self.is_last:
            return None
        after = self._stage(+1)
        return transfers_between(after, self.stage)[self.tp_rank]

    @property
    def gives_forward(self) -> tuple[Transfer, ...]:
        """Transfers of hidden states from this worker, in order of the ranks of the stage after.

        They are all transfers that name this worker as source.
        """
        if self.is_last:
            return ()
        after = self._stage(+1)
        return self._given(transfers_between(self.stage, after))

    @property
    def gives_backward(self) -> tuple[Transfer, ...]:
        """Transfers of this worker's input gradients, in order of the previous stage's ranks."""
        if self.is_first:
            return ()
        before = self._stage(-1)
        return self._given(transfers_between(self.stage, before))

    def _stage(self, offset: int) -> Stage:
        return self.pipeline.stages[self.stage_index + offset]

    def _given(self, transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        given = []
        for transfer in transfers:
            if transfer.source == self.worker:
                given.append(transfer)
        return tuple(given)


def place_of(plan: Plan, worker: str) -> Place | None:
    """Return the place of a worker; None if the plan does not use it."""
    first = 0
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if worker in stage.workers:
                tp_rank = stage.workers.index(worker)
                return Place(worker, p, s, tp_rank, pipeline, first)
        first += pipeline.num_sequences
    return None
