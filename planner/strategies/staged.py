"""Plans of equal depth and cut whose stages are groups of GPUs, which `metis`, `fasop`, `megatron`
and `varuna` enumerate; and which of them to look at closely: they differ in order, cut and grid,
and predicting one takes a thousand times its closed form, which ranks them.

Symmetric grids are here as well: `megatron` (TP x PP x DP, equal split of the layers) and `varuna`
(no TP, cuts balanced by compute). Both treat the GPUs as equal, in the fleet's order; the grid is
chosen under our cost model. Narayanan et al., "Efficient large-scale language model training on GPU
clusters using Megatron-LM", SC'21; Athlur et al., "Varuna", EuroSys'22.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.plan import Plan
from planner.search import limits
from planner.search.cost_tables import tables_of
from planner.search.draft import (
    Draft,
    Estimator,
    Shape,
    assign_microbatches,
    draft_fits,
    fits,
    steady_s,
)
from planner.search.judge import SearchEffort, answer_of
from planner.search.place import plan_on
from planner.search.problem import Answer, Request, check_request
from planner.search.side_by_side import SideBySide
from planner.search.tables import Tables

GpuGroup = tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """Stages and pipelines of a grid.

    stages[s][d]: tensor-parallel group of stage s in pipeline d. rows[s][d]: its table row.
    """

    stages: tuple[tuple[GpuGroup, ...], ...]
    rows: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """Pipelines."""
        return len(self.stages[0])

    def shapes(self, ends: Sequence[int]) -> list[Shape]:
        """Return the shape of each pipeline for a cut of the layers."""
        return [Shape(rows, tuple(ends)) for rows in zip(*self.rows, strict=True)]

    def slowest(self, tables: Tables) -> list[int]:
        """The slowest row of each stage."""
        whole = tables.sums.time_sums[:, -1]
        return [max(rows, key=lambda row: (whole[row], row)) for rows in self.rows]


class Groups:
    """Stages along one order of the GPUs; groups and their table rows are remembered, since
    arrangements share them.
    """

    def __init__(self, tables: Tables, gpus: Sequence[str]) -> None:
        self._tables = tables
        self._gpus = gpus
        self._found: dict[tuple[int, int, int], tuple[GpuGroup, int | None]] = {}

    def stages(self, sizes: Sequence[int], width: int, microbatch: int) -> Staged | None:
        """The next `size` GPUs for each stage, `width` groups each; None where a group would leave
        its node or was not measured.
        """
        stages = []
        rows = []
        at = 0
        for size in sizes:
            tp = size // width
            groups = list[GpuGroup]()
            found = list[int]()
            for start in range(at, at + width * tp, tp):
                group, row = self._group(start, tp, microbatch)
                if row is None:
                    return None
                groups.append(group)
                found.append(row)
            stages.append(tuple(groups))
            rows.append(tuple(found))
            at += size
        return Staged(tuple(stages), tuple(rows))

    def _group(self, at: int, tp: int, microbatch: int) -> tuple[GpuGroup, int | None]:
        key = (at, tp, microbatch)
        if key not in self._found:
            group = tuple(self._gpus[at : at + tp])
            self._found[key] = group, self._tables.row_of(group, microbatch)
        return self._found[key]


def ends_of(split: tuple[int, ...]) -> tuple[int, ...]:
    """Layer ends of a split of the blocks: the embedding before the first, the head after the
    last.
    """
    ends = [end + 1 for end in itertools.accumulate(split)]
    return (*ends[:-1], ends[-1] + 1)


class Shortlist:
    """The plans worth a prediction, out of all that a search adds: those whose closed form is
    within `limits.MAX_SLOWDOWN` of the best. Gradients are timed as stages lie: the groups of one
    follow each other on the nodes.
    """

    def __init__(self, request: Request, tables: Tables) -> None:
        self._tables, self._estimator, self._sync = (
            tables,
            Estimator(tables),
            SideBySide(request, tables, 1),
        )
        self._speed = [1.0 / float(seconds) for seconds in tables.sums.time_sums[:, -1]]
        self._found: list[
            tuple[float, Staged, tuple[int, ...]]
        ] = []  # rough seconds a step, gradient sync included
        self._best_s = float("inf")

    @property
    def is_empty(self) -> bool:
        return not self._found

    def promising(self, staged: Staged, microbatch: int) -> bool:
        """Return True if layers in exact proportion to speed would come near the best so far.

        Pipeline d then needs m_d = 1 / sum of its stages' speeds for each microbatch. The first one
        takes as long as the fastest stage would need for the whole model.
        """
        counts = self._tables.batch / microbatch
        rate = 0.0
        for rows in zip(*staged.rows, strict=True):
            speed = sum(self._speed[row] for row in rows)
            counts += speed / max(self._speed[row] for row in rows) - 1
            rate += speed
        return counts / rate < limits.MAX_SLOWDOWN * self._best_s

    def add(self, staged: Staged, ends: tuple[int, ...]) -> None:
        """Keeps the cut unless it is far from the best or does not fit memory."""
        alike = Counter(staged.shapes(ends))
        batch = self._tables.batch
        most_s = limits.MAX_SLOWDOWN * self._best_s
        seconds = steady_s(self._estimator, alike.items(), batch)
        if seconds >= most_s or seconds < max(self._estimator.way(shape).fill_s for shape in alike):
            return  # in less than its first microbatch takes a pipeline gets none
        seconds += max(
            self._sync.after_one_s(self._estimator, staged.width, shape) for shape in alike
        )
        count = batch // (self._estimator.microbatch(next(iter(alike))) * staged.width)
        if seconds < most_s and all(fits(self._estimator, shape, max(1, count)) for shape in alike):
            self._best_s = min(self._best_s, seconds)
            self._found.append((seconds, staged, ends))

    def plans(self) -> list[Plan]:
        """Return the plans of the first few cuts.

        The microbatches of each are shared equally between pipelines in some plans, and by speed in
        others.
        """
        found = dict[Plan, None]()
        for _, staged, ends in sorted(self._found, key=lambda each: each[0])[: limits.DRAFTS]:
            shapes = staged.shapes(ends)
            groups = list(zip(*staged.stages, strict=True))
            by_speed = assign_microbatches(self._estimator, shapes, self._tables.batch)
            fitting = (
                [by_speed] if by_speed is not None and draft_fits(self._estimator, by_speed) else []
            )
            drafts = dict.fromkeys([*self._equal(shapes), *fitting])
            found |= dict.fromkeys(plan_on(self._tables, draft, groups) for draft in drafts)
        return list(found)

    def _equal(self, shapes: list[Shape]) -> list[Draft]:
        count, rest = divmod(
            self._tables.batch, self._estimator.microbatch(shapes[0]) * len(shapes)
        )
        return [Draft(tuple((shape, count) for shape in shapes))] if count and not rest else []


def search_megatron(request: Request) -> Answer:
    """TP x PP x DP with an equal split of the layers."""
    return _search_grids(
        "megatron", request, request.max_tp_degree or request.spec.max_tp_degree, balanced=False
    )


def search_varuna(request: Request) -> Answer:
    """PP x DP without tensor parallelism, cut-points balanced by compute."""
    return _search_grids("varuna", request, 1, balanced=True)


def _search_grids(name: str, request: Request, max_tp: int, *, balanced: bool) -> Answer:
    check_request(request)
    begin = request.clock()
    tried = 0
    cut = ""
    tables = tables_of(request)
    shortlist = Shortlist(request, tables)
    for tp in sorted({kind.tp_degree for kind in tables.kinds if kind.tp_degree <= max_tp}):
        gpus: list[str] = []
        for node in request.fleet.nodes:
            gpus += node.workers[: node.node_type.num_gpus // tp * tp]
        groups = Groups(tables, gpus)
        for split, width, size in _grids(tables, len(gpus) // tp, tp, balanced):
            if request.is_late and not shortlist.is_empty:
                cut = f"grids after the first {tried}"
                break
            tried += 1
            staged = groups.stages([tp * width] * len(split), width, size)
            if staged is not None and shortlist.promising(staged, size):
                shortlist.add(staged, ends_of(split))
    return answer_of(name, request, tables, shortlist.plans(), SearchEffort(begin, tried, cut))


def _grids(
    tables: Tables, groups: int, tp: int, balanced: bool
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(blocks of each stage, pipelines, microbatch) of every grid that fills most of the groups and
    whose data-parallel degree divides the batch.
    """
    for depth in range(1, min(groups, tables.deepest) + 1):
        split = (
            _balanced_split(tables, depth, tp)
            if balanced
            else equal_split(tables.num_blocks, depth)
        )
        for size in tables.sizes:
            total, rest = divmod(tables.batch, size)
            width = next(
                (d for d in range(min(groups // depth, total), 0, -1) if total % d == 0), 0
            )
            if width > 0 and not rest:
                yield split, width, size


def equal_split(blocks: int, depth: int) -> tuple[int, ...]:
    """Blocks of each stage, the first ones take the rest."""
    return tuple(blocks // depth + (1 if i < blocks % depth else 0) for i in range(depth))


def _balanced_split(tables: Tables, depth: int, tp: int) -> tuple[int, ...]:
    """Cuts nearest to equal shares of one device's time, every stage at least one block."""
    sums = next(
        sums for row, sums in enumerate(tables.sums.time_sums) if tables.kind(row).tp_degree == tp
    )
    blocks = tables.num_blocks
    cuts = [0]
    for i in range(1, depth):
        near = int(np.argmin(np.abs(sums[1 : blocks + 2] - sums[-1] * i / depth)))
        cuts.append(min(max(near, cuts[-1] + 1), blocks - (depth - i)))
    return tuple(b - a for a, b in zip(cuts, [*cuts[1:], blocks]))
