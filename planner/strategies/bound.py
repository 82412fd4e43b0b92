"""A lower bound of the step time over all pipelines, of any order, number and mix of kinds, without listing them.

With K microbatches a pipeline takes F + (K - 1) t_s - min(K - 1, a q) f_s at least, for every stage s with q stages after it,
where each stage may keep a more microbatches in flight than the next (1F1B: a = 1; `Tables.begun_ahead`), and
what follows the first stage's last backward is its gradients' sync. Let m = (T - F) / (K - 1). Then every stage has
t_s - min(1, a q / (K - 1)) f_s <= m, and the pipeline does K = 1 + (T - F) / m microbatches. At prices p of a GPU that sum to
the batch over the fleet, no plan meets the batch in time T if no pipeline does more sequences than its GPUs cost:

    b (1 + (T - F) / m) <= p . gpus    for all pipelines    <=    T <= min over m of  m (least cost / b - 1),
    least cost = least sum over stages of [ (b / m) (stage's share of F) + p . gpus ],

a shortest path over the block at which each stage starts, for each m. m lies in an interval [low, high): stages within
`high`, weights at `low`; intervals that matter are halved. The prices that give the largest bound are found by cutting
planes: every path is a linear inequality in T and p. Only sync of the first stage is in it, at least what its node's NIC must carry.

Of a single pipeline K is known, so T = F + (K - 1) m, and its GPUs are within the fleet: at any prices p of a GPU, in seconds,

    T >= (K - 1) m + least sum over stages of [ stage's share of F + p . gpus ] - p . fleet.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.strategies.bound_paths import PricedStages
from planner.strategies.stages import StageTable
from planner.strategies.tables import Floats, Ints, Tables

_COARSE = 1.35
_DEPTHS = (6, 9, 13, 18, 30, 50)
_FINE = 0.004
_DEEP = 0.5
_ROUNDS = 60
_CLOSE = 1e-3
_ALONE = 10
_OUTWARD = 0.8
_NEAR = 1.003
_SEVERAL = 64
_IDLE = 2


@dataclass(frozen=True)
class Cut:
    """T <= slope . prices + constant, from interval `owner`."""

    owner: tuple[int, float, int]
    slope: Floats
    constant: float


@dataclass
class Interval:
    """Bottlenecks from `low` to `high` of one microbatch size, and pipelines of `least` to `most` stages. path_s: least of a path's
    fill and the price of its GPUs."""

    size: int
    low: float
    high: float
    least: int
    most: int
    path_s: float = 0.0
    prices: Floats | None = None

    def learn(self, path_s: float, prices: Floats) -> None:
        self.path_s, self.prices = path_s, prices

    def path_at_least_s(self, prices: Floats) -> float:
        """At other prices: a path falls by no larger factor than any price."""
        if self.prices is None or self.path_s == np.inf:
            return self.path_s
        ratio = np.divide(prices, self.prices, out=np.full(len(prices), np.inf), where=self.prices > 0)
        return min(1.0, float(ratio.min())) * self.path_s

    @property
    def key(self) -> tuple[int, float, int]:
        return self.size, self.low, self.most

    def wide(self, best: float) -> float:
        """By how much bottlenecks and depths may differ, as a share of the step time, at least `best`."""
        return max(self.high / self.low - 1, self._deep(best))

    def _deep(self, best: float) -> float:
        return _DEEP * (self.most - self.least) * self.high / best

    def halves(self, best: float) -> "tuple[Interval, Interval]":
        """Fewer paths each, none of less value."""
        if self._deep(best) > self.high / self.low - 1:
            stages = (self.least + self.most) // 2
            return replace(self, most=stages), replace(self, least=stages + 1)
        middle = (self.low * self.high) ** 0.5
        return replace(self, high=middle), replace(self, low=middle)


class Bound:
    """The bound for plans of at least `least` pipelines of one fleet."""

    def __init__(self, tables: Tables, batch: int, supply: Ints, max_stages: int, least: int = 1):
        self.batch, self.supply = batch, supply.astype(float)
        sizes = sorted({row.microbatch for row in tables.rows})
        self.relaxed = [PricedStages(StageTable(tables, size, max_stages), supply, least) for size in sizes]
        self.intervals = [interval for i, stages in enumerate(self.relaxed) for interval in _first_intervals(i, stages)]
        self.cuts: list[Cut] = []
        self.speed = self._speed()
        self.best = batch / max(float(self.speed @ self.supply), 1e-30)  # no GPU idle, each at its best

    def seconds(
        self, target: float = np.inf, rounds: int = _ROUNDS, hurry: Callable[[], bool] = lambda: False
    ) -> float:
        """The bound, or any number from `target` on once that is reached, or what the round under way proves once there is need
        to `hurry`. Zero where no pipeline holds the model.
        """
        if not self.intervals:
            return 0.0
        most, idle = -np.inf, 0
        prices = centre = self._first_prices()
        for _ in range(rounds):
            least = self._price(prices)
            idle = 0 if least - most > _CLOSE * abs(least) else idle + 1
            if least > most:
                most, centre = least, prices
            self.best = max(self.best, most)
            if self.best >= target or idle > _IDLE or hurry():
                break
            self._halve()
            # part of the way from the best prices so far, less after each failure: corners of the cuts alone swing to and fro
            way = _OUTWARD ** (idle + 1)
            prices = (1 - way) * centre + way * self._best_prices()
        return self.best

    def _speed(self) -> Floats:
        """Sequences a second that a GPU of each resource does at best: its share of the work, and none of it idle."""
        speed = np.zeros(len(self.supply))
        for stages in self.relaxed:
            np.maximum.at(speed, stages.resource, stages.speed)
        return speed

    def _first_prices(self) -> Floats:
        return np.asarray(self.speed * self.batch / float(self.speed @ self.supply))

    def _scale(self, size: int, low: Floats | float) -> Floats | float:
        """Seconds of a unit of the prices, at bottlenecks of `low`."""
        return low / self.relaxed[size].microbatch

    def _beside_s(self, interval: Interval, prices: Floats) -> float:
        """What the bound of an interval has beside a path's seconds."""
        return -interval.low

    def _seconds(self, interval: Interval, prices: Floats) -> float:
        return interval.path_at_least_s(prices) + self._beside_s(interval, prices)

    def _price(self, prices: Floats) -> float:
        """The bound that these prices give. Only intervals that may limit it are looked at, and give cuts."""
        ours = [self._seconds(interval, prices) for interval in self.intervals]
        order = sorted(range(len(ours)), key=lambda i: ours[i])
        least, done = np.inf, 0
        while done < len(order) and ours[order[done]] < least * _NEAR:
            several = [self.intervals[i] for i in order[done : done + _SEVERAL] if ours[i] < least * _NEAR]
            done += len(several)
            for size in {interval.size for interval in several}:
                least = min(least, self._solve(size, [i for i in several if i.size == size], prices))
        return least

    def _solve(self, size: int, intervals: Sequence[Interval], prices: Floats) -> float:
        """The least bound of some intervals of one size, with the cut that each gives."""
        low, high = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
        scale = np.asarray(self._scale(size, low))
        depths = np.array([(i.least, i.most) for i in intervals])
        cost, gpus, fill = self._cheapest(self.relaxed[size], 1 / scale, high, prices, depths)
        for at, (interval, path_s) in enumerate(zip(intervals, cost * scale, strict=True)):
            interval.learn(float(path_s), prices)
            if np.isfinite(path_s):
                # what a lower bound of the step time allowed earlier it may not now
                found = self._cut(interval, gpus[at], float(fill[at]))
                value = float(found.slope @ prices) + found.constant
                self.cuts = [c for c in self.cuts if c.owner != interval.key or float(c.slope @ prices)+c.constant >= value*(1-1e-9)]
                self.cuts.append(self._cut(interval, gpus[at], float(fill[at])))
        return min(self._seconds(interval, prices) for interval in intervals)

    def _cheapest(
        self, stages: PricedStages, weight: Floats, high: Floats, prices: Floats, depths: Ints
    ) -> tuple[Floats, Floats, Floats]:
        after = stages.microbatches_after(high, prices, depths[:, 1], self.best)
        return stages.cheapest(weight, high, prices, after, depths)

    def _cut(self, interval: Interval, gpus: Floats, fill: float) -> Cut:
        return Cut(interval.key, gpus * self._scale(interval.size, interval.low), fill - interval.low)

    def _best_prices(self) -> Floats:
        """The prices that allow the largest T by the cuts of the present intervals."""
        return self._program([[*self.supply, 0.0]], [self.batch], None)

    def _program(self, equal: list[list[float]] | None, to: list[float] | None, most: float | None) -> Floats:
        from scipy.optimize import linprog

        known = {interval.key for interval in self.intervals}
        self.cuts = [cut for cut in self.cuts if cut.owner in known]
        rows = np.array([np.append(-cut.slope, 1.0) for cut in self.cuts])
        top = np.array([cut.constant for cut in self.cuts])
        result = linprog(
            np.append(np.zeros(len(self.supply)), -1.0), A_ub=rows, b_ub=top, A_eq=equal, b_eq=to,
            bounds=[*[(0, None)] * len(self.supply), (None, most)], method="highs",
        )  # fmt: skip
        return np.asarray(np.maximum(result.x[:-1], 0.0))

    def _halve(self) -> None:
        """Halves the intervals that limit the bound, by their last looks."""
        last = {
            id(interval): interval.path_s + self._beside_s(interval, interval.prices)
            for interval in self.intervals
            if interval.prices is not None
        }
        least = min(last.values())
        out: list[Interval] = []
        for interval in self.intervals:
            wide = interval.wide(self.best)
            most = max(least, min(self.best, least * 1.05)) * (1 + 0.2 * min(wide, 1.0))
            if last.get(id(interval), np.inf) < most and _FINE < wide < np.inf:
                out += interval.halves(self.best)
                self.cuts = [cut for cut in self.cuts if cut.owner != interval.key]
            else:
                out.append(interval)
        self.intervals = out


class BoundAlone(Bound):
    """The bound for plans of one pipeline, whose number of microbatches is known. Prices are seconds of a GPU."""

    def __init__(self, tables: Tables, batch: int, supply: Ints, max_stages: int):
        super().__init__(tables, batch, supply, max_stages)
        self.further = [batch / stages.microbatch - 1 for stages in self.relaxed]

    def _first_prices(self) -> Floats:
        return np.asarray(self.speed * self.best / float(self.speed @ self.supply))

    def _scale(self, size: int, low: Floats | float) -> Floats | float:
        return np.ones_like(low)

    def _beside_s(self, interval: Interval, prices: Floats) -> float:
        return self.further[interval.size] * interval.low - float(prices @ self.supply)

    def _cheapest(
        self, stages: PricedStages, weight: Floats, high: Floats, prices: Floats, depths: Ints
    ) -> tuple[Floats, Floats, Floats]:
        after = np.full(len(high), max(self.batch / stages.microbatch - 1, 1e-9))
        return stages.cheapest(weight, high, prices, after, depths)

    def _cut(self, interval: Interval, gpus: Floats, fill: float) -> Cut:
        return Cut(interval.key, gpus - self.supply, fill + self.further[interval.size] * interval.low)

    def _best_prices(self) -> Floats:
        """Where every path asks for more GPUs than there are, no T is too large: it is held to twice the best so far."""
        return self._program(None, None, 2 * self.best)


def _first_intervals(size: int, stages: PricedStages) -> Iterator[Interval]:
    if not np.isfinite(stages.quickest):
        return
    low, first = stages.quickest, 1
    ends = [low * _COARSE**i for i in range(1 + math.ceil(max(0.0, math.log(stages.slowest / low, _COARSE))))]
    for most in [depth for depth in _DEPTHS if depth < stages.stages] + [stages.stages]:
        for begin, end in itertools.pairwise([*ends, np.inf]):
            yield Interval(size, begin, end, first, most)
        first = most + 1


def lower_bound_s(
    tables: Tables, batch: int, supply: Sequence[int] | Ints, max_stages: int, pipelines: int = 1,
    hurry: Callable[[], bool] = lambda: False,
) -> float:  # fmt: skip
    """The least step time of any plan of so many `pipelines` or more: of those of one, which sync nothing, and of all others."""
    fleet = np.asarray(supply)
    least = Bound(tables, batch, fleet, max_stages, max(2, pipelines)).seconds(hurry=hurry)
    if pipelines > 1:
        return least
    alone = BoundAlone(tables, batch, fleet, max_stages).seconds(least, _ALONE, hurry)
    return min(least, alone) if least > 0 else alone
