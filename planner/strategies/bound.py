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

from planner.strategies.bound_paths import Chosen, PricedStages
from planner.strategies.stages import StageTable
from planner.strategies.tables import Floats, Ints, Tables

_COARSE = 1.35
_FINE = 1.004
_ROUNDS = 60
_CLOSE = 3e-3
_ALONE = 3
_INWARD = 0.3
_NEAR = 1.04
_IDLE = 1


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
        self.relaxed = [PricedStages(StageTable(tables, size, max_stages), supply, least) for size in sizes]
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

    def _cut(self, stages: "PricedStages", interval: Interval, paths: "Chosen", at: int, width: int) -> Cut:
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


def _first_intervals(size: int, stages: "PricedStages") -> Iterator[Interval]:
    if not np.isfinite(stages.quickest):
        return
    low = stages.quickest
    while low < stages.slowest:
        yield Interval(size, low, low * _COARSE)
        low *= _COARSE
    yield Interval(size, low, np.inf)


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
