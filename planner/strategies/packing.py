"""Choosing pipelines: the linear program over all columns (a bound) and the integer program over the promising ones
(a plan).

At a step time T a column is worth the sequences that it completes in T; the fleet can meet T only if columns that fit
into its
GPUs are together worth the global batch. The relaxation is solved by column generation: few rows, so few columns
matter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.search.simplex import Simplex
from planner.search.tables import Floats, Ints

_TRIES = 10
_ROUNDS = 60
_TOGETHER = 48  # columns exchanged among themselves before all are priced again


@dataclass(frozen=True)
class Relaxed:
    """value: the bound. prices: (rows,) what one GPU of each resource is worth. amounts: column -> share."""

    value: float
    prices: Floats
    amounts: dict[int, float]


class Packer:
    """Packs columns of `usage` (n, resources) into `supply` (resources,)."""

    def __init__(self, usage: Ints, supply: Ints):
        self.usage = usage
        self.supply = supply
        self.possible = np.asarray((usage <= supply).all(axis=1), dtype=np.bool_)
        self._share = np.maximum((usage / np.maximum(supply, 1)).sum(axis=1), 1e-12)
        self._program = Simplex(np.concatenate([usage, np.ones((len(usage), 1))], axis=1))

    def relax(self, value: Floats, target: float | None = None, at_most: int | None = None) -> Relaxed:
        """Maximum of value over fractional packings. Stops early, with some number on the same side of `target`, once that is
        reached or cannot be. at_most: number of pipelines.
        """
        program, worth = self._program, np.where(self.possible, np.maximum(value, 0.0), 0.0)
        limits = np.append(self.supply, self.supply.sum() if at_most is None else at_most).astype(float)
        program.restart(worth, limits)
        for _ in range(_ROUNDS if len(worth) else 0):
            *prices, each = np.maximum(program.prices, 0.0)
            left, found = worth - self.usage @ prices, program.found
            gain = left - each
            if float(gain.max()) <= 1e-7 * max(1.0, found):
                break
            # at these prices no packing is worth more
            no_more = float(limits[:-1] @ prices) + float(limits[-1]) * max(0.0, float(left.max()))
            if target is not None and (found >= target or no_more < target * (1 - 1e-6)):
                break
            merit = gain if found > 0 else worth / self._share
            program.exchange(np.argpartition(-merit, min(_TOGETHER, len(merit) - 1))[:_TOGETHER])
        return Relaxed(program.found, np.maximum(program.prices[:-1], 0.0), program.amounts)

    def whole(
        self,
        value: Floats,
        size: Ints,
        batch: int,
        packed: int,
        nodes: int,
        mixed: bool,
        at_least: int,
        at_most: int | None = None,
    ) -> dict[int, int] | None:
        """How many of each column reach `batch`, out of the `packed` most worthwhile ones; None if none are found. As `choose`."""
        relaxed = self.relax(value, None, at_most)
        if relaxed.value < batch * (1 - 1e-9):
            return None
        for members in self._worthwhile(value, relaxed.prices, size, packed, mixed):
            pick = self.choose(members, value[members], size[members], batch, nodes, at_least, at_most)
            if pick is not None:
                return {int(members[i]): count for i, count in pick.items()}
        return None

    def _worthwhile(self, value: Floats, prices: Floats, size: Ints, most: int, mixed: bool) -> list[Ints]:
        """Columns for `choose`: those that gain most at these prices, and the best few of each microbatch size, so that odd
        batches find a size that divides them; one list for each size unless sizes may be mixed.
        """
        gain = value - self.usage @ prices
        usable = np.flatnonzero((value > 0) & self.possible)
        order = usable[np.lexsort((usable, -gain[usable]))]
        by_size = [order[size[order] == b] for b in np.unique(size[usable])]
        keep = np.unique(np.concatenate([order[:most], *(mine[: most // 8] for mine in by_size)]))
        return [keep] if mixed else [keep[size[keep] == b] for b in np.unique(size[keep])]

    def choose(
        self,
        columns: Ints,
        value: Floats,
        size: Ints,
        batch: int,
        nodes: int,
        at_least: int = 1,
        at_most: int | None = None,
    ) -> dict[int, int] | None:
        """How many of each of `columns` reach `batch` sequences exactly; None if none is found. value: microbatches
        times size.

        Per microbatch size b an integer number of microbatches is chosen between one and what the pipelines can do.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        sizes = sorted({int(s) for s in size})
        n, m = len(columns), len(sizes)
        most = np.floor(
            np.where(self.usage[columns] > 0, self.supply / np.maximum(self.usage[columns], 1), np.inf).min(axis=1)
        )
        rows, low, high = [], [], []
        for r in range(len(self.supply)):
            rows.append(np.concatenate([self.usage[columns, r], np.zeros(m)]))
            low.append(0.0)
            high.append(float(self.supply[r]))
        for j, b in enumerate(sizes):
            mine = (size == b).astype(float)
            pick = np.zeros(m)
            pick[j] = -1.0
            rows.append(np.concatenate([mine * value / b, pick]))  # can do at least what is asked
            low.append(0.0)
            high.append(np.inf)
            rows.append(np.concatenate([-mine, -pick]))  # each pipeline does at least one
            low.append(0.0)
            high.append(np.inf)
        rows.append(np.concatenate([np.zeros(n), np.array(sizes, dtype=float)]))
        low.append(float(batch))
        high.append(float(batch))
        rows.append(np.concatenate([np.ones(n), np.zeros(m)]))
        low.append(float(at_least))
        high.append(float(at_most) if at_most is not None else np.inf)
        cost = np.concatenate([np.full(n, 1.0), np.zeros(m)])
        result = milp(
            cost,
            constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
            integrality=np.ones(n + m),
            bounds=Bounds(np.zeros(n + m), np.concatenate([most, [batch // b for b in sizes]])),
            options={"node_limit": nodes, "mip_rel_gap": 0.2},
        )
        if result.x is None:
            return None
        counts = np.round(result.x[:n]).astype(int)
        return {i: int(c) for i, c in enumerate(counts) if c > 0}


def shortest(
    choose: Callable[[float], dict[int, int] | None], start: float, ceiling: float, tolerance: float
) -> dict[int, int] | None:
    """What `choose` picks at the shortest step time from `start` on at which it picks something; None where that is above
    `ceiling`."""
    step, low, high, found = 0.005, start * 0.999, np.inf, None
    seconds = start
    for _ in range(_TRIES):
        pick = choose(seconds)
        if pick is not None:
            found, high = pick, seconds
        else:
            low = seconds
        if found is None:
            seconds, step = start * (1 + step), step * 2
            if seconds > ceiling:
                break
        elif high - low < tolerance * high:
            break
        else:
            seconds = (low + high) / 2
    return found


class Sequences(Protocol):
    """(n,) sequences that each of `of`, by default all, does in so many seconds."""

    def __call__(self, seconds: float, of: Ints | None = None) -> Floats: ...


def close_in(
    packer: Packer, sequences: Sequences, batch: int, high: float, most: int | None, tolerance: float
) -> tuple[float, float] | None:
    """A step time that no fractional packing of at most so many pipelines meets the batch in, and one that some does; None if not
    in `high`.

    Each packing found says in how little time it would do itself, and a little less than that is tried next.
    """
    low, trial, last = 0.0, high, np.inf
    while True:
        relaxed = packer.relax(sequences(trial), float(batch), most)
        if relaxed.value >= batch * (1 - 1e-9):
            high = _soonest(relaxed, sequences, batch, low, trial, tolerance / 4)
        elif trial == high:
            return None
        else:
            low = trial
        if high - low <= tolerance * high:
            return low, high
        slow, last = last - high < 4 * tolerance * high, high
        trial = max((low + high) / 2, 0.9 * high) if slow else max(low, high * (1 - tolerance))


def _soonest(relaxed: Relaxed, sequences: Sequences, batch: int, low: float, high: float, tolerance: float) -> float:
    """The least time, up to `high`, in which this packing meets the batch."""
    index = np.array(list(relaxed.amounts), dtype=np.int64)
    amounts = np.array(list(relaxed.amounts.values()))
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if float(sequences(middle, index) @ amounts) >= batch * (1 - 1e-9):
            high = middle
        else:
            low = middle
    return high
