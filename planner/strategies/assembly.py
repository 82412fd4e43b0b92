"""Plans of many GPUs out of generated pipelines, a few copies of each side by side.

Column generation (`generation.py`) says what pipelines in fractions would do and what GPUs are worth. With more columns, at prices nearby,
whole ones divide the fleet so that few GPUs are left over (`divisions.py`).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planner.plan import Plan
from planner.strategies.divisions import divisions
from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.generation import Column, Pool
from planner.strategies.packing import Packer
from planner.strategies.placement import place_by_copies
from planner.strategies.request import Request
from planner.strategies.tables import Floats, Tables

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
_BEAM, _MOST = 1000, 12


class _Effort(NamedTuple):
    """nearby: so many prices, whose pipelines lose at most a share `near` more than the least. packed: columns that are packed. plans: so
    many packings are placed."""

    nearby: int
    near: float
    packed: int
    plans: int


_OF_FEW, _OF_MANY = _Effort(20, 0.03, 500, 1), _Effort(40, 0.015, 1000, 2)


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
                plans = filter(None, map(assembly.placed, assembly.packings()))
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

    def packings(self) -> Iterator[list[Column]]:
        """Whole columns that do most in a step hardly longer than that of fractions, best first. Most are what the linear program has;
        the rest of the fleet is divided."""
        step_s, pool = _LONGER * self.step_s, self.pool
        prices = pool.relax(step_s).prices
        keep = np.argsort(1 - pool.sequences(step_s) / np.maximum(pool.usage @ prices, 1e-9), kind="stable")[
            : self.effort.packed
        ]
        pool.time(keep.tolist(), step_s)
        usage, value = pool.usage[keep], pool.sequences(step_s, whole=True)[keep]
        amounts = Packer(usage, pool.supply).relax(pool.sequences(step_s)[keep]).amounts
        several = sum(amounts.values()) > _DIVIDED
        taken = [i for i, amount in amounts.items() for _ in range(int(amount - _LEFT) if several else 0)]
        left = pool.supply - usage[taken].sum(axis=0)
        for members in divisions(usage, value, left, prices, _BEAM, _MOST) or [()]:
            yield [pool.columns[i] for i in keep[[*taken, *members]].tolist()]

    def placed(self, columns: Sequence[Column]) -> Plan | None:
        shapes = [column.shape for column in columns for _ in range(column.copies)]
        owners = [i for i, column in enumerate(columns) for _ in range(column.copies)]
        late_s = dict[Shape, float]()
        for column in columns:
            late_s[column.shape] = max(self.pool.late_s(column), late_s.get(column.shape, 0.0))
        ends = _Ends(self.tables, late_s)
        draft = assign_microbatches(ends, shapes, self.batch) if shapes else None
        if draft is None:
            return None
        about = self.request.spec.name, self.batch, self.request.sequence_length
        return place_by_copies(self.tables, draft, owners, *about)


class _Ends(Estimator):
    """With what follows a pipeline before its step ends."""

    def __init__(self, tables: Tables, late_s: Mapping[Shape, float]):
        super().__init__(tables)
        self._late_s = late_s

    def pipeline_s(self, shape: Shape, microbatches: int) -> float:
        return super().pipeline_s(shape, microbatches) + self._late_s[shape]
