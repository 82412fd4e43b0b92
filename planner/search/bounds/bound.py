"""Lower bound of the step time over all pipelines, without listing them.

The pipelines may have any order, number and mix of kinds.

F is one microbatch's whole way, transfers included. With K microbatches a pipeline takes, for every
stage s with q stages after it, at least
* F + (K - 1) t_s - min(K - 1, a q) f_s, where each stage may keep a more microbatches in flight
  than the next (1F1B: a = 1; `Tables.begun_ahead`), and at least
* its own K microbatches, and the way to it and back: F + (K - 1) t_s - (F's share of the stages
  after it).

Let m = (T - F) / (K - 1). Then every stage has t_s - min(1, a q / (K - 1)) f_s <= m and t_s <= m +
(share after it) / (K - 1), hence t_s <= (m + c) (1 + 1 / (K - 1))^q - c where transfers, of c at
most, run beside the work, and the pipeline does K = 1 + (T - F) / m microbatches. At prices p of a
GPU that sum to the batch over the fleet, no plan meets the batch in time T if no pipeline does more
sequences than its GPUs cost:

    b (1 + (T - F) / m) <= p . gpus    for all pipelines    <=    T <= min over m of  m (least cost / b - 1),
    least cost = least sum over stages of [ (b / m) (stage's share of F) + p . gpus ],

a shortest path over the block at which each stage starts, for each m. m lies in an interval [low,
high): stages within `high`, weights at `low`. What a stage may exceed m by grows as K falls, and K
is known from below by the most stages of an interval: intervals are of both, and those that matter
are halved where they are widest. The prices that give the largest bound are found by cutting
planes: every path is a linear inequality in T and p. A larger T known before leaves fewer paths, so
cuts of paths that are none any more are dropped. Gradient sync is not in it.
"""  # noqa: E501

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.arrays import Floats
from planner.search.bounds.paths import PricedStages
from planner.search.problem import limits
from planner.search.problem.tables import Tables

FAMILY = "of the searched family, under this cost model,"


@dataclass
class Interval:
    """Pipelines of one microbatch size with a bottleneck from `low` to `high` seconds.

    least, most: number of stages. path_s: least of a path's fill and the price of its GPUs, at the
    prices of look number `look` (-1: not looked at yet).
    """

    size: int
    low: float
    high: float
    least: int
    most: int
    path_s: float = 0.0
    look: int = -1

    @property
    def key(self) -> tuple[int, float, int]:
        return self.size, self.low, self.most

    def halves(self, by_depth: bool) -> "tuple[Interval, Interval]":
        """Split the interval in two: fewer paths each, none of less value."""
        if by_depth:
            stages = (self.least + self.most) // 2
            return replace(self, most=stages), replace(self, least=stages + 1)
        middle = (self.low * self.high) ** 0.5
        return replace(self, high=middle), replace(self, low=middle)


class Bound:
    """The bound for the plans of one fleet."""

    def __init__(self, tables: Tables):
        self.batch = tables.batch
        self.supply = np.array([float(resource.num_gpus) for resource in tables.resources])
        self.relaxed = [PricedStages(tables, size) for size in tables.sizes]
        self.intervals = self._first_intervals()

        # by interval: each says that T is at most its sum with the resources' shares in what is
        # paid
        self.cuts: dict[tuple[int, float, int], list[Floats]] = {}
        # the price of each resource if it had the whole share
        self.alone = self.batch / self.supply

        # the prices of each look
        self.looks: list[Floats] = []
        # the largest factor by which a path may be cheaper now than at each look
        self.falls: list[float] = []
        # microbatches of a pipeline that pays until a price falls far, by size
        self.fewest: list[float] = []

        # no GPU idle, each at its best
        self.speed = self._speed()
        sequences_per_s = float(self.speed @ self.supply)
        self.best = self.batch / max(sequences_per_s, 1e-30)
        # the best prices so far
        self.centre = np.zeros(len(self.supply))

    def _first_intervals(self) -> list[Interval]:
        found = []
        for size, stages in enumerate(self.relaxed):
            bottlenecks = _bottlenecks(stages)
            for least, most in _depths(stages.stages):
                for low, high in bottlenecks:
                    found.append(Interval(size, low, high, least, most))
        return found

    def seconds(self, needed: float = 0.0, is_late: Callable[[], bool] = lambda: False) -> float:
        """Return the bound, or what is proved once `needed` is out of reach or it is late.

        Infinite, or zero, if no pipeline holds the model.
        """
        if not self.intervals:
            return 0.0
        # first, each GPU pays in proportion to its speed
        sequences_per_s = float(self.speed @ self.supply)
        prices = np.asarray(self.speed * self.batch / sequences_per_s)
        self.centre = prices

        most = -np.inf
        idle = 0
        for _ in range(limits.BOUND_ROUNDS):
            if is_late():
                break
            least = self._price(prices)
            idle += 1
            if least > most:
                most = least
                self.centre = prices
                idle = 0
            self.best = max(self.best, most)
            if self.best == np.inf or idle > limits.REPEATS:
                break

            self._halve(self._near())
            corner, hoped = self._best_prices()
            is_done = hoped < most * (1 + limits.FINE)
            is_hopeless = hoped * limits.HOPE < needed
            if is_done or is_hopeless:
                break

            # part of the way from the best prices so far, less after each failure: corners of the
            # cuts alone swing to and fro
            way = limits.OUTWARD ** (idle + 1)
            prices = (1 - way) * self.centre + way * corner
        return self.best

    def _speed(self) -> Floats:
        """Return sequences a second that a GPU of each resource does at best.

        That is the GPU's share of the work, with no idle time.
        """
        speed = np.zeros(len(self.supply))
        for stages in self.relaxed:
            np.maximum.at(speed, stages.resource, stages.speed)
        return speed

    def _seconds(self, interval: Interval) -> float:
        """Return the bound of an interval at the present prices.

        A path falls by no larger factor than any price. If some prices fell far, pipelines may pay
        now that did not pay then, and the interval has to be looked at again.
        """
        if interval.look < 0:
            return _proved_s(interval, 0.0)

        falls = self.falls[interval.look]
        if falls < limits.OUTWARD:
            return _proved_s(interval, 0.0)
        return _proved_s(interval, falls * interval.path_s)

    def _price(self, prices: Floats) -> float:
        """Return the bound that these prices give.

        Intervals that limit it are halved while that raises it.
        """
        self.looks.append(prices)
        self.falls = [_falls(before, prices) for before in self.looks]
        self.fewest = []
        for stages in self.relaxed:
            fewest = stages.fewest_microbatches(prices)
            self.fewest.append(limits.OUTWARD * fewest)

        least = self._look()
        for _ in range(limits.REPEATS):
            self.best = max(self.best, least)
            near_s = least * (1 + limits.FINE)
            limiting = [each for each in self.intervals if self._seconds(each) < near_s]
            halves = self._halve(limiting)
            if not halves:
                break
            self._look_at(halves)
            least = min(map(self._seconds, self.intervals))
        return least

    def _look(self) -> float:
        """Return the bound that the present prices give with the present intervals.

        Only intervals that may limit it are looked at, and give cuts.
        """
        # known before: what an interval proves now may be more once it is looked at
        known = [(self._seconds(interval), interval) for interval in self.intervals]
        known.sort(key=lambda each: each[0])

        least = np.inf
        done = 0
        while done < len(known):
            near_s = least * (1 + limits.FINE)
            nearest = known[done : done + limits.TOGETHER]
            several = [interval for seconds, interval in nearest if seconds < near_s]
            if not several:
                break
            done += len(several)
            least = min(least, self._look_at(several))
        return least

    def _look_at(self, intervals: Sequence[Interval]) -> float:
        by_size: dict[int, list[Interval]] = {}
        for interval in intervals:
            by_size.setdefault(interval.size, []).append(interval)

        least = np.inf
        for size in sorted(by_size):
            least = min(least, self._solve(size, by_size[size]))
        return least

    def _solve(self, size: int, intervals: Sequence[Interval]) -> float:
        """Return the least bound of some intervals of one size; keep the cut that each gives."""
        prices = self.looks[-1]
        stages = self.relaxed[size]
        low = np.array([each.low for each in intervals])
        high = np.array([each.high for each in intervals])
        depths = np.array([(each.least, each.most) for each in intervals])
        scale = low / stages.microbatch  # seconds of a unit of the prices

        after = stages.microbatches_after(high, self.fewest[size], depths[:, 1], self.best)
        cost, gpus, fill = stages.cheapest(1 / scale, high, prices, after, depths)
        paths_s = cost * scale
        for at, interval in enumerate(intervals):
            interval.path_s = float(paths_s[at])
            interval.look = len(self.looks) - 1
            if np.isfinite(interval.path_s):
                paid = gpus[at] * scale[at] * self.alone
                self._add_cut(interval, paid + float(fill[at]) - interval.low)
        return min(map(self._seconds, intervals))

    def _add_cut(self, interval: Interval, found: Floats) -> None:
        """Keep a cut that the present prices gave, without cuts of paths that are none any more."""
        shares = self.looks[-1] / self.alone
        least = found @ shares * (1 - 1e-9)
        before = self.cuts.get(interval.key, ())

        # the path found is the cheapest, so a lower cut is of a path that is excluded by now
        held = [cut for cut in before if cut @ shares >= least]
        self.cuts[interval.key] = [*held, found]

    def _best_prices(self) -> tuple[Floats, float]:
        """Return the prices that allow the largest T, and that T.

        They follow the cuts of the present intervals that may limit the bound.
        """
        # a bottleneck far above the best bound limits nothing
        far_s = (1 + limits.WIDEST_GAP) * self.best
        near: list[Floats] = []
        for (_, low, _), cuts in self.cuts.items():
            if low < far_s:
                near += cuts
        if not near:
            near = list(itertools.chain(*self.cuts.values()))

        # the sum alone makes prices valid
        shares, most_s = best_mix(np.array(near))
        prices = np.maximum(shares, 0.0) * self.alone
        paid = float(prices @ self.supply)
        return prices * self.batch / max(paid, 1e-30), most_s

    def _spread(self, interval: Interval) -> tuple[float, float]:
        """Return the spreads of an interval's bottlenecks and depths, as shares of the step time.

        Each is the largest difference that it can make in the step time.
        """
        by_bottleneck = interval.high / interval.low - 1
        by_depth = (interval.most - interval.least) * interval.high / self.best
        return by_bottleneck, by_depth

    def _near(self) -> list[Interval]:
        """Return the intervals that limit the bound or soon may, by their last looks."""
        last = []
        for interval in self.intervals:
            if interval.look >= 0:
                last.append((_proved_s(interval, interval.path_s), interval))
        least = min(seconds for seconds, _ in last)
        most = max(least, min(self.best, least * 1.05))

        found = []
        for seconds, interval in last:
            # a wide interval says less than its halves would
            spread = min(max(self._spread(interval)), 1.0)
            if seconds < most * (1 + 0.2 * spread):
                found.append(interval)
        return found

    def _halve(self, intervals: Sequence[Interval]) -> list[Interval]:
        """Replace intervals that are not narrow enough by their halves; return the halves."""
        halved = set[int]()
        halves: list[Interval] = []
        for interval in intervals:
            by_bottleneck, by_depth = self._spread(interval)
            if limits.FINE < max(by_bottleneck, by_depth) < np.inf:
                halved.add(id(interval))
                halves += interval.halves(by_depth > by_bottleneck)
                self.cuts.pop(interval.key, None)

        whole = [each for each in self.intervals if id(each) not in halved]
        self.intervals = [*whole, *halves]
        return halves


def best_mix(gains: Floats) -> tuple[Floats, float]:
    """Return the shares of R columns, (R,), whose least row is largest, and that least row.

    gains: (n, R). This is a matrix game, solved by the dual simplex method. scipy's linear programs
    take a fifth of a second to import and a millisecond each.
    """
    rows, columns = gains.shape
    scale = max(float(np.abs(gains).max()), 1e-30)

    # over (shares, least): each share is 0 at least, and the least is no more than any row
    not_negative = [-np.eye(columns), np.zeros((columns, 1))]
    no_more_than_rows = [-gains / scale, np.ones((rows, 1))]
    most = np.block([not_negative, no_more_than_rows])
    sums = np.append(np.ones(columns), 0.0)
    best = np.append(np.zeros(columns), 1.0)
    right = np.append(1.0, np.zeros(columns))

    # the first basis: the row that alone allows the least, all of it from its largest column
    worst = int(gains.max(axis=1).argmin())
    largest = gains[worst].argmax()
    others = list(range(columns))
    others.remove(int(largest))
    active = [columns + worst, *others]
    for _ in range(rows + columns):
        tight = np.vstack([sums, most[active]])
        found = np.linalg.solve(tight, right)
        broken = most @ found
        worst = int(broken.argmax())
        if broken[worst] <= 1e-9:
            break

        # the inequality that is broken most enters; the one whose load reaches 0 first leaves
        both = np.stack([best, most[worst]], axis=1)
        loads, change = np.linalg.solve(tight.T, both).T[:, 1:]
        until_zero = np.maximum(loads, 0.0) / np.maximum(change, 1e-12)
        ratio = np.where(change > 1e-12, until_zero, np.inf)
        active[int(ratio.argmin())] = worst
    return found[:-1], float(found[-1]) * scale


def _proved_s(interval: Interval, path_s: float) -> float:
    """Return a step time below which no plan with a pipeline of this interval can be.

    Two microbatches take longer than the bottleneck; a pipeline of one microbatch alone is in the
    interval of its step time too.
    """
    return max(path_s - interval.low, interval.low)


def _falls(before: Floats, prices: Floats) -> float:
    ratio = np.divide(prices, before, out=np.full(len(prices), np.inf), where=before > 0)
    return min(1.0, float(ratio.min()))


def _depths(most: int) -> list[tuple[int, int]]:
    """Least and most stages of the first intervals."""
    inner = [depth for depth in limits.BANDS if 4 < depth < most]
    found = []
    least = 1
    for end in [*inner, most]:
        found.append((least, end))
        least = end + 1
    return found


def _bottlenecks(stages: PricedStages) -> list[tuple[float, float]]:
    """Least and most seconds of the first intervals; none if no stage fits."""
    if not np.isfinite(stages.quickest):
        return []

    ratio = math.log(stages.slowest / stages.quickest, limits.COARSE)
    times = math.ceil(max(0.0, ratio))
    ends = [stages.quickest * limits.COARSE**i for i in range(times + 1)]
    ends.append(np.inf)
    return list(itertools.pairwise(ends))


@dataclass(frozen=True, slots=True)
class Proof:
    """Proof of how near a plan's step time is to the best.

    lower_bound_s, gap: None if nothing is proved. says: a sentence for the user.
    """

    lower_bound_s: float | None
    gap: float | None
    says: str


NO_PROOF = Proof(None, None, "no lower bound (not computed for this objective)")
OUT_OF_TIME = Proof(None, None, "no lower bound (the time limit was over)")


def prove(tables: Tables, step_s: float, is_late: Callable[[], bool] = lambda: False) -> Proof:
    """Bound the plans of the searched family, and compare a plan of `step_s` seconds with it.

    The bound is never clipped. A bound above the plan is an error of the bound, which the proof
    reports. A gap above `limits.WIDEST_GAP` is no proof. is_late: ends the search for a higher
    bound.
    """
    if is_late():
        return OUT_OF_TIME

    # a lower bound than this proves nothing, so the search for it ends early
    needed_s = step_s / (1 + limits.WIDEST_GAP)
    bound_s = Bound(tables).seconds(needed_s, is_late)
    return proof_of(bound_s, step_s)


def proof_of(bound_s: float, step_s: float) -> Proof:
    """Return the proof that a bound gives for a plan's step time."""
    if bound_s > step_s * (1 + 1e-9):
        says = (
            f"ERROR: the lower bound of {bound_s:.6g} s lies above this plan's {step_s:.6g} s, so"
            " it is none; please report it"
        )
        return Proof(None, None, says)

    gap = step_s / bound_s - 1 if bound_s > 0 else math.inf
    if gap > limits.WIDEST_GAP:
        says = f"no lower bound within {limits.WIDEST_GAP:.0%} of this plan"
        return Proof(None, None, says)
    return Proof(bound_s, gap, f"no plan {FAMILY} is more than {gap:.1%} faster")
