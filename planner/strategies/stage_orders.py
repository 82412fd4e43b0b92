"""The best order and cut of a pipeline's stages together, out of so many groups of each kind.

Where stages work ahead early ones may take longer than late ones, so which kind comes where decides how many blocks each holds. For a limit
on the bottleneck, the stages that reach furthest from the pipeline's end are the best of their kind and number, since what is left to the
others is then least; so a dynamic program over numbers of groups finds the best order, for many limits side by side. Stages that could
reach so far that those before them would have no block leave them one each.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from planner.search.draft import Shape
from planner.search.tables import Floats, Ints, Tables

_LIMITS = 64
_ROUNDS = 2
_MOST_STATES = 1500
Numbers = tuple[int, ...]


def best_orders(
    tables: Tables, groups: Mapping[int, int], microbatches: int, max_stages: int, longest_s: float
) -> list[Shape]:
    """For each number of stages, where fewer would take longer, the pipeline with the least bottleneck of at most `longest_s`, within 3%.
    groups: how many there are of each table row. Transfers count for nothing; nothing is found where combinations are too many."""
    if np.prod([count + 1 for count in groups.values()]) > _MOST_STATES:
        return []
    reach = _Reach(tables, groups, microbatches, max_stages)
    found: dict[int, tuple[float, Shape]] = {}
    low, high = reach.least_s(), longest_s
    for _ in range(_ROUNDS if low < high else 0):
        for seconds, shape in reach.shapes(np.geomspace(low, high, _LIMITS)):
            if seconds < found.get(len(shape.rows), (np.inf, None))[0]:
                found[len(shape.rows)] = seconds, shape
        least = min((seconds for seconds, _ in found.values()), default=low)
        low, high = least * (low / high) ** (1 / _LIMITS), least * (high / low) ** 0.25
    return [shape for _, (_, shape) in sorted(found.items())]


class _Reach:
    """How far from the end of the model so many groups of each kind get."""

    def __init__(self, tables: Tables, groups: Mapping[int, int], microbatches: int, max_stages: int):
        self.tables, self.microbatches = tables, microbatches
        self.rows, self.most = list(groups), list(groups.values())
        self.deepest = min(sum(self.most), max_stages, tables.num_blocks)
        self.fits = tables.fitting(max_stages)

    def least_s(self) -> float:
        """No bottleneck is less: all groups share the model, and all hide their forwards."""
        tables = self.tables
        whole_s = tables.time_sums[:, -1] * (1 - tables.forward_share)
        return 1 / sum(count / float(whole_s[row]) for row, count in zip(self.rows, self.most, strict=True))

    def shapes(self, limits: Floats) -> Iterator[tuple[float, Shape]]:
        """(bottleneck, pipeline) for the least of the limits that each number of stages meets."""
        starts, last = self._starts(limits)
        first: dict[int, tuple[int, Numbers]] = {}
        for numbers, start in starts.items():
            if (whole := np.flatnonzero(start == 0)).size:
                found = int(whole[0]), numbers
                first[sum(numbers)] = min(found, first.get(sum(numbers), found))
        for i, at in first.values():
            rows, ends = [], []
            while any(at):
                kind = int(last[at][i])
                at = _less(at, kind)
                rows.append(self.rows[kind])
                ends.append(max(int(starts[at][i]), len(rows) + 1))
            yield float(limits[i]), Shape(tuple(rows), tuple(ends))

    def _starts(self, limits: Floats) -> tuple[dict[Numbers, Ints], dict[Numbers, Ints]]:
        """Of each limit the first layer that the last stages reach, by how many of each kind they are, and the kind of the first of them;
        beyond the model where a stage cannot hold a block."""
        beyond = self.tables.num_layers + 1
        every = itertools.product(*(range(count + 1) for count in self.most))
        starts: dict[Numbers, Ints] = {}
        last: dict[Numbers, Ints] = {}
        for numbers in sorted(every, key=sum):
            if not any(numbers):
                starts[numbers] = np.full(len(limits), self.tables.num_layers)
            elif sum(numbers) <= self.deepest:
                ways = [
                    self._start(self.rows[kind], sum(numbers) - 1, starts[_less(numbers, kind)], limits)
                    if count
                    else np.full(len(limits), beyond)
                    for kind, count in enumerate(numbers)
                ]
                last[numbers] = np.argmin(ways, axis=0)
                starts[numbers] = np.min(ways, axis=0)
        return starts, last

    def _start(self, row: int, after: int, ends: Ints, limits: Floats) -> Ints:
        """The first layer of a stage with so many after it that ends there."""
        tables = self.tables
        hidden = min(1.0, tables.begun_ahead * after / max(self.microbatches - 1, 1))
        room = limits / (1 - tables.forward_share[row] * hidden) - tables.stage_overhead_s
        return first_layers(tables, row, self.fits[row, after], ends, room)


def first_layers(tables: Tables, row: int, fits: Ints, ends: Ints, seconds: Floats) -> Ints:
    """The first layer of a stage that ends there, takes so many seconds at most and fits memory; beyond the model
    where it can hold no block. The embedding is not left alone, nor the head.

    fits: by layer, `Tables.fitting` of the row and microbatches in flight. ends, seconds: of shapes that fit each other.
    """
    sums, layers = tables.time_sums[row], tables.num_layers
    end = np.clip(ends, 2, layers)
    timely = np.searchsorted(sums, (sums[end] - np.maximum(seconds, 0.0)) * (1 - 1e-12), side="left")
    start = np.maximum(timely, np.searchsorted(fits, end, side="left"))
    start = np.where(start == 1, 2, start)
    most = np.where(ends == layers, layers - 2, end - 1)
    return np.asarray(np.where((ends <= layers) & (start <= most), start, layers + 1))


def _less(numbers: Sequence[int], kind: int) -> Numbers:
    return tuple(count - (i == kind) for i, count in enumerate(numbers))
