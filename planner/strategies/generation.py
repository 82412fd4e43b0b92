"""Pipelines for many GPUs by column generation.

The linear program over the pipelines known so far gives prices of GPUs; the shortest paths at these prices (`bound_paths.py`), one for each
of many bottlenecks, are the pipelines that may improve it (Gilmore and Gomory 1961). A path's time is the bound's; each is then
timed by itself, with its sums (`lateness.py`), so that the program's value is what real pipelines in fractions do.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planner.search.draft import Estimator, Shape
from planner.search.paths import Paths, PricedStages, Zone
from planner.search.problem import Request
from planner.search.tables import Floats, Ints, Tables
from planner.strategies.lateness import Lateness, ready_s
from planner.strategies.neighbours import Neighbours
from planner.strategies.packing import Packer, Relaxed
from planner.strategies.refine import fits, well_formed

_FULL = 0.88  # share of the step in which a pipeline begins microbatches, roughly
_NARROW = 1e-3
_TOGETHER = 64
_ZONES = 7
_SYNC = 0.0075  # of the step: how long sums may last after the end of a pipeline
_LIGHT = 4.0  # times the least of any first stage
_NEAR = 0.03
_ALIKE = 5  # share of the blocks with which few pipelines begin alike


class Column(NamedTuple):
    """So many copies of a pipeline, side by side."""

    shape: Shape
    copies: int


class Pool:
    """Columns found so far, of microbatches of one size, with what they use and do.

    pipelines: about how many there will be. copies: how many a column may have. known: pipelines of some plan of steps of `step_s`
    seconds. Ours are to be ready as soon as these, until they `agree` on something else. few: so few that hardly any are alike. Then
    all begin with groups like the known pipelines' with the fastest NICs, and what late stages sum is left to where they are housed.
    """

    def __init__(
        self, request: Request, tables: Tables, size: int, pipelines: int, copies: Sequence[int], known: Sequence[Shape],
        step_s: float, few: bool = False,
    ):  # fmt: skip
        self.tables, self.size, self.timing, self.copies = tables, size, Estimator(tables), tuple(copies)
        self.supply = np.array([each.num_gpus for each in tables.resources], dtype=np.int64)
        self.stages = PricedStages(tables, size, request.deepest(tables.num_blocks), self.supply, pipelines)
        self.speed = np.zeros(len(self.supply))  # sequences a second that a GPU of each resource does at best
        np.maximum.at(self.speed, self.stages.resource, self.stages.speed)
        self._request = request
        self._expect(pipelines)
        # (rows,) GPUs of a group, with its part of those that groups of its size leave over on a node
        gpus = np.array([tables.resources[tables.kinds[row.kind].resource].node_type.num_gpus for row in tables.rows])
        self._group_gpus = -(-gpus // tables.groups_a_node)
        self._updates = [tables.update_s(np.array([0.0, 1e9]), (r,)) for r in range(len(tables.resources))]
        self._alike_blocks = max(1, tables.num_blocks // _ALIKE)
        self._neighbours = Neighbours(tables, self.stages.rows.tolist(), self._group_gpus, self.stages.stages)
        self._begun = self._alike(min(known[0].rows, key=self._lateness[copies[0]].byte_s)) if few else None
        self._ready_s = ready_s(tables, set(known))
        self._allowed_s = max(_SYNC * step_s, _LIGHT * self.stages.sync_range[0])
        self.columns: list[Column] = []
        self._known, self._timed = set[Column](), set[int]()
        self._later: list[float] = []  # than at best, of those timed
        self._usage: list[Ints] = []
        self._lines: list[tuple[float, float]] = []

    @property
    def usage(self) -> Ints:
        """(columns, resources) GPUs."""
        return np.array(self._usage, dtype=np.int64).reshape(len(self.columns), len(self.supply))

    def sequences(self, step_s: float, *, whole: bool = False) -> Floats:
        """(columns,) that each does in a step of so many seconds; whole: by whole microbatches. Those not timed by simulation are taken to
        be as much later than at best as those that are, on average."""
        begin, rate = np.array(self._lines).reshape(-1, 2).T
        later_s = np.full(len(begin), np.median(self._later or [0.0]))
        later_s[list(self._timed)] = 0.0
        done = np.maximum(begin + rate * (step_s - later_s), 0.0)
        copies = np.array([column.copies for column in self.columns])
        return np.asarray(copies * self.size * (np.floor(done + 1e-6) if whole else done))

    def relax(self, step_s: float) -> Relaxed:
        return Packer(self.usage, self.supply).relax(self.sequences(step_s))

    def _expect(self, pipelines: int) -> None:
        """That so many share the model."""
        rows = self.stages.rows.tolist()
        self._lateness = {n: Lateness(self._request, self.tables, rows, max(1, pipelines), n) for n in self.copies}

    def agree(self, amounts: Mapping[int, float], step_s: float) -> None:
        """From now on all pipelines are to be ready as long before their end as these columns' are, of which there are so many."""
        columns = [self.columns[i] for i in amounts]
        self._expect(round(sum(self.columns[i].copies * amount for i, amount in amounts.items())))
        self._ready_s = ready_s(self.tables, {column.shape for column in columns})
        self._lines = [self._line(i, step_s) for i in range(len(self.columns))]

    def begin_alike(self, prices: Floats, step_s: float, limits: Floats) -> None:
        """All with groups of one kind, those with which pipelines in fractions do most."""
        if self._begun is None or len(self._begun) == 1:
            return
        every, best = self.columns, (0.0, set[int](), list[Column]())
        for kind in sorted(self._begun):
            self._restart(every, {kind}, step_s)
            self.find(prices, step_s, limits, _NEAR)
            value = self.relax(step_s).value if self.columns else 0.0
            if value > best[0]:
                best = value, {kind}, self.columns
        self._restart(best[2], best[1], step_s)

    def _restart(self, columns: Sequence[Column], begun: set[int], step_s: float) -> None:
        self.columns, self._begun, self._usage, self._lines = [], begun, [], []
        self._known = set()
        for column in columns:
            if self._begins_alike(column.shape):
                self.add(column, step_s)

    def late_s(self, column: Column) -> float:
        """How long sums last after the end of its pipelines, as far as that is looked at."""
        if self._begun is not None:
            return 0.0
        return self._lateness[column.copies].late_s(column.shape, self._ready_s)

    def time(self, columns: Iterable[int], step_s: float) -> bool:
        """From now on by simulation, not by what a pipeline takes at least. Whether any was not before."""
        fresh = [i for i in dict.fromkeys(columns) if i not in self._timed]
        self._timed.update(fresh)
        for i in fresh:
            (least, rate), self._lines[i] = self._lines[i], self._line(i, step_s)
            self._later.append((least - self._lines[i][0]) / rate)
        return bool(fresh)

    def line(self, i: int) -> tuple[float, float]:
        """(a, b): each copy does a + b t microbatches in a step of t seconds."""
        return self._lines[i]

    def vary(self, columns: Sequence[Column], prices: Floats, step_s: float, most: int) -> None:
        """Adds so many neighbours of these, those that lose least."""
        for copies in self.copies:
            mine = {c.shape.rows: float(self.timing.about(c.shape, step_s)) for c in columns if c.copies == copies}
            found = self._neighbours.best(mine, self.supply // copies, prices, step_s)
            for shape in itertools.islice(filter(self._begins_alike, found), most):
                if fits(self.timing, shape, len(shape.rows)):
                    self.add(Column(shape, copies), step_s)

    def _begins_alike(self, shape: Shape) -> bool:
        """As few pipelines do."""
        if self._begun is None:
            return True
        kinds = [
            self.tables.rows[row].kind for row, start in zip(shape.rows, shape.starts) if start <= self._alike_blocks
        ]
        return self._begun.issuperset(kinds)

    def _alike(self, row: int) -> set[int]:
        resource = self.tables.kinds[self.tables.rows[row].kind].resource
        return {kind for kind, each in enumerate(self.tables.kinds) if each.resource == resource}

    def find(
        self, prices: Floats, step_s: float, limits: Floats, more: float, only: int | None = None
    ) -> tuple[int, Floats]:
        """Adds the best pipelines at these prices, in sequences, and bottlenecks: those that lose at most a share `more` of what their
        GPUs could do beyond the least. How many were new, and (limits,) the least lost at each. only: of so many copies."""
        before, lost = len(self.columns), np.full(len(limits), np.inf)
        for copies in self.copies if only is None else (only,):
            for begin in range(0, len(limits), _TOGETHER):
                mine = slice(begin, begin + _TOGETHER)
                lost[mine] = np.minimum(lost[mine], self._find(prices, step_s, limits[mine], more, copies))
        return len(self.columns) - before, lost

    def _find(self, prices: Floats, step_s: float, limits: Floats, more: float, copies: int) -> Floats:
        number, stages = len(limits), self.stages
        depths = np.tile([1, stages.stages], (number, 1))
        syncs = np.tile([0.0, stages.sync_range[1]], (number, 1))
        after = np.maximum(_FULL * step_s / limits, 1.0)
        weight, cost = self.size / (limits * (1 - _NARROW)), prices[stages.resource] * stages.degree
        paths = Paths(stages, weight, limits, cost, after, depths, syncs, self._zones(copies))
        lost = paths.solve() / (self.size * (1 + step_s / limits)) - 1
        for at, shape in enumerate(self._shapes(paths, number)):
            near = lost[at] < max(float(lost.min()), 0.0) + more
            if near and well_formed(shape) and fits(self.timing, shape, int(after[at]) + 1):
                self.add(Column(shape, copies), step_s)
        return np.asarray(lost)

    def _zones(self, copies: int) -> list[Zone]:
        rows, wide, lateness = self.stages.rows, self.stages.busy.shape[2], self._lateness[copies]
        if self._begun is not None:
            alike = np.isin([self.tables.rows[row].kind for row in rows], list(self._begun))
            allowed = np.broadcast_to(alike[:, None, None], (len(rows), 3, wide))
            return [Zone(0, allowed), Zone(self._alike_blocks)]
        begins = np.unique((self.tables.num_blocks * np.linspace(0, 0.8, _ZONES) ** 1.5).astype(int)).tolist()
        return [Zone(begin, lateness.timely(rows, wide, begin, self._ready_s, self._allowed_s)) for begin in begins]

    def _shapes(self, paths: Paths, number: int) -> Iterator[Shape]:
        blocks, layers = self.tables.num_blocks, self.tables.num_layers
        rows, ends = [list[int]() for _ in range(number)], [list[int]() for _ in range(number)]
        for at, row, _, size in paths.stages():
            for i, each, held in zip(at.tolist(), self.stages.rows[row].tolist(), size.tolist(), strict=True):
                end = (ends[i][-1] if ends[i] else 1) + held + 1
                rows[i].append(each)
                ends[i].append(layers if end == blocks + 1 else end)
        return (Shape(tuple(mine), tuple(until)) for mine, until in zip(rows, ends, strict=True))

    def add(self, column: Column, step_s: float) -> None:
        """Unless it is known, or more than the fleet has."""
        usage = np.zeros(len(self.supply), dtype=np.int64)
        for row in column.shape.rows:
            resource = self.tables.kinds[self.tables.rows[row].kind].resource
            usage[resource] += self._group_gpus[row] * column.copies
        if column not in self._known and (usage <= self.supply).all():
            self._known.add(column)
            self.columns.append(column)
            self._usage.append(usage)
            self._lines.append(self._line(len(self.columns) - 1, step_s))

    def _line(self, i: int, step_s: float) -> tuple[float, float]:
        """One copy does a + b t microbatches in a step of t seconds."""
        column, timing = self.columns[i], self.timing
        number, (_, period_s) = timing.about(column.shape, step_s), timing.affine(column.shape)
        after_s = self.late_s(column) + self._update_s(column.shape)
        if i in self._timed:
            taken_s = self._taken_s(column, number)
        else:
            taken_s = timing.quick_s(column.shape, number)
        return number - (taken_s + after_s) / period_s, 1 / period_s

    def _taken_s(self, column: Column, number: int) -> float:
        """By simulation. Of few pipelines, which may be housed so that no stage waits for a NIC, with what each but the first one sums."""
        ends_s = self.timing.ends_s(column.shape, number)
        if self._begun is None:
            return max(ends_s)
        sums_s = self._lateness[column.copies].alone_s(column.shape)
        return max([*ends_s, *map(sum, zip(ends_s[1:], sums_s[1:], strict=True))])

    def _update_s(self, shape: Shape) -> float:
        """Of the worker that holds most."""
        longest = 0.0
        for stage in zip(shape.rows, shape.starts, shape.ends, strict=True):
            none, more = self._updates[self.tables.kinds[self.tables.rows[stage[0]].kind].resource]
            longest = max(longest, float(none + (more - none) / 1e9 * self.tables.stage_sync_bytes(*stage)))
        return longest
