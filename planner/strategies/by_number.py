"""Fleets of more than a few GPUs: one packing for each number of pipelines, with the gradient sync that goes with it.

How long gradient sync takes depends on how many pipelines share the model, on each node's own links, and on what each worker holds. So a
pipeline's part of a step of T seconds, if n share the model, is T less what its own workers then need for sync and update; sums that the
backwards of earlier stages hide are free. The linear program over at most n listed columns ranks the numbers n; its prices pick the
columns that are cut exactly; integer programs pack these for the best few. A fleet of many hundreds of GPUs is solved for its k-th
part, and every pipeline taken k times.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.cut import Balancer
from planner.search.draft import Draft, Estimator, assign_microbatches
from planner.search.tables import Floats, Ints, Tables
from planner.strategies.aligned import aligned
from planner.strategies.columns import ColumnMaker, Columns
from planner.strategies.effort import Effort
from planner.strategies.exact import Pipelines, Ring, make_exact
from planner.strategies.packing import Packer, close_in, shortest

_NUMBERS = (
    6,
    4,
    8,
    3,
    12,
    5,
    10,
    2,
    1,
    16,
    24,
    32,
    48,
    64,
    128,
    256,
)  # likely ones first: what is far behind them is left early
_NEAR = 1.06
_CLOSE = 1.05
_HOPELESS = 1.02  # times a step time known before: relaxations above it lead to nothing better on many GPUs
_MANY_GPUS = 128
_LOOKED_AT = (1.02, 1.15)  # times the step time, at which columns are compared
_PART_GPUS = 256
_WHOLE_GPUS = 1024
_WHOLE_NODES = 64  # beyond so many GPUs, pipelines of whole nodes
_LOST = 0.01  # share of the GPUs that equal parts may leave over


@dataclass(frozen=True)
class Problem:
    """What is to be packed. `hurry` is asked between parts and ends the search once there is a plan. below_s: the step time of one that
    is known, infinite where none is: packings that promise well more are left out."""

    tables: Tables
    batch: int
    supply: Ints
    max_stages: int
    mixed_microbatch: bool
    mixed_tp: bool
    least_pipelines: int
    effort: Effort
    hurry: Callable[[], bool]
    below_s: float


def drafts_by_number(problem: Problem, estimator: Estimator) -> Iterator[Draft]:
    """Drafts for the whole fleet, of every TP degree that a plan may have."""
    degrees = sorted({kind.tp_degree for kind in problem.tables.kinds})
    found = np.isfinite(problem.below_s)
    for allowed in [degrees] if problem.mixed_tp else [[degree] for degree in degrees]:
        for copies in _parts(problem):
            if found and problem.hurry():
                return
            for draft in _Part(problem, estimator, copies, allowed).drafts():
                found = True
                yield draft


def _parts(problem: Problem) -> list[int]:
    """Into how many equal parts the fleet is divided; once more whole where that takes seconds or parts would leave nodes over."""
    gpus = int(problem.supply.sum())
    fewest = -(-gpus // _PART_GPUS)
    if fewest == 1:
        return [1]
    left = {k: gpus - k * int(_part(problem, k).sum()) for k in range(fewest, max(1, fewest // 2) - 1, -1)}
    best = min(left, key=lambda k: (left[k], -k))
    return [best, 1] if gpus <= _WHOLE_GPUS or left[best] > _LOST * gpus else [best]


def _part(problem: Problem, copies: int) -> Ints:
    """(resources,) GPUs of one of so many equal parts, of whole nodes."""
    node = np.array([resource.node_type.num_gpus for resource in problem.tables.resources])
    return np.asarray(problem.supply // node // copies * node if copies > 1 else problem.supply)


@dataclass(frozen=True)
class _Level:
    """Up to `number` pipelines share the model: the relaxation's step time, pipelines and prices, and (columns,) the sync that each then
    has."""

    seconds: float
    number: int
    pipelines: float
    prices: Floats
    sync_s: Floats


class _Part:
    """One of `copies` equal parts of the fleet, with pipelines of groups of the `degrees` allowed."""

    def __init__(self, problem: Problem, estimator: Estimator, copies: int, degrees: Sequence[int]):
        self.problem, self.estimator, self.copies = problem, estimator, copies
        self.tables, self.effort = problem.tables, problem.effort
        self.supply, self.batch = _part(problem, copies), max(1, problem.batch // copies)
        parts = 1 if int(self.supply.sum()) > _WHOLE_NODES else 2
        maker = ColumnMaker(self.tables, problem.max_stages, self.effort.columns, self.supply, parts, degrees)
        self.columns = maker.make()

    def drafts(self) -> Iterator[Draft]:
        """What the packings of the best few numbers give, best relaxation first, each also with its node types in one order."""
        known = self.problem.below_s
        most = _HOPELESS * known if int(self.problem.supply.sum()) > _MANY_GPUS else np.inf
        levels = [level for level in self._levels() if level.seconds <= most]
        if not levels:
            return
        pool = self._promising(levels)
        packer, best = Packer(pool.usage, self.supply), np.inf
        kept = 0.0  # the least that drafts so far took, over what their relaxation promised
        for seconds, number, sync in self._packable(packer, pool, levels):
            if np.isfinite(min(best, known)) and self.problem.hurry():
                return
            if seconds > known and seconds * kept > known * _CLOSE:
                continue
            pick = self._pack(packer, pool, sync, seconds, best, number)
            if pick is None:
                continue
            shapes = [pool.shape(i) for i, count in sorted(pick.items()) for _ in range(count * self.copies)]
            draft = assign_microbatches(self.estimator, shapes, self.problem.batch)
            if draft is not None:
                made = self.estimator.draft_s(draft)
                best, kept = min(best, made), min(kept or np.inf, made / seconds)
                yield draft
            in_order = aligned(self.estimator, shapes, self.problem.batch, self.problem.max_stages)
            if in_order is not None:
                yield in_order

    # -- gradient sync -------------------------------------------------------------------------------------------------

    def _ring(self, number: int) -> Ring:
        """Where up to `number` pipelines of each part share the model, what a worker's own links need."""
        tables, pipelines = self.tables, number * self.copies
        assert tables.ring_s is not None
        alone = [
            [tables.ring_s(frozenset({r}), size, pipelines) for size in (1e9, 2e9)] for r in range(len(self.supply))
        ]
        kinds = [tables.kinds[row.kind].resource for row in tables.rows]
        once, twice = np.array([alone[resource] for resource in kinds]).T

        def seconds(num_bytes: Floats, rows: Ints) -> Floats:
            each = (twice - once)[rows] / 1e9
            return np.where((rows >= 0) & (num_bytes > 0), (2 * once - twice)[rows] + each * num_bytes, 0.0)

        return seconds

    def _update_s(self, num_bytes: Floats) -> Floats:
        """What follows the sums of workers with so many gradient bytes."""
        return self.tables.update_s(num_bytes, tuple(range(len(self.supply))))

    # -- which numbers, and which columns ------------------------------------------------------------------------------

    def _levels(self) -> list[_Level]:
        """The best numbers of pipelines by the relaxation over columns."""
        found, best, columns = list[_Level](), np.inf, self.columns
        if not len(columns):
            return found
        packer, (held, rows, early) = Packer(columns.usage, self.supply), self._held(columns)
        update = self._update_s(held.max(axis=1, initial=0.0))
        for number in self._numbers():
            if found and self.problem.hurry():
                break
            sync = np.maximum(self._ring(number)(held, rows) - early, 0.0).max(axis=1, initial=0.0) + update
            level = self._level(columns, packer, sync, number, best * _NEAR)
            if level is not None:
                found.append(level)
                best = min(best, level.seconds)
        found = [level for level in found if level.seconds <= best * _NEAR]
        found.sort(key=lambda level: (_more_than_needed(level, found), level.seconds, level.number))
        return found[: self.effort.candidates]

    def _numbers(self) -> Iterator[int]:
        least, most = -(-self.problem.least_pipelines // self.copies), int(self.supply.sum())
        return (number for number in _NUMBERS if least <= number <= most)

    def _held(self, columns: Columns) -> tuple[Floats, Ints, Floats]:
        """(columns, slots) gradient bytes of a worker of each kind where all stages take as long as the bottleneck, its table row, and how
        long before the pipeline's end its stages are done if kinds with fewer bytes come before it."""
        tables = self.tables
        used, seconds = columns.rows >= 0, tables.time_sums[:, -1]
        rate = np.where(used, (tables.sync_sums[:, -1] / seconds)[columns.rows], 0.0)
        back = (1 - tables.forward_sums[:, -1] / seconds)[columns.rows] * columns.counts
        order = np.argsort(np.where(used, rate, np.inf), axis=1, kind="stable")
        rate, back, rows = (np.take_along_axis(values, order, 1) for values in (rate, back, columns.rows))
        period = columns.bottleneck_s[:, None]
        return rate * period, rows, (np.cumsum(back, axis=1) - back) * period

    def _level(self, columns: Columns, packer: Packer, sync: Floats, number: int, ceiling: float) -> _Level | None:
        def sequences(seconds: float, of: Ints | None = None) -> Floats:
            some, after = (columns, sync) if of is None else (columns.take(of), sync[of])
            return _sequences(some, seconds - after)

        alone = columns.fill_s + sync + columns.bottleneck_s * self.batch / columns.microbatch
        high = min(ceiling, float(alone.min(initial=np.inf)))
        found = close_in(packer, sequences, self.batch, high, number, 4e-3) if np.isfinite(high) else None
        if found is None:
            return None
        relaxed = packer.relax(sequences(found[1]), None, number)
        return _Level(found[1], number, sum(relaxed.amounts.values()), relaxed.prices, sync)

    def _promising(self, levels: Sequence[_Level]) -> Pipelines:
        """Exact pipelines of the columns that lose least at the prices of each number, at its step time and somewhat above."""
        columns, picked = self.columns, list[Ints]()
        for level in levels:
            cost = np.maximum(columns.usage @ level.prices, 1e-9)
            for factor in _LOOKED_AT:
                ratio = _sequences(columns, level.seconds * factor - level.sync_s) / cost
                order = np.argsort(-ratio, kind="stable")
                order = order[ratio[order] > 0]
                picked.append(order[: self.effort.exact])
                for r in range(len(self.supply)):
                    picked.append(order[columns.usage[order, r] > 0][: self.effort.exact // 8])
        index = np.unique(np.concatenate(picked))
        balancer = Balancer(self.tables, self.problem.max_stages)
        ring = self._ring(levels[0].number)
        return make_exact(
            self.tables, balancer, columns, index, levels[0].seconds * 1.05, self.effort.orders, ring=ring
        )

    # -- packing -------------------------------------------------------------------------------------------------------

    def _packable(self, packer: Packer, pool: Pipelines, levels: Sequence[_Level]) -> list[tuple[float, int, Floats]]:
        """(step time of the relaxation over exact pipelines, most pipelines, sync of each), fastest first."""
        ready: list[tuple[float, int, Floats]] = []
        best = np.inf
        for level in levels if len(pool) else ():
            sync = pool.sync_s(self._ring(level.number)) + self._update_s(pool.worker_bytes)

            def sequences(seconds: float, of: Ints | None = None, sync: Floats = sync) -> Floats:
                some, after = (pool, sync) if of is None else (pool.take(of), sync[of])
                return (some.microbatches_in(seconds - after) * some.microbatch).astype(float)

            alone = pool.fill_s + sync + pool.bottleneck_s * self.batch / pool.microbatch
            high = min(best * _NEAR, float(alone.min()))
            found = close_in(packer, sequences, self.batch, high, level.number, 2e-3) if np.isfinite(high) else None
            if found is not None:
                ready.append((found[1], level.number, sync))
                best = min(best, found[1])
        return sorted(ready, key=lambda entry: entry[:2])

    def _pack(
        self, packer: Packer, pool: Pipelines, sync: Floats, start: float, best: float, number: int
    ) -> dict[int, int] | None:
        """Up to `number` whole pipelines, at the shortest step time at which some are found; None where that is well above `best`."""
        effort, least = self.effort, -(-self.problem.least_pipelines // self.copies)

        def choose(seconds: float) -> dict[int, int] | None:
            worth = (pool.microbatches_in(seconds - sync) * pool.microbatch).astype(float)
            return packer.whole(
                worth, pool.microbatch, self.batch, 2 * effort.packed, effort.integer_program_nodes, self.problem.mixed_microbatch,
                least, number,
            )  # fmt: skip

        return shortest(choose, start, best * _NEAR, 4e-3)


def _more_than_needed(level: _Level, levels: Sequence[_Level]) -> bool:
    """Whether a smaller number already allows as many pipelines as are wanted, with less sync: it often gives the same plan."""
    return any(other.number < level.number and other.pipelines < other.number - 1e-6 for other in levels)


def _sequences(columns: Columns, seconds: Floats) -> Floats:
    """(n,) sequences that each column does in its own `seconds`, microbatches not rounded."""
    microbatches = np.maximum((seconds - columns.fill_s) / columns.bottleneck_s + 1, 0.0)
    return np.where(seconds >= columns.fill_s, microbatches * columns.microbatch, 0.0)
