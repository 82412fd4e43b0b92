"""Plans of equal depth and cut whose stages are given as groups of GPUs: what `metis` and `fasop` search over."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster import Fleet, node_of
from planner.plan import Pipeline, Plan
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches, draft_fits
from planner.search.place import stages_on
from planner.search.tables import Tables

Group = tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """stages[s][d]: the tensor-parallel group of stage s in pipeline d; rows[s][d]: its table row."""

    stages: tuple[tuple[Group, ...], ...]
    rows: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """Pipelines."""
        return len(self.stages[0])


class Stager:
    """Turns GPUs in an order into stages over one set of tables."""

    def __init__(self, tables: Tables, fleet: Fleet):
        self.tables = tables
        self.fleet = fleet
        self._kind = {(tables.resources[k.resource].node_type, k.tp_degree): i for i, k in enumerate(tables.kinds)}
        self._row = {(row.kind, row.microbatch): i for i, row in enumerate(tables.rows)}

    def stages(self, gpus: Sequence[str], sizes: Sequence[int], width: int, microbatch: int) -> Staged | None:
        """The next `size` GPUs for each stage, `width` groups each; None where a group would leave its node or was
        not measured.
        """
        stages, rows, at = [], [], 0
        for size in sizes:
            tp = size // width
            groups = [tuple(gpus[at + d * tp : at + (d + 1) * tp]) for d in range(width)]
            found = [self.row(group, microbatch) for group in groups]
            if any(row is None for row in found):
                return None
            stages.append(tuple(groups))
            rows.append(tuple(row for row in found if row is not None))
            at += size
        return Staged(tuple(stages), tuple(rows))

    def rows(self, groups: Sequence[Group], microbatch: int) -> tuple[int, ...] | None:
        """Of each group; None where one would leave its node or was not measured."""
        rows = [self.row(group, microbatch) for group in groups]
        return None if None in rows else tuple(row for row in rows if row is not None)

    def shape(self, pipeline: Pipeline) -> Shape | None:
        """Of a pipeline of a plan; None where the tables do not know its groups or its microbatch size."""
        rows = self.rows([stage.workers for stage in pipeline.stages], pipeline.microbatch_sequences)
        ends = [stage.end_layer + 1 for stage in pipeline.stages]
        return None if rows is None else Shape(rows, (*ends[:-1], ends[-1] + 1))

    def row(self, group: Group, microbatch: int) -> int | None:
        nodes = {node_of(worker) for worker in group}
        if len(nodes) != 1:
            return None
        kind = self._kind.get((self.fleet.node_of(group[0]).node_type, len(group)))
        return None if kind is None else self._row.get((kind, microbatch))

    def slowest(self, staged: Staged) -> list[int]:
        """The slowest row of each stage."""
        whole = self.tables.time_sums[:, -1]
        return [max(rows, key=lambda row: (whole[row], row)) for rows in staged.rows]

    def draft(self, staged: Staged, ends: Sequence[int], batch: int, estimator: Estimator) -> Draft | None:
        """The draft with microbatches shared by speed; None where memory or the batch forbids it."""
        shapes = [Shape(tuple(rows[d] for rows in staged.rows), tuple(ends)) for d in range(staged.width)]
        draft = assign_microbatches(estimator, shapes, batch)
        return draft if draft is not None and draft_fits(estimator, draft) else None

    def plan(self, staged: Staged, draft: Draft, microbatch: int, model: str, batch: int, length: int) -> Plan:
        """The plan of a draft of `staged`, pipeline d on its own groups."""
        pipelines = tuple(
            Pipeline(stages_on(self.tables, shape, [stage[d] for stage in staged.stages]), k, microbatch)
            for d, (shape, k) in enumerate(draft.pipelines)
        )
        return Plan(model, batch, microbatch, length, pipelines)
