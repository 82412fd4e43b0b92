"""A lower bound of the step time over all pipelines, of any order, number and mix of kinds, without listing them.

With K microbatches 1F1B takes F + (K - 1) t_s - min(K - 1, q) f_s at least, for every stage s with q stages after it, and
what follows the first stage's last backward is its gradients' sync. Let m = (T - F) / (K - 1). Then every stage has
t_s - min(1, q / (K - 1)) f_s <= m, and the pipeline does K = 1 + (T - F) / m microbatches. At prices p of a GPU that sum to
the batch over the fleet, no plan meets the batch in time T if no pipeline does more sequences than its GPUs cost:

    b (1 + (T - F) / m) <= p . gpus    for all pipelines    <=    T <= min over m of  m (least cost / b - 1),
    least cost = least sum over stages of [ (b / m) (stage's share of F) + p . gpus ],

a shortest path over the block at which each stage starts, for each m. m lies in an interval [low, high): stages within
`high`, weights at `low`; intervals that matter are halved. The prices that give the largest bound are found by cutting
planes: every path is a linear inequality in T and p. Only sync of the first stage is in it, at least what its node's NIC must carry.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.strategies.stages import BANDS, StageTable
from planner.strategies.tables import Floats, Ints, Tables

_COARSE = 1.35
_FINE = 1.004
_ROUNDS = 60
_DEPTHS = (6, 10, 14, 19, 25, 32, 42, 56)
_CLOSE = 3e-3
_ALONE = 3
_INWARD = 0.3
_NEAR = 1.04
_IDLE = 1
_TOGETHER = 64


@dataclass(frozen=True)
class Cut:
    """T <= slope . prices + constant, from interval `owner`."""

    owner: tuple[int, float]
    slope: Floats
    constant: float


@dataclass
class Interval:
    """Bottlenecks from `low` to `high` of one microbatch size."""

    size: int
    low: float
    high: float
    seconds: float = 0.0


class Bound:
    """The bound for plans of at least `least` and at most `most` pipelines of one fleet."""

    def __init__(
        self, tables: Tables, batch: int, supply: Ints, max_stages: int, least: int = 1, most: int | None = None
    ):
        self.tables, self.batch, self.least = tables, batch, least
        self.supply = np.append(supply.astype(float), float(most)) if most is not None else supply.astype(float)
        self.limited = most is not None
        sizes = sorted({row.microbatch for row in tables.rows})
        self.relaxed = [_Stages(StageTable(tables, size, max_stages), supply, least) for size in sizes]
        self.intervals = [interval for i, stages in enumerate(self.relaxed) for interval in _first_intervals(i, stages)]
        self.cuts: list[Cut] = []
        self.prices: Floats | None = None
        self.work_s = batch / max(float(self._speed() @ supply), 1e-30)

    def seconds(self, target: float = np.inf, rounds: int = _ROUNDS) -> float:
        """The bound, or any number from `target` on once that is reached. Zero where no pipeline holds the model.

        Rounds look at the intervals near the present bound alone; once prices are about the best for those, at all.
        """
        if not self.intervals:
            return 0.0
        best, level, idle, whole = 0.0, 0.0, 0, True
        prices = centre = self._by_speed() if self.prices is None else self.prices
        for _ in range(rounds):
            found = self._price(prices, np.inf if whole else _NEAR * max(best, self.work_s))
            least = min(found)
            if whole:
                idle = 0 if least > best * (1 + _CLOSE) else idle + 1
                if least > best:
                    best, self.prices = least, prices
                if best >= target or idle > _IDLE:
                    return best
            if least > level:
                centre, level = prices, least
            top, corner = self._best_prices()
            level *= 0.999 if self._halve(found, max(best, self.work_s)) else 1.0
            whole = not whole and least >= top * (1 - _CLOSE)
            if not whole:
                # part of the way back to the best prices so far: corners of the cuts alone swing to and fro
                prices = _INWARD * centre + (1 - _INWARD) * corner
        last = min(self._price(prices, np.inf))
        if last > best:
            best, self.prices = last, prices
        return best

    def _speed(self) -> Floats:
        """Sequences a second that a GPU of each resource does at best: its share of the work, and none of it idle."""
        speed = np.zeros(len(self.supply) - self.limited)
        for stages in self.relaxed:
            np.maximum.at(speed, stages.resource, stages.speed)
        return speed

    def _by_speed(self) -> Floats:
        speed = np.append(self._speed(), 0.0) if self.limited else self._speed()
        return np.asarray(speed * self.batch / float(speed @ self.supply))

    def _price(self, prices: Floats, until: float) -> list[float]:
        """The bound that these prices give in each interval that gave less than `until`, and the cuts that limit it."""
        out = np.array([interval.seconds for interval in self.intervals])
        extra = float(prices[-1]) if self.limited else 0.0
        for i, stages in enumerate(self.relaxed):
            mine = [
                j for j, interval in enumerate(self.intervals) if interval.size == i and not interval.seconds > until
            ]
            if not mine:
                continue
            low = np.array([self.intervals[j].low for j in mine])
            high = np.array([self.intervals[j].high for j in mine])
            cost, paths = stages.cheapest(low, high, prices, extra, self.work_s)
            out[mine] = low * ((cost + extra) / stages.microbatch - 1)
            for at, j in enumerate(mine):
                self.intervals[j].seconds = float(out[j])
                if np.isfinite(cost[at]):
                    self.cuts.append(self._cut(stages, self.intervals[j], paths, at, len(prices)))
        return [float(seconds) for seconds in out]

    def _cut(self, stages: "_Stages", interval: Interval, paths: "Chosen", at: int, width: int) -> Cut:
        gpus, fill = paths.totals(at)
        slope = np.zeros(width)
        slope[: len(gpus)] = gpus
        if self.limited:
            slope[-1] = 1.0
        return Cut((interval.size, interval.low), slope * interval.low / stages.microbatch, fill - interval.low)

    def _best_prices(self) -> tuple[float, Floats]:
        """Largest T that the cuts of the present intervals allow, and its prices."""
        from scipy.optimize import linprog

        known = {(interval.size, interval.low): interval for interval in self.intervals}
        self.cuts = [cut for cut in self.cuts if cut.owner in known]
        rows = np.array([np.append(-cut.slope, 1.0) for cut in self.cuts])
        top = np.array([cut.constant for cut in self.cuts])
        result = linprog(
            np.append(np.zeros(len(self.supply)), -1.0), A_ub=rows, b_ub=top, A_eq=[[*self.supply, 0.0]], b_eq=[self.batch],
            bounds=(0, None), method="highs",
        )  # fmt: skip
        return float(-result.fun), np.maximum(result.x[:-1], 0.0)

    def _halve(self, found: list[float], bound: float) -> bool:
        """Halves the intervals that limit the bound; whether there were any."""
        least, out = min(found), []
        for interval, seconds in zip(self.intervals, found, strict=True):
            ratio = interval.high / interval.low
            if (
                seconds < max(least, min(bound, least * 1.05)) * (1 + 0.2 * min(ratio - 1, 1.0))
                and _FINE < ratio < np.inf
            ):
                middle = (interval.low * interval.high) ** 0.5
                out += [Interval(interval.size, interval.low, middle), Interval(interval.size, middle, interval.high)]
                self.cuts = [cut for cut in self.cuts if cut.owner != (interval.size, interval.low)]
            else:
                out.append(interval)
        split = len(out) > len(self.intervals)
        self.intervals = out
        return split


def _first_intervals(size: int, stages: "_Stages") -> Iterator[Interval]:
    if not np.isfinite(stages.quickest):
        return
    low = stages.quickest
    while low < stages.slowest:
        yield Interval(size, low, low * _COARSE)
        low *= _COARSE
    yield Interval(size, low, np.inf)


class _Stages:
    """Stages of one microbatch size with times that no neighbour, node, place in the model or schedule can beat.

    Arrays are (rows, place, blocks - 1), the places being first (with the embedding), inner, and last (with the head).
    """

    def __init__(self, table: StageTable, supply: Ints, pipelines: int):
        tables = table.tables
        self.table, self.microbatch, self.blocks = table, table.microbatch, tables.num_blocks
        self.stages = min(table.max_stages, tables.num_blocks)
        held = supply[table.resource] >= table.degree
        self.rows, self.resource, self.degree = table.rows[held], table.resource[held], table.degree[held]
        self.speed = self.microbatch / (tables.time_sums[self.rows, -1] * self.degree)
        toll = np.minimum(tables.boundaries.min(axis=0), tables.boundaries.min(axis=1))[self.rows, None, None]
        first, last = table.first[:, : table.wide], table.last[:, : table.wide]
        occupied = toll * tables.boundary_share * table.inner
        seconds = table.seconds[held]
        sums = tables.forward_sums[self.rows]
        forward = sums[:, last] - sums[:, first] + (tables.stage_overhead_s + occupied) / 2
        fill = seconds + toll * (first > 0)
        if tables.overlaps_warmup:
            fill[:, 0] += self._sync(pipelines)
        self.busy, self.fill = (
            _by_place(values, np.isfinite(seconds), np.inf) for values in (seconds + occupied, fill)
        )
        self.forward = -_by_place(-forward if tables.overlaps_warmup else 0.0 * forward, np.isfinite(seconds), 0.0)
        room = [part[held] & np.isfinite(seconds) for part in table.room]
        self.room = [_by_place(np.where(part, 0.0, np.inf), part, np.inf) == 0.0 for part in room]
        self.held_busy = [np.where(part, self.busy, np.inf) for part in self.room]
        self.finite_fill = np.where(np.isfinite(self.fill), self.fill, 0.0)
        # every transfer of the fill occupies a stage beside each microbatch, so F <= sum of the stages' seconds
        self.bounded = tables.transfers != "none" and tables.overlaps_warmup
        self._limits()

    def _limits(self) -> None:
        """Bottlenecks that occur, and the largest share that forwards have of a stage."""
        busy, forward = self.busy[self.room[0]], self.forward[self.room[0]]
        self.quickest = float((busy - forward).min()) if len(busy) else np.inf
        self.slowest = float(busy.max()) if len(busy) else 0.0
        self.share = float((forward / busy).max()) if len(busy) else 0.0

    def _sync(self, pipelines: int) -> Floats:
        """(rows, blocks - 1) what follows the last backward of a first stage."""
        tables, out = self.table.tables, []
        for row, resource, degree in zip(self.rows, self.resource, self.degree, strict=True):
            held = tables.sync_sums[row, self.table.last[0, : self.table.wide]]
            known = {
                float(size): tables.least_ring_s(int(resource), float(size), int(degree), pipelines) for size in held
            }
            out.append([known[float(size)] for size in held])
        return np.array(out).reshape(len(self.rows), self.table.wide)

    def cheapest(
        self, low: Floats, high: Floats, prices: Floats, extra: float, step_s: float
    ) -> "tuple[Floats, Chosen]":
        """(intervals,) least cost of a pipeline in each, and the paths. step_s: a bound of the step time known before.

        The deeper a pipeline, the longer its fill may be and the fewer its microbatches, so depths are taken in classes.
        """
        cost = prices[self.resource] * self.degree
        fewest = self._fewest_microbatches(cost, extra)
        steady = np.where(np.isfinite(high), step_s / np.where(np.isfinite(high), high, 1.0), 0.0)
        order = np.argsort(high, kind="stable")
        parts = [order[i : i + _TOGETHER] for i in range(0, len(order), _TOGETHER)]
        chosen: list[tuple[_Paths, int] | None] = [None] * len(low)
        least = np.full(len(low), np.inf)
        for mine in parts:
            first = 1
            for depth in [d for d in _DEPTHS if d < self.stages] + [self.stages]:
                after = self._after(steady[mine], depth, fewest)
                paths = _Paths(self, self.microbatch / low[mine], high[mine], cost, after, first, depth)
                for at, (i, found) in enumerate(zip(mine, paths.solve(least[mine]), strict=True)):
                    if found < least[i]:
                        least[i], chosen[i] = found, (paths, at)
                first = depth + 1
        return least, Chosen(chosen)

    def _after(self, steady: Floats, depth: int, fewest: float) -> Floats:
        """(intervals,) microbatches that a pipeline of at most so many stages does at least after its first: (T - F) / m, where F
        is at most its stages' seconds, and each stage's at most m and what the warm-up hides of it."""
        after = np.full(len(steady), max(fewest - 1, 1e-9))
        if self.bounded:
            for _ in range(4):
                hidden = np.minimum(1.0, (depth - 1) / after)
                after = np.maximum(after, steady - depth / (1 - self.share * hidden))
        return after

    def _fewest_microbatches(self, cost: Floats, extra: float) -> float:
        """A pipeline of fewer microbatches does not pay for the memory that the model needs."""
        each = np.where(self.room[0], cost[:, None, None], np.inf).min(axis=(0, 1))
        least = np.full(self.blocks + 1, np.inf)
        least[0] = 0.0
        for blocks in range(1, self.blocks + 1):
            sizes = np.arange(1, min(blocks, len(each)) + 1)
            least[blocks] = (each[sizes - 1] + least[blocks - sizes]).min()
        return float((least[-1] + extra) / self.microbatch)


def _by_place(values: Floats, possible: NDArray[np.bool_], absent: float) -> Floats:
    """(rows, 3, sizes) the least over the starts of each place, of (rows, starts, sizes)."""
    starts, sizes = values.shape[1:]
    stop = np.arange(starts)[:, None] + np.arange(1, sizes + 1)[None, :]
    places = (np.arange(starts)[:, None] == 0, (np.arange(starts)[:, None] > 0) & (stop < starts), stop == starts)
    known = np.where(possible, values, absent)
    return np.stack([np.where(place, known, absent).min(axis=1) for place in places], axis=1)


@dataclass(frozen=True)
class Chosen:
    """The path of each interval: one of those of several classes of depth."""

    paths: "list[tuple[_Paths, int] | None]"

    def totals(self, at: int) -> tuple[Floats, float]:
        """GPUs of each resource and fill."""
        found = self.paths[at]
        assert found is not None
        return found[0].totals(found[1])


class _Paths:
    """Shortest paths of `least` to `most` stages from the last to the first, for all intervals at once.

    after: (intervals,) microbatches that each pipeline does at least after its first.
    """

    def __init__(
        self, stages: _Stages, weight: Floats, high: Floats, cost: Floats, after: Floats, least: int, most: int
    ):
        self.stages, self.weight, self.high, self.cost, self.after = stages, weight, high, cost, after
        self.least, self.most = least, most
        shortest = stages.busy.min(axis=(0, 1)) * (1 - stages.share)
        self.wide = max(1, int((shortest <= high.max() * (1 + 1e-9)).sum()))
        self.afters: list[Floats] = []
        self.arcs: list[Floats] = []
        self._arcs: dict[int, Floats] = {}

    def _arc(self, band: int, which: slice = slice(None)) -> Floats:
        """(intervals, rows, place, size) cost of a stage with as many stages after it as the band says."""
        stages, wide, after = self.stages, self.wide, self.after[which]
        last = min(BANDS[band + 1] - 1 if band + 1 < len(BANDS) else self.most - 1, self.most - 1)
        few = int(min(BANDS[band], max(float(self.after.min()), 0.0)))
        places = slice(0, 3 if band == 0 else 2)
        hidden = np.minimum(1.0, last / after)[:, None, None, None] * stages.forward[:, places, :wide]
        busy = np.subtract(stages.held_busy[_band(few)][:, places, :wide], hidden, out=hidden)
        value = self.weight[which][:, None, None, None] * stages.finite_fill[:, places, :wide]
        value += self.cost[:, None, None]
        limit = np.minimum(self.high[which] * (1 + 1e-9), 1e300)
        value[busy > limit[:, None, None, None]] = np.inf
        return np.asarray(value)

    def _least_arc(self, depth: int) -> Floats:
        """(intervals, place, size) the cheapest row's."""
        band = _band(depth)
        if band not in self._arcs:
            self._arcs[band] = self._arc(band).min(axis=1)
        return self._arcs[band]

    def solve(self, known: Floats) -> Floats:
        """(intervals,) least cost; anything from `known` on where it is no less. after[:, i]: of the blocks from i on."""
        m, n, wide = len(self.high), self.stages.blocks, self.wide
        after = np.full((m, n + wide + 1), np.inf)
        best, self.depth = known.copy(), np.zeros(m, dtype=np.int64)
        for step in range(self.most):
            arc = self._least_arc(step)
            self.afters.append(after)
            first, after = self._further(arc, after) if step else self._last(arc, after)
            better = (first < best) & (step + 1 >= self.least)
            best, self.depth = np.where(better, first, best), np.where(better, step, self.depth)
            if (after[:, 1:n].min(axis=1, initial=np.inf) >= best).all():
                break
        return best

    def _last(self, arc: Floats, none: Floats) -> tuple[Floats, Floats]:
        """One stage with all blocks, or those from each block on."""
        n, after, wide = self.stages.blocks, none.copy(), min(self.wide, self.stages.blocks)
        after[:, n - wide : n] = arc[:, 2, :wide][:, ::-1]
        return after[:, 0].copy(), after

    def _further(self, arc: Floats, after: Floats) -> tuple[Floats, Floats]:
        """One stage more: (cost from the first block on, from each other)."""
        n, out = self.stages.blocks, np.full_like(after, np.inf)
        inner, total = out[:, 1:n], np.empty((len(after), n - 1))
        for size in np.flatnonzero(np.isfinite(arc[:, 1]).any(axis=0)):
            np.add(after[:, size + 2 : size + 1 + n], arc[:, 1, size, None], out=total)
            np.minimum(inner, total, out=inner)
        return (arc[:, 0] + after[:, 1 : self.wide + 1]).min(axis=1), out

    def stages_of(self, at: int) -> Iterator[tuple[int, int, int]]:
        """(row, place, blocks - 1) of each stage of one interval's path, first stage first; rows as in `stages.rows`."""
        n, block = self.stages.blocks, 0
        rows: dict[int, Ints] = {}
        for step in range(int(self.depth[at]), -1, -1):
            band, place = _band(step), 2 if step == 0 else 0 if block == 0 else 1
            if band not in rows:
                rows[band] = self._arc(band, slice(at, at + 1))[0].argmin(axis=0)
            beyond = self.afters[step][at, block + 1 : block + 1 + self.wide]
            size = n - block - 1 if step == 0 else int((self._arcs[band][at, place] + beyond).argmin())
            yield int(rows[band][place, size]), place, size
            block += size + 1

    def totals(self, at: int) -> tuple[Floats, float]:
        """GPUs of each resource and fill of one interval's path."""
        stages = self.stages
        gpus, fill = np.zeros(len(stages.table.tables.resources)), 0.0
        for row, place, size in self.stages_of(at):
            gpus[stages.resource[row]] += stages.degree[row]
            fill += float(stages.fill[row, place, size])
        return gpus, fill


def _band(depth: int) -> int:
    return bisect.bisect_right(BANDS, depth) - 1


def lower_bound_s(tables: Tables, batch: int, supply: Sequence[int] | Ints, max_stages: int) -> float:
    """The least step time of any plan: of those of one pipeline, which sync nothing, and of all others."""
    fleet = np.asarray(supply)
    main = Bound(tables, batch, fleet, max_stages, 2)
    least = main.seconds()
    alone = Bound(tables, batch, fleet, max_stages, 1, 1)
    if main.prices is not None:
        alone.prices, alone.intervals = np.append(main.prices, 0.0), [replace(i) for i in main.intervals]
    found = alone.seconds(least, _ALONE)
    return min(least, found) if least > 0 else found
