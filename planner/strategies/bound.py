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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.strategies.stages import BANDS, StageTable
from planner.strategies.tables import Floats, Ints, Tables

_COARSE = 1.35
_FINE = 1.003
_ROUNDS = 60
_DEPTHS = (14, 32)
_CLOSE = 1e-3
_OTHERS = 4


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

        Intervals far above the present bound are looked at again only when the others have settled.
        """
        if not self.intervals:
            return 0.0
        best, settled = 0.0, True
        prices = self._by_speed() if self.prices is None else self.prices
        for _ in range(rounds):
            found = self._price(prices, np.inf if settled else 1.1 * max(best, self.work_s))
            if settled and min(found) > best:
                best, self.prices = min(found), prices
            if best >= target:
                return best
            top, prices = self._best_prices()
            halved = self._halve(found, max(best, self.work_s))
            done = not halved and min(found) >= top * (1 - _CLOSE)
            if settled and (done or top <= best * (1 + _CLOSE)):
                return best
            settled = done
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
        finite = np.where(np.isfinite(high), high, 1.0)
        found: list[Floats] = []
        classes: list[_Paths] = []
        for depth in [d for d in _DEPTHS if d < self.stages] + [self.stages]:
            longest = depth / (1 - self.share) if self.bounded else np.inf
            after = np.maximum(fewest - 1, np.where(np.isfinite(high), step_s / finite, 0.0) - longest)
            paths = _Paths(self, self.microbatch / low, high, cost, np.maximum(after, 1e-9), depth)
            found.append(paths.solve())
            classes.append(paths)
        return np.min(found, axis=0), Chosen(classes, np.argmin(found, axis=0))

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

    classes: "list[_Paths]"
    best: Ints

    def totals(self, at: int) -> tuple[Floats, float]:
        """GPUs of each resource and fill."""
        return self.classes[int(self.best[at])].totals(at)


class _Paths:
    """Shortest paths of at most `most` stages from the last to the first, for all intervals at once.

    after: (intervals,) microbatches that each pipeline does at least after its first.
    """

    def __init__(self, stages: _Stages, weight: Floats, high: Floats, cost: Floats, after: Floats, most: int):
        self.stages, self.weight, self.high, self.cost, self.after, self.most = stages, weight, high, cost, after, most
        self.picks: list[Ints] = []
        self.rows: list[Ints] = []
        self._arcs: dict[int, tuple[Floats, Ints]] = {}

    def _arc(self, depth: int) -> tuple[Floats, Ints]:
        """(intervals, place, size) least cost of a stage with about `depth` stages after it, and its row."""
        band = int(np.searchsorted(BANDS, depth, side="right")) - 1
        if band not in self._arcs:
            stages = self.stages
            last = min(BANDS[band + 1] - 1 if band + 1 < len(BANDS) else self.most - 1, self.most - 1)
            hidden = np.minimum(1.0, last / self.after)[:, None, None, None]
            few = int(min(BANDS[band], max(float(self.after.min()), 0.0)))
            room = stages.room[int(np.searchsorted(BANDS, few, side="right")) - 1]
            busy = np.where(room, stages.busy, 0.0) - hidden * stages.forward
            within = room & (busy <= self.high[:, None, None, None] * (1 + 1e-9))
            fill = np.where(room, stages.fill, 0.0)
            value = np.where(within, self.weight[:, None, None, None] * fill + self.cost[:, None, None], np.inf)
            row = value.argmin(axis=1)
            self._arcs[band] = (np.take_along_axis(value, row[:, None], axis=1)[:, 0], row)
        return self._arcs[band]

    def solve(self) -> Floats:
        """(intervals,) least cost. after[:, i]: of the blocks from i on, in `step` stages."""
        m, n, wide = len(self.high), self.stages.blocks, self.stages.table.wide
        after = np.full((m, n + wide + 1), np.inf)
        best, self.depth = np.full(m, np.inf), np.zeros(m, dtype=np.int64)
        sizes = np.arange(1, min(wide, n) + 1)
        for step in range(self.most):
            arc, row = self._arc(step)
            total = arc[:, 1][:, None] + np.lib.stride_tricks.sliding_window_view(after[:, 1:], wide, axis=1)[:, :n]
            total[:, 0] = arc[:, 0] + after[:, 1 : wide + 1]
            if step == 0:
                total[:, n - sizes, sizes - 1] = arc[:, 2][:, sizes - 1]
            pick = total.argmin(axis=2)
            value = np.take_along_axis(total, pick[:, :, None], axis=2)[:, :, 0]
            self.picks.append(pick)
            self.rows.append(row)
            better = value[:, 0] < best
            best, self.depth = np.where(better, value[:, 0], best), np.where(better, step, self.depth)
            after[:, 1:n] = value[:, 1:]
            if (value[:, 1:].min(axis=1, initial=np.inf) >= best).all():
                break
        return best

    def totals(self, at: int) -> tuple[Floats, float]:
        """GPUs of each resource and fill of one interval's path."""
        stages = self.stages
        gpus, fill, block = np.zeros(len(stages.table.tables.resources)), 0.0, 0
        for step in range(int(self.depth[at]), -1, -1):
            size = int(self.picks[step][at, block])
            place = 0 if block == 0 else 2 if block + size + 1 == stages.blocks else 1
            place = 2 if step == 0 else place
            row = int(self.rows[step][at, place, size])
            gpus[stages.resource[row]] += stages.degree[row]
            fill += float(stages.fill[row, place, size])
            block += size + 1
        return gpus, fill


def lower_bound_s(tables: Tables, batch: int, supply: Sequence[int] | Ints, max_stages: int) -> float:
    """The least step time of any plan: over ranges of the number of pipelines, on which the least sync depends."""
    fleet = np.asarray(supply)
    main = Bound(tables, batch, fleet, max_stages, 9)
    least = main.seconds()
    for low, high in ((4, 8), (2, 3), (1, 1)):
        other = Bound(tables, batch, fleet, max_stages, low, high)
        if main.prices is not None:
            other.prices, other.intervals = np.append(main.prices, 0.0), [replace(i) for i in main.intervals]
        found = other.seconds(least, _OTHERS)
        least = min(least, found) if least > 0 else found
    return least
