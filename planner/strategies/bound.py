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
_ALONE = 10
_INWARD = 0.3
_NEAR = 1.003
_SEVERAL = 64
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
    value: float = 0.0
    prices: Floats | None = None

    @property
    def seconds(self) -> float:
        """The bound at the prices of the last look."""
        return self.value - self.low

    def learn(self, value: float, prices: Floats) -> None:
        """value: least seconds of fill and m / b times the price of the GPUs, over all paths."""
        self.value, self.prices = value, prices

    def at_least(self, prices: Floats) -> float:
        """What the bound at other prices cannot be below: a path's value falls by no larger factor than any price."""
        if self.prices is None or self.value == np.inf:
            return self.value - self.low
        ratio = np.divide(prices, self.prices, out=np.full(len(prices), np.inf), where=self.prices > 0)
        return min(1.0, float(ratio.min())) * self.value - self.low

    def halves(self) -> "tuple[Interval, Interval]":
        """Fewer paths each, none of less value."""
        middle = (self.low * self.high) ** 0.5
        return replace(self, high=middle), replace(self, low=middle)


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
        """The bound, or any number from `target` on once that is reached. Zero where no pipeline holds the model."""
        if not self.intervals:
            return 0.0
        best, idle = 0.0, 0
        prices = centre = self._by_speed() if self.prices is None else self.prices
        for _ in range(rounds):
            least = self._price(prices)
            idle = 0 if least > best * (1 + _CLOSE) else idle + 1
            if least > best:
                best, centre, self.prices = least, prices, prices
            if best >= target or idle > _IDLE:
                break
            self._halve(max(best, self.work_s))
            # part of the way back to the best prices so far: corners of the cuts alone swing to and fro
            prices = _INWARD * centre + (1 - _INWARD) * self._best_prices()
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

    def _price(self, prices: Floats) -> float:
        """The bound that these prices give. Only intervals that may limit it are looked at, and give cuts."""
        ours = [interval.at_least(prices) for interval in self.intervals]
        order = sorted(range(len(ours)), key=lambda i: ours[i])
        least, done = np.inf, 0
        while done < len(order) and ours[order[done]] < least * _NEAR:
            several = [self.intervals[i] for i in order[done : done + _SEVERAL] if ours[i] < least * _NEAR]
            done += len(several)
            for size in {interval.size for interval in several}:
                least = min(least, self._solve([i for i in several if i.size == size], prices))
        return least

    def _solve(self, intervals: Sequence["Interval"], prices: Floats) -> float:
        """The least bound of some intervals of one size, with the cut that each gives."""
        stages, extra = self.relaxed[intervals[0].size], float(prices[-1]) if self.limited else 0.0
        low, high = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
        cost, paths = stages.cheapest(low, high, prices, extra, self.work_s)
        for at, interval in enumerate(intervals):
            interval.learn(float(low[at] * (cost[at] + extra) / stages.microbatch), prices)
            if np.isfinite(cost[at]):
                self.cuts.append(self._cut(stages, interval, paths, at, len(prices)))
        return min(interval.seconds for interval in intervals)

    def _cut(self, stages: "PricedStages", interval: Interval, paths: "Chosen", at: int, width: int) -> Cut:
        gpus, fill = paths.totals(at)
        slope = np.zeros(width)
        slope[: len(gpus)] = gpus
        if self.limited:
            slope[-1] = 1.0
        return Cut((interval.size, interval.low), slope * interval.low / stages.microbatch, fill - interval.low)

    def _best_prices(self) -> Floats:
        """The prices that allow the largest T by the cuts of the present intervals."""
        from scipy.optimize import linprog

        known = {(interval.size, interval.low) for interval in self.intervals}
        self.cuts = [cut for cut in self.cuts if cut.owner in known]
        rows = np.array([np.append(-cut.slope, 1.0) for cut in self.cuts])
        top = np.array([cut.constant for cut in self.cuts])
        result = linprog(
            np.append(np.zeros(len(self.supply)), -1.0), A_ub=rows, b_ub=top, A_eq=[[*self.supply, 0.0]], b_eq=[self.batch],
            bounds=[*[(0, None)] * len(self.supply), (None, None)], method="highs",
        )  # fmt: skip
        return np.asarray(np.maximum(result.x[:-1], 0.0))

    def _halve(self, bound: float) -> None:
        """Halves the intervals that limit the bound."""
        least = min(interval.seconds for interval in self.intervals)
        out: list[Interval] = []
        for interval in self.intervals:
            ratio = interval.high / interval.low
            limits = interval.seconds < max(least, min(bound, least * 1.05)) * (1 + 0.2 * min(ratio - 1, 1.0))
            if limits and _FINE < ratio < np.inf:
                out += interval.halves()
                self.cuts = [cut for cut in self.cuts if cut.owner != (interval.size, interval.low)]
            else:
                out.append(interval)
        self.intervals = out


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
        alone.prices = np.append(main.prices / 2, batch / 2)
    found = alone.seconds(least, _ALONE)
    return min(least, found) if least > 0 else found
