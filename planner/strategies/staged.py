"""Plans of equal depth and cut whose stages are groups of GPUs.

`metis`, `fasop`, `megatron` and `varuna` enumerate them, and choose here which of them to look at
closely. They differ in order, cut and grid. Predicting one takes a thousand times its closed form,
which ranks them.

Symmetric grids are here as well: `megatron` (TP x PP x DP, equal split of the layers) and `varuna`
(no TP, cuts balanced by compute). Both treat the GPUs as equal, in the fleet's order; the grid is
chosen under our cost model. Narayanan et al., "Efficient large-scale language model training on GPU
clusters using Megatron-LM", SC'21; Athlur et al., "Varuna", EuroSys'22.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from planner.inputs.fleet import Node
from planner.plans.plan import Plan
from planner.search.drafts.draft import (
    Draft,
    Estimator,
    Shape,
    assign_microbatches,
    draft_fits,
    fits,
    steady_s,
)
from planner.search.drafts.place import plan_on
from planner.search.drafts.side_by_side import SideBySide
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import Answer, Request, check_request
from planner.search.problem.tables import Tables, tp_degrees_of
from planner.search.walk.judge import SearchEffort, answer_of

GpuGroup = tuple[str, ...]
N = TypeVar("N", int, float)


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
        """Return the slowest row of each stage."""
        whole_s = tables.sums.time_sums[:, -1]
        found = []
        for rows in self.rows:
            # of equally slow rows the last, so that the order of the pipelines does not matter
            found.append(max(rows, key=lambda row: (whole_s[row], row)))
        return found


@dataclass(frozen=True)
class Groups:
    """Stages along one order of the GPUs.

    Groups and their table rows are cached, since arrangements share them.
    """

    tables: Tables
    gpus: Sequence[str]
    _found: dict[tuple[int, int, int], tuple[GpuGroup, int | None]] = field(default_factory=dict)

    def stages(self, sizes: Sequence[int], width: int, microbatch: int) -> Staged | None:
        """Return stages of the next `size` GPUs each, in `width` groups.

        None if a group would leave its node or was not measured.
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
            group = tuple(self.gpus[at : at + tp])
            row = self.tables.row_of(group, microbatch)
            self._found[key] = (group, row)
        return self._found[key]


def gpus_in_groups(nodes: Iterable[Node], tp: int) -> list[str]:
    """Return the GPUs of the nodes, as many of each as whole groups of `tp` have."""
    gpus: list[str] = []
    for node in nodes:
        groups = node.node_type.num_gpus // tp
        gpus += node.workers[: groups * tp]
    return gpus


def ends_of(split: Sequence[int]) -> tuple[int, ...]:
    """Return the layer ends of a split of the blocks.

    The embedding comes before the first block, the head after the last.
    """
    ends = [end + 1 for end in itertools.accumulate(split)]
    ends[-1] += 1
    return tuple(ends)


class Shortlist:
    """The plans worth a prediction, out of all that a search adds.

    Their closed form is within `limits.MAX_SLOWDOWN` of the best. Gradients are timed as stages
    lie: the groups of one follow each other on the nodes.
    """

    def __init__(self, request: Request, tables: Tables) -> None:
        self._tables = tables
        self._estimator = Estimator(tables)
        self._sync = SideBySide(request, tables, 1)
        self._speed = [1.0 / float(seconds) for seconds in tables.sums.time_sums[:, -1]]

        # with rough seconds a step, gradient sync included
        self._found: list[tuple[float, Staged, tuple[int, ...]]] = []
        self._best_s = float("inf")

    @property
    def is_empty(self) -> bool:
        return not self._found

    def is_promising(self, staged: Staged, microbatch: int) -> bool:
        """Return True if layers in exact proportion to speed would come near the best so far.

        Pipeline d then needs m_d = 1 / sum of its stages' speeds for each microbatch. The first one
        takes as long as the fastest stage would need for the whole model.
        """
        counts = self._tables.batch / microbatch
        rate = 0.0
        for rows in zip(*staged.rows, strict=True):
            speeds = [self._speed[row] for row in rows]
            speed = sum(speeds)
            counts += speed / max(speeds) - 1
            rate += speed
        return counts / rate < limits.MAX_SLOWDOWN * self._best_s

    def add(self, staged: Staged, ends: tuple[int, ...]) -> None:
        """Keep the cut unless it is far from the best or does not fit memory."""
        estimator = self._estimator
        batch = self._tables.batch
        alike = Counter(staged.shapes(ends))
        most_s = limits.MAX_SLOWDOWN * self._best_s

        seconds = steady_s(estimator, alike.items(), batch)
        if seconds >= most_s:
            return

        # in less than its first microbatch takes, a pipeline gets none
        first_s = max(estimator.way(shape).fill_s for shape in alike)
        if seconds < first_s:
            return

        sync_s = [self._sync.after_one_s(estimator, staged.width, shape) for shape in alike]
        seconds += max(sync_s)
        if seconds >= most_s:
            return

        size = estimator.microbatch(next(iter(alike)))
        count = max(1, batch // (size * staged.width))
        if all(fits(estimator, shape, count) for shape in alike):
            self._best_s = min(self._best_s, seconds)
            self._found.append((seconds, staged, ends))

    def plans(self) -> list[Plan]:
        """Return the plans of the first few cuts.

        The microbatches of each are shared equally between pipelines in some plans, and by speed in
        others.
        """
        ranked = sorted(self._found, key=lambda each: each[0])
        found = dict[Plan, None]()
        for _, staged, ends in ranked[: limits.DRAFTS]:
            groups = list(zip(*staged.stages, strict=True))
            for draft in self._drafts(staged.shapes(ends)):
                found[plan_on(self._tables, draft, groups)] = None
        return list(found)

    def _drafts(self, shapes: list[Shape]) -> list[Draft]:
        """Return a draft with equal numbers of microbatches, and one with numbers by speed.

        The first is left out if they do not divide the batch, the second if it does not fit.
        """
        drafts = []
        size = self._estimator.microbatch(shapes[0])
        count, rest = divmod(self._tables.batch, size * len(shapes))
        if count and not rest:
            drafts.append(Draft(tuple((shape, count) for shape in shapes)))

        by_speed = assign_microbatches(self._estimator, shapes, self._tables.batch)
        if by_speed is not None and draft_fits(self._estimator, by_speed):
            drafts.append(by_speed)
        return drafts


def search_megatron(request: Request) -> Answer:
    """Search TP x PP x DP with an equal split of the layers."""
    max_tp = request.max_tp_degree or request.spec.max_tp_degree
    return _search_grids("megatron", request, max_tp, balanced=False)


def search_varuna(request: Request) -> Answer:
    """Search PP x DP without tensor parallelism, cut-points balanced by compute."""
    return _search_grids("varuna", request, 1, balanced=True)


def _search_grids(name: str, request: Request, max_tp: int, *, balanced: bool) -> Answer:
    check_request(request)
    begin = request.clock()
    tried = 0
    cut = ""
    tables = tables_of(request)
    shortlist = Shortlist(request, tables)
    for tp in tp_degrees_of(tables):
        if tp > max_tp:
            break
        gpus = gpus_in_groups(request.fleet.nodes, tp)
        groups = Groups(tables, gpus)
        for split, width, size in _grids(tables, len(gpus) // tp, tp, balanced):
            # not before there is a plan
            if request.is_late and not shortlist.is_empty:
                cut = f"grids after the first {tried}"
                break
            tried += 1
            staged = groups.stages([tp * width] * len(split), width, size)
            if staged is not None and shortlist.is_promising(staged, size):
                shortlist.add(staged, ends_of(split))
    return answer_of(name, request, tables, shortlist.plans(), SearchEffort(begin, tried, cut))


def _grids(
    tables: Tables, groups: int, tp: int, balanced: bool
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield (blocks of each stage, pipelines, microbatch) of every grid.

    A grid fills most of the groups, and its data-parallel degree divides the batch.
    """
    # no row of a degree: none of its groups holds a block
    if balanced and tp not in tables.tp_degree_by_row:
        return

    for depth in range(1, min(groups, tables.deepest) + 1):
        if balanced:
            split = _balanced_split(tables, depth, tp)
        else:
            split = equal_split(tables.num_blocks, depth)

        for size in tables.sizes:
            microbatches, rest = divmod(tables.batch, size)
            if not rest:
                # The largest divisor of the microbatches for which there are groups.
                width = min(groups // depth, microbatches)
                while microbatches % width:
                    width -= 1
                yield split, width, size


def equal_split(blocks: int, depth: int) -> tuple[int, ...]:
    """Return the blocks of each stage; the first ones take the rest."""
    each, rest = divmod(blocks, depth)
    return (each + 1,) * rest + (each,) * (depth - rest)


def _balanced_split(tables: Tables, depth: int, tp: int) -> tuple[int, ...]:
    """Return blocks of each stage, cut nearest to equal shares of one device's time.

    Every stage has at least one block.
    """
    # Varuna takes all devices as equal, so any row of this degree serves
    row = tables.tp_degree_by_row.index(tp)
    sums = tables.sums.time_sums[row]
    blocks = tables.num_blocks

    cuts = [0]
    for number in range(1, depth):
        wanted_s = sums[-1] * number / depth
        distances = np.abs(sums[1 : blocks + 2] - wanted_s)
        near = int(np.argmin(distances))
        least = cuts[-1] + 1
        most = blocks - (depth - number)
        cuts.append(min(max(near, least), most))
    cuts.append(blocks)
    return tuple(differences(cuts))


def differences(numbers: Iterable[N]) -> list[N]:
    """Return the difference of each two neighbours, the second less the first."""
    return [end - begin for begin, end in itertools.pairwise(numbers)]
