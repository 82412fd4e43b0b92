"""Where one worker stands in a plan: its stage, its neighbours, and whom it exchanges hidden states with."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Pipeline, Plan, Stage


@dataclass(frozen=True)
class Place:
    """One worker's place. `first_sequence` is where its pipeline's part of the global batch begins."""

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
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == len(self.pipeline.stages) - 1

    def sequences(self, microbatch: int) -> range:
        """Positions within the global batch of one microbatch."""
        size = self.pipeline.microbatch_sequences
        return range(self.first_sequence + microbatch * size, self.first_sequence + (microbatch + 1) * size)

    @property
    def upstream(self) -> str | None:
        """The worker of the stage before that this one takes hidden states from."""
        return None if self.is_first else _partner(self.tp_rank, self.stage, self.pipeline.stages[self.stage_index - 1])

    @property
    def downstream(self) -> str | None:
        """The worker of the stage after that this one takes gradients from."""
        return None if self.is_last else _partner(self.tp_rank, self.stage, self.pipeline.stages[self.stage_index + 1])

    @property
    def send_forward_to(self) -> tuple[str, ...]:
        """Workers of the stage after whose `upstream` this one is."""
        return () if self.is_last else _served(self.tp_rank, self.stage, self.pipeline.stages[self.stage_index + 1])

    @property
    def send_backward_to(self) -> tuple[str, ...]:
        """Workers of the stage before whose `downstream` this one is."""
        return () if self.is_first else _served(self.tp_rank, self.stage, self.pipeline.stages[self.stage_index - 1])


def _partner(rank: int, mine: Stage, other: Stage) -> str:
    """Hidden states are whole on every rank of a stage: rank j takes from rank j * t1 // t2."""
    return other.workers[rank * other.tp_degree // mine.tp_degree]


def _served(rank: int, mine: Stage, other: Stage) -> tuple[str, ...]:
    return tuple(w for j, w in enumerate(other.workers) if j * mine.tp_degree // other.tp_degree == rank)


def place_of(plan: Plan, worker: str) -> Place | None:
    """The place of a worker; None for one that the plan does not use."""
    first = 0
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if worker in stage.workers:
                return Place(worker, p, s, stage.workers.index(worker), pipeline, first)
        first += pipeline.num_sequences
    return None
