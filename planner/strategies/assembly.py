"""Plans of many GPUs out of generated pipelines, a few copies of each side by side.

Column generation (`generation.py`) says what pipelines in fractions would do and what GPUs are worth; more columns at prices nearby give an
integer program a choice of pipelines that leave no GPU over.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from planner.plan import Plan
from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.generation import Column, Pool
from planner.strategies.packing import fullest
from planner.strategies.placement import place_by_copies
from planner.strategies.request import Request
from planner.strategies.tables import Floats, Tables

ASSEMBLED_GPUS = 256  # beyond
_COPIES = (2, 4, 8)
_FEW_COPIES = (1, 2)  # where more are too large a part
_SHARE = 3  # at least so many times the copies of a column are all pipelines
_LIMITS = 64
_FEWEST_MICROBATCHES = 16
_AGREED = (2, 4, 6, 8)  # rounds after which pipelines agree on when each layer is ready
_FINER = (2, 4)  # rounds after which bottlenecks lie closer
_ROUNDS = 14
_NEAR = 0.03
_NEARER = 0.015
_TOWARDS = 0.5  # prices of few columns swing: part of the way
_COARSEST = 1.2
_BEST = 24
_NEARBY = 32
_PRICES = 0.07  # standard deviation of their logarithms
_SHIFT = 0.004
_WORTH = 0.99
_LONGER = 1.004  # whole pipelines take a little longer than fractions of them
_PACKED = 500
_NODES = 1000


def assembled_plan(
    request: Request, tables: Tables, draft: Draft, known_s: float, hurry: Callable[[], bool]
) -> Plan | None:
    """Generated pipelines packed as well as found, with microbatches of the size that the known draft has; None where they promise little
    less than its `known_s`, or cannot be placed."""
    shapes = [shape for shape, _ in draft.pipelines]
    copies = [number for number in _COPIES if _SHARE * number <= len(shapes)]
    assembly = _Assembly(request, tables, shapes, copies if len(copies) > 1 else _FEW_COPIES, known_s)
    assembly.generate(hurry)
    if hurry() or assembly.step_s > _WORTH * known_s:
        return None
    assembly.widen(hurry)
    return None if hurry() else assembly.placed(assembly.packed())


class _Assembly:
    """step_s: of fractions of pipelines found so far; of the known plan to begin with. prices: of a GPU of each resource, in sequences."""

    def __init__(self, request: Request, tables: Tables, known: Sequence[Shape], copies: Sequence[int], known_s: float):
        self.request, self.tables, self.batch = request, tables, request.global_batch_sequences
        size = tables.rows[known[0].rows[0]].microbatch
        self.pool = Pool(request, tables, size, len(known), copies, known, known_s)
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
            if relaxed.value <= 0 or hurry():
                return
            longer = self.batch / relaxed.value
            self.step_s *= longer
            self.prices = (1 - _TOWARDS) * self.prices + _TOWARDS * longer * relaxed.prices
            if number in _FINER:
                self._closer(lost)
            if number in _AGREED:
                self.pool.agree([self.pool.columns[i] for i in relaxed.amounts], self.step_s)
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
        for number in range(_NEARBY):
            if hurry():
                return
            prices = self.prices * np.exp(random.normal(0, _PRICES, len(self.prices)))
            limits = self.limits * np.exp(random.uniform(-_SHIFT, _SHIFT))
            self.pool.find(prices, self.step_s, limits, _NEARER, self.pool.copies[number % len(self.pool.copies)])

    def packed(self) -> list[Column]:
        """The whole columns that do most in a step hardly longer than that of fractions, as often as they are taken."""
        step_s, usage = _LONGER * self.step_s, self.pool.usage
        worth = np.maximum(usage @ self.pool.relax(step_s).prices, 1e-9)
        keep = np.argsort(1 - self.pool.sequences(step_s) / worth, kind="stable")[:_PACKED]
        self.pool.time(keep.tolist(), step_s)
        value = self.pool.sequences(step_s, whole=True)
        number = fullest(usage[keep], value[keep], self.pool.supply, _NODES)
        return [
            self.pool.columns[i] for i, taken in zip(keep.tolist(), number.tolist(), strict=True) for _ in range(taken)
        ]

    def placed(self, columns: Sequence[Column]) -> Plan | None:
        shapes = [column.shape for column in columns for _ in range(column.copies)]
        owners = [i for i, column in enumerate(columns) for _ in range(column.copies)]
        ends = _Ends(self.tables, {column.shape: self.pool.late_s(column) for column in columns})
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
