"""Pipelines that lost workers or were given some, cut again over those that they have: the repair that wastes no GPU."""

from collections.abc import Iterator, Sequence, Set

import numpy as np

from planner.plan import Pipeline, Plan
from planner.search.cost_tables import tables_of
from planner.search.cut import Balancer
from planner.search.draft import Estimator, Shape, assign_microbatches
from planner.search.place import stages_on
from planner.search.problem import Request
from planner.search.tables import Tables
from planner.strategies.lend import Crew, Lender, Roster
from planner.strategies.refine import draft_fits
from planner.strategies.staged import Stager

_EVERY = (1, 2, 3, 4, 5, 6)
_MOST_WALLS = 6
Walls = tuple[int, ...]


def recut(previous: Plan, request: Request, alive: Set[str]) -> list[Plan]:
    """The previous plan with each broken pipeline cut anew over its whole stages; and the best with nodes that others lend to it, or
    with free nodes taken on (`lend.py`). Empty where nothing is broken or free, or the batch cannot be shared. A pipeline whose
    rest cannot hold the model is left out.

    Gradient sync is shorter where pipelines are cut at the same blocks, so the cuts of each whole pipeline, and every second to
    sixth of them, are tried as walls; the estimate with its sync chooses.
    """
    tables = tables_of(request)
    stager = Stager(tables, request.fleet)
    crews = tuple(crew for p in previous.pipelines if (crew := _crew(stager, p, alive)) is not None)
    used = {worker for worker in previous.workers if worker in alive}
    free = tuple(node.workers for node in request.fleet.nodes if node.workers and not used & set(node.workers))
    broken = any(crew.ends is None for crew in crews)
    if not crews or not (free or broken):
        return []
    cutter = _Cutter(tables, request)
    own, *lent = Lender(tables, stager, request.global_batch_sequences, cutter.max_stages).rosters(Roster(crews, free))
    found = [cutter.best([own])] if broken else []
    found += [cutter.best(lent)]
    return [cutter.plan(previous, staffed) for staffed in found if staffed is not None]


def _crew(stager: Stager, pipeline: Pipeline, alive: Set[str]) -> Crew | None:
    """What is left of a pipeline; None where that is nothing, or a group that the tables do not know."""
    stages = [stage for stage in pipeline.stages if set(stage.workers) <= alive]
    groups = tuple(stage.workers for stage in stages)
    rows = stager.rows(groups, pipeline.microbatch_sequences)
    if not rows:
        return None
    whole = stager.shape(pipeline) if len(stages) == len(pipeline.stages) else None
    return Crew(groups, rows, None if whole is None else whole.ends)


def _walls(roster: Roster) -> list[Walls]:
    """Sets of blocks after which a new cut may be made to fall."""
    out: dict[Walls, None] = {}
    for ends in dict.fromkeys(crew.ends for crew in roster.crews if crew.ends is not None):
        for every in _EVERY:
            out.setdefault(tuple(end - 1 for end in ends[every - 1 : -1 : every]))
    return list(out)[: _MOST_WALLS - 1]


Staffed = list[tuple[Crew, Shape, int]]


class _Cutter:
    """Cuts crews, shares the batch among them and times what comes of it."""

    def __init__(self, tables: Tables, request: Request):
        self.tables, self.batch = tables, request.global_batch_sequences
        self.estimator = Estimator(tables)
        self.max_stages = min(request.max_stages or tables.num_blocks, tables.num_blocks)

    def best(self, rosters: Sequence[Roster]) -> "Staffed | None":
        """The fastest of some rosters, with the fastest walls for it."""
        timed = [
            (made[0], i, made[1]) for i, roster in enumerate(rosters) if (made := self.cut(roster, ())) is not None
        ]
        if not timed:
            return None
        seconds, i, staffed = min(timed, key=lambda item: item[:2])
        for walls in _walls(rosters[i]):
            made = self.cut(rosters[i], walls)
            if made is not None and made[0] < seconds:
                seconds, staffed = made
        return staffed

    def cut(self, roster: Roster, walls: Walls) -> tuple[float, Staffed] | None:
        """Estimated seconds of a step, and each crew with its shape and microbatches."""
        shapes = dict(self._shapes(roster, walls))
        draft = assign_microbatches(self.estimator, list(shapes.values()), self.batch) if shapes else None
        if draft is None or not draft_fits(self.estimator, draft):
            return None
        staffed = [(crew, shape, count) for crew, (shape, count) in zip(shapes, draft.pipelines, strict=True)]
        return self.estimator.draft_s(draft), staffed

    def _shapes(self, roster: Roster, walls: Walls) -> Iterator[tuple[Crew, Shape]]:
        anew = [crew.rows for crew in roster.crews if crew.ends is None and len(crew.rows) <= self.max_stages]
        cuts = None
        if anew:
            each = self.batch / len(roster.crews)
            sizes = np.array([self.tables.rows[rows[0]].microbatch for rows in anew])
            cuts = Balancer(self.tables, self.max_stages, walls).cut_each(anew, np.maximum(each / sizes, 1.0))
        for crew in roster.crews:
            if crew.ends is not None:
                yield crew, Shape(crew.rows, crew.ends)
            elif cuts is not None and crew.rows in anew:
                i = anew.index(crew.rows)
                if np.isfinite(cuts.bottleneck_s[i]):
                    yield crew, Shape(crew.rows, tuple(int(e) for e in cuts.ends[i, : len(crew.rows)]))

    def plan(self, previous: Plan, staffed: Staffed) -> Plan:
        """The plan, of the previous one's model and batch."""
        pipelines = tuple(
            Pipeline(stages_on(self.tables, shape, crew.groups), count, self.estimator.microbatch(shape))
            for crew, shape, count in staffed
        )
        return Plan(previous.model, self.batch, previous.microbatch_sequences, previous.sequence_length, pipelines)
