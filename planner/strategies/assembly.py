"""Plans of many GPUs out of generated pipelines, a few copies of each side by side.

Column generation (`generation.py`) says what pipelines in fractions would do and what GPUs are worth. With more columns, at prices nearby,
whole ones divide the fleet so that few GPUs are left over (`divisions.py`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planner.plan import Plan
from planner.search.draft import Draft, Shape
from planner.search.place import place_by_copies
from planner.search.problem import Request
from planner.search.tables import Floats, Tables
from planner.strategies.divisions import divisions, strides
from planner.strategies.generation import Column, Pool
from planner.strategies.packing import Packer

ASSEMBLED_GPUS = 128  # beyond
FEW = 4  # known pipelines: hardly any of ours will be alike
_COPIES = {
    0: ((1,),),
    FEW + 1: ((1, 2), (2, 4)),
    12: ((2, 4),),
    24: ((2, 4, 8),),
}  # tried one after the other, from so many known pipelines on
_LIMITS = 64
_FEWEST_MICROBATCHES = 16
_AGREED = (2, 4, 6, 8)  # rounds after which pipelines agree on when each layer is ready
_FINER = (2, 4)  # rounds after which bottlenecks lie closer
_ROUNDS = 14
_ALIKE = 7  # after so many they begin with groups of one kind
_NEAR = 0.03
_FAR = 1.25  # times the step, at most: what columns do in shorter ones may be nothing
_TOWARDS = 0.5  # prices of few columns swing: part of the way
_COARSEST = 1.2
_BEST = 24
_PRICES = 0.05  # standard deviation of their logarithms
_SHIFT = 0.004
_WORTH = 0.99
_LONGER = 1.004  # whole pipelines take a little longer than fractions of them
_LEFT = 0.5  # of each column that the linear program has
_DIVIDED = 7  # so few columns are sought by division alone
_BEAM, _FEWEST, _MOST = 1000, 3, 12
_TIMED = 2  # times at most: others may then look better
_VARIED = 12
_TIE = 1e-3


class _Effort(NamedTuple):
    """nearby: so many prices, whose pipelines lose at most a share `near` more than the least. packed: columns that are packed, into so
    many divisions. varied: how often those of the best are varied, into so many `neighbours` each time. plans: so many are placed."""

    nearby: int
    near: float
    packed: int
    divisions: int
    varied: int
    neighbours: int
    plans: int


_OF_FEW, _OF_MANY = _Effort(6, 0.03, 600, 40, 3, 600, 3), _Effort(40, 0.015, 1000, 12, 0, 0, 2)


class Packing(NamedTuple):
    """Columns side by side. seconds: when the last of their pipelines ends, with what follows it. microbatches: of each pipeline."""

    seconds: float
    microbatches: tuple[int, ...]
    columns: tuple[Column, ...]


def assembled_plans(
    request: Request, tables: Tables, draft: Draft, known_s: float, hurry: Callable[[], bool]
) -> Iterator[Plan]:
    """The best few packings of generated pipelines, with microbatches of the size that the known draft has; none where they promise little
    less than its `known_s`."""
    shapes = [shape for shape, _ in draft.pipelines]
    for copies in _COPIES[max(least for least in _COPIES if least <= len(shapes))]:
        assembly = Assembly(request, tables, shapes, copies, known_s)
        assembly.generate(hurry)
        if assembly.step_s <= _WORTH * known_s:
            assembly.widen(hurry)
            if not hurry():
                plans = filter(None, map(assembly.placed, assembly.packings(hurry)))
                yield from itertools.islice(plans, assembly.effort.plans)


class Assembly:
    """step_s: of fractions of pipelines found so far; of the known plan to begin with. prices: of a GPU of each resource, in sequences."""

    def __init__(self, request: Request, tables: Tables, known: Sequence[Shape], copies: Sequence[int], known_s: float):
        self.request, self.tables, self.batch = request, tables, request.global_batch_sequences
        size, few = tables.rows[known[0].rows[0]].microbatch, len(known) <= FEW
        self.effort = _OF_FEW if few else _OF_MANY
        self.pool = Pool(request, tables, size, len(known), copies, known, known_s, few)
        self.step_s, self.prices, self.limits = known_s, self._first_prices(), self._first_limits(max(copies), known_s)

    def _first_prices(self) -> Floats:
        speed = self.pool.speed
        return np.asarray(speed * self.batch / float(speed @ self.pool.supply))

    def _first_limits(self, copies: int, known_s: float) -> Floats:
        """Bottlenecks from that of one pipeline on all GPUs that a copy has."""
        least = self.pool.size * copies / float(self.pool.speed @ self.pool.supply)
        most = min(known_s / _FEWEST_MICROBATCHES, self.pool.stages.slowest)
        return np.asarray(np.geomspace(least, max(least, most), _LIMITS))

    def generate(self, hurry: Callable[[], bool]) -> None:
        """Until nothing new is found."""
        for number in range(_ROUNDS):
            new, lost = self.pool.find(self.prices, self.step_s, self.limits, _NEAR)
            relaxed = self.pool.relax(self.step_s)
            if not self.pool.columns or hurry():
                self.step_s = np.inf
                return
            longer = self.batch / max(relaxed.value, 1e-9)
            self.step_s *= float(np.clip(longer, 1 / _FAR, _FAR))
            if relaxed.value <= 0:
                continue
            self.prices = (1 - _TOWARDS) * self.prices + _TOWARDS * longer * relaxed.prices
            if number in _FINER:
                self._closer(lost)
            if number == _ALIKE:
                self.pool.begin_alike(self.prices, self.step_s, self.limits)
            if number in _AGREED:
                self.pool.agree(relaxed.amounts, self.step_s)
            elif number > _AGREED[-1] and not new:
                return

    def _closer(self, lost: Floats) -> None:
        """The bottlenecks at which least is lost, and those between neighbours."""
        best = np.sort(np.argsort(lost, kind="stable")[:_BEST])
        limits = self.limits[best]
        near = limits[1:] / limits[:-1] < _COARSEST
        self.limits = np.sort(np.append(limits, np.sqrt(limits[1:] * limits[:-1])[near]))

    def widen(self, hurry: Callable[[], bool]) -> None:
        """More columns, at prices and bottlenecks nearby: the same in every search."""
        random = np.random.default_rng(0)
        for number in range(self.effort.nearby):
            if hurry():
                return
            prices = self.prices * np.exp(random.normal(0, _PRICES, len(self.prices)))
            limits = self.limits * np.exp(random.uniform(-_SHIFT, _SHIFT))
            self.pool.find(
                prices, self.step_s, limits, self.effort.near, self.pool.copies[number % len(self.pool.copies)]
            )

    def packings(self, hurry: Callable[[], bool]) -> list[Packing]:
        """Those of the shortest steps first: of the columns found so far, then of their neighbours as well, as long as that helps."""
        found, varied = self._divided(_LONGER * self.step_s), set[Column]()
        for _ in range(self.effort.varied):
            if not found or hurry():
                break
            columns = dict.fromkeys(column for packing in found for column in packing.columns)
            fresh = [column for column in columns if column not in varied][:_VARIED]
            varied.update(fresh)
            step_s = found[0].seconds
            self.pool.vary(fresh, self.pool.relax(step_s).prices, step_s, self.effort.neighbours)
            found = _soonest_first([*found, *self._divided(step_s)])
        return found

    def _divided(self, step_s: float) -> list[Packing]:
        """Whole columns that do most in a step of about so many seconds. All that matter are timed by simulation."""
        for _ in range(_TIMED):
            chosen = self._chosen(step_s)
            if not self.pool.time(itertools.chain.from_iterable(chosen), step_s):
                break
        return _soonest_first([packing for indices in chosen if (packing := self._packing(indices)) is not None])

    def _chosen(self, step_s: float) -> list[list[int]]:
        """Indices of columns that are within the fleet together. Most are what the linear program has; the rest of the fleet is divided."""
        pool, usage = self.pool, self.pool.usage
        done, prices = pool.sequences(step_s), pool.relax(step_s).prices
        order = np.argsort(1 - done / np.maximum(usage @ prices, 1e-9), kind="stable")
        _, first = np.unique(
            (usage @ strides(pool.supply))[order], return_index=True
        )  # of those that use equal GPUs the best
        keep = order[np.sort(first)][: self.effort.packed]
        usage, value = usage[keep], pool.sequences(step_s, whole=True)[keep] + _TIE * done[keep]
        amounts = Packer(usage, pool.supply).relax(done[keep]).amounts
        number = sum(amounts.values())
        several = number > _DIVIDED
        taken = [i for i, amount in amounts.items() for _ in range(int(amount - _LEFT) if several else 0)]
        left = pool.supply - usage[taken].sum(axis=0)
        most = _MOST if several else max(_FEWEST, math.ceil(number) - 1)
        divided = divisions(usage, value, left, prices, _BEAM, most, self.effort.divisions) or [()]
        return [keep[[*taken, *members]].tolist() for members in divided]

    def _packing(self, indices: Sequence[int]) -> Packing | None:
        columns = tuple(self.pool.columns[i] for i in sorted(indices))
        lines = [line for i in sorted(indices) for line in [self.pool.line(i)] * self.pool.columns[i].copies]
        number, rest = divmod(self.batch, self.pool.size)
        if rest or not len(lines) <= number:
            return None
        begin, rate = np.array(lines).T
        return Packing(*_shared(begin, rate, number), columns)

    def placed(self, packing: Packing) -> Plan | None:
        shapes = [column.shape for column in packing.columns for _ in range(column.copies)]
        owners = [i for i, column in enumerate(packing.columns) for _ in range(column.copies)]
        draft = Draft(tuple(zip(shapes, packing.microbatches, strict=True)))
        about = self.request.spec.name, self.batch, self.request.sequence_length
        return place_by_copies(self.tables, draft, owners, *about)


def _soonest_first(packings: Sequence[Packing]) -> list[Packing]:
    return sorted(dict.fromkeys(packings), key=lambda packing: packing.seconds)


def _shared(begin: Floats, rate: Floats, number: int) -> tuple[float, tuple[int, ...]]:
    """When the last pipeline ends if they share so many microbatches best, each of which does begin + rate t in t seconds; and how many
    each does."""
    step_s = (number - begin.sum()) / rate.sum()
    counts = np.maximum(np.floor(begin + rate * step_s), 1.0)
    while counts.sum() < number:
        counts[np.argmin((counts + 1 - begin) / rate)] += 1
    while counts.sum() > number:
        counts[np.argmax(np.where(counts > 1, (counts - begin) / rate, -np.inf))] -= 1
    return float(((counts - begin) / rate).max()), tuple(counts.astype(int).tolist())
