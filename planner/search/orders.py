"""Orders of stages without a pattern, for equal pipelines.

`families.py` lets the stages of a node type follow each other at one TP degree. Here a stage may be
any group of any type beside any other: the two ends of a model with a large, tied embedding lie on
one fast node, and slower cards between them.

For a bottleneck and a number of stages the best order is the one that reaches the earliest layer
from the model's end: any other order reaches no stage before it (the argument of `cut.py`, over all
orders). So a dynamic program over the GPUs used keeps one layer for each state. Bottlenecks are
levels some percent apart, since the cut that follows is exact.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.search import limits
from planner.search.stage_sums import Floats, Ints
from planner.search.tables import Tables


def supply_of(tables: Tables, number: int, usable: Collection[int]) -> tuple[int, ...]:
    """Return each resource's GPUs for one of `number` equal pipelines; 0 if it is not usable."""
    each = enumerate(tables.resources)
    return tuple(of.num_gpus // number if index in usable else 0 for index, of in each)


def rows_of(tables: Tables, supply: Sequence[int], size: int) -> list[int]:
    """Return the rows of a microbatch of `size` sequences whose groups the supply can form."""
    out = []
    for row in range(len(tables.rows)):
        kind = tables.kind(row)
        is_whole = kind.count > 0 and kind.group is None
        has_gpus = kind.tp_degree <= supply[kind.resource]
        if tables.rows[row].microbatch == size and is_whole and has_gpus:
            out.append(row)
    return out


def neighbours(
    tables: Tables, rows: tuple[int, ...], supply: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return orders with one stage replaced, added or left out, or with two exchanged.

    Two stages are exchanged if they are neighbours, or one of them is an end. supply: GPUs of each
    resource that a pipeline may use.
    """
    usable = rows_of(tables, supply, tables.rows[rows[0]].microbatch)
    kinds = {row: tables.kind(row) for row in {*rows, *usable}}
    free = list(supply)
    for row in rows:
        free[kinds[row].resource] -= kinds[row].tp_degree
    out = dict[tuple[int, ...], None]()
    deepest = min(tables.deepest, tables.num_blocks)
    for at, row in enumerate(rows):
        if len(rows) > 1:
            out[(*rows[:at], *rows[at + 1 :])] = None
        for other in usable:
            given = kinds[row].tp_degree if kinds[other].resource == kinds[row].resource else 0
            if kinds[other].tp_degree <= free[kinds[other].resource] + given:
                out[(*rows[:at], other, *rows[at + 1 :])] = None
        for before in range(at):
            is_end = before == 0 or at == len(rows) - 1
            if rows[before] != row and (is_end or at == before + 1):
                out[
                    (*rows[:before], row, *rows[before + 1 : at], rows[before], *rows[at + 1 :])
                ] = None
    for other in usable:
        if len(rows) < deepest and kinds[other].tp_degree <= free[kinds[other].resource]:
            for at in range(len(rows) + 1):
                out[(*rows[:at], other, *rows[at:])] = None
    out.pop(rows, None)
    return list(out)


class Orders:
    """Best orders of the stages of a pipeline, by their number of stages.

    supply: GPUs of each resource that the pipeline may use. size: sequences of a microbatch.

    A state is the GPUs used so far. Arrays have the shape (levels, supply[0] + 1, ...).
    """

    def __init__(self, tables: Tables, supply: Sequence[int], size: int):
        self.tables = tables
        self.supply = supply
        self.rows = rows_of(tables, supply, size)
        kinds = [tables.kind(row) for row in self.rows]
        self._resource = [kind.resource for kind in kinds]
        self._degree = [kind.tp_degree for kind in kinds]
        self._deepest = min(tables.deepest, tables.num_blocks, sum(supply))
        self.levels = self._levels()
        self._known_starts: dict[tuple[int, int], Ints] = {}
        self._shape = (len(self.levels), *(gpus + 1 for gpus in supply))

    @property
    def work(self) -> int:
        """Number of array entries that `found` computes."""
        return int(np.prod(self._shape)) * len(self.rows) * self._deepest

    def found(self) -> Iterator[tuple[int, ...]]:
        """Yield the best orders for each type of the last stage and each number of stages.

        An order is the row of each stage, the first stage first.
        There are others with another type of the first stage, as far as the best order of fewer
        stages leaves it layers. An order with more stages is left out unless its bottleneck is
        less.
        """
        for last in sorted(set(self._resource)):
            yield from self._ending_with(last)

    def _levels(self) -> Floats:
        """Return (levels,) seconds of bottlenecks, ascending from one that nothing can beat."""
        if not self.rows:
            return np.zeros(0)
        rate = np.zeros(len(self.supply))
        whole_s = self.tables.sums.time_sums[self.rows, -1]
        np.maximum.at(rate, self._resource, 1.0 / (whole_s * self._degree))
        least_s = 1.0 / float(rate @ np.array(self.supply))
        return np.asarray(least_s * limits.LEVEL ** np.arange(1, limits.LEVELS + 1))

    def _beside_s(self, row: int) -> float:
        """Return seconds of a stage beside its layers: its overhead and two quick transfers."""
        tolls = self.tables.boundaries[row, self.rows]
        tolls = tolls[np.isfinite(tolls)]
        toll_s = float(tolls.min()) if len(tolls) else 0.0
        return self.tables.stage_overhead_s + 2 * self.tables.boundary_share * toll_s

    def _starts(self, row: int, after: int) -> Ints:
        """Return what `_new_starts` does, cached: all types of the last stage ask for the same."""
        if (row, after) not in self._known_starts:
            self._known_starts[row, after] = self._new_starts(self.rows[row], after)
        return self._known_starts[row, after]

    def _new_starts(self, row: int, after: int) -> Ints:
        """Return (levels, num_layers + 2) the earliest start of a stage that ends at each layer.

        num_layers + 1 if there is none. after: stages after it, which set the microbatches that it
        holds.
        """
        layers = self.tables.num_layers
        sums = self.tables.sums.time_sums[row]
        room_s = np.maximum(self.levels - self._beside_s(row), 0.0) * (1 + 1e-9)
        by_time = np.searchsorted(sums, sums[None, :] - room_s[:, None], side="left")
        fits = self.tables.sums.last_layer_that_fits[row, after]
        by_memory = np.searchsorted(fits, np.arange(layers + 1), side="left")
        start = np.maximum(by_time, by_memory[None, :])
        if fits[0] == layers:
            start[:, layers] = by_time[:, layers]  # the whole model holds a tied tensor once
        start[start == 1] = 2  # the first stage has a block as well
        latest = np.arange(layers + 1) - 1
        latest[layers] -= 1  # the last stage has a block as well
        start[start > latest] = layers + 1
        start[:, :2] = layers + 1
        nothing = np.full((len(self.levels), 1), layers + 1)
        return np.concatenate([start, nothing], axis=1)

    def _ending_with(self, last: int) -> Iterator[tuple[int, ...]]:
        """Yield the best orders whose last stage is on resource `last`."""
        layers = self.tables.num_layers
        start = np.full(self._shape, layers + 1, dtype=np.int64)
        start.reshape(len(self.levels), -1)[:, 0] = layers  # no GPU is used, no layer reached
        levels = np.arange(len(self.levels)).reshape(-1, *(1 for _ in self.supply))
        type_of = np.array([*self._resource, -1])
        chosen = [np.full(self._shape, -1, dtype=np.int64)]
        most = dict.fromkeys(self._resource, len(self.levels))
        for after in range(self._deepest):
            # earliest starts, of equal ones the row of the next stage, then its type
            best = np.full(self._shape, 4 * (layers + 1), dtype=np.int64)
            row_of = np.full(self._shape, -1, dtype=np.int64)
            whole: dict[int, NDArray[np.bool_]] = {}
            for row, resource in enumerate(self._resource):
                if after == 0 and resource != last:
                    continue
                source, target = self._moved(row)
                reached = self._starts(row, after)[levels, start[source]]
                following = chosen[-1][source]
                unlike = np.where(following == row, 0, 1 + (type_of[following] != resource))
                value = 4 * reached + unlike
                better = value < best[target]
                best[target] = np.where(better, value, best[target])
                row_of[target] = np.where(better, row, row_of[target])
                whole[row] = np.zeros(self._shape, dtype=np.bool_)
                whole[row][target] = reached == 0
            start = best // 4
            chosen.append(np.where(start <= layers, row_of, -1))
            for row, reached_whole in whole.items():
                first = self._resource[row]
                level = _first_true(reached_whole[: most[first]])
                if level is not None:
                    most[first] = level
                    yield self._order(level, reached_whole[level], row, chosen)

    def _moved(self, row: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the states before and after a stage of this row is added."""
        source = [slice(None)] * len(self._shape)
        target = [slice(None)] * len(self._shape)
        source[1 + self._resource[row]] = slice(None, -self._degree[row])
        target[1 + self._resource[row]] = slice(self._degree[row], None)
        return tuple(source), tuple(target)

    def _order(
        self, level: int, whole: NDArray[np.bool_], row: int, chosen: Sequence[Ints]
    ) -> tuple[int, ...]:
        """Return the order that begins with `row` and is whole at a level of bottlenecks.

        Of several it has the fewest GPUs. whole: True for the states of whole pipelines. chosen:
        row of the first stage of each state, by number of stages.
        """
        states = np.argwhere(whole)
        used = states[states.sum(axis=1).argmin()].tolist()
        rows = [row]
        for by_state in chosen[-2:0:-1]:
            used[self._resource[rows[-1]]] -= self._degree[rows[-1]]
            rows.append(int(by_state[(level, *used)]))
        return tuple(self.rows[each] for each in rows)


def _first_true(several: NDArray[np.bool_]) -> int | None:
    """Return the first index at which an array of (n, ...) has a True; None if it has none."""
    found = np.flatnonzero(several.any(axis=tuple(range(1, several.ndim))))
    return int(found[0]) if len(found) else None
