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
from dataclasses import dataclass

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.search.problem import limits
from planner.search.problem.tables import Tables

StageRows = tuple[int, ...]
"""Table row of each stage of a pipeline, the first stage first."""


def supply_of(tables: Tables, number: int, usable: Collection[int]) -> tuple[int, ...]:
    """Return each resource's GPUs for one of `number` equal pipelines; 0 if it is not usable."""
    supply = [0] * len(tables.resources)
    for index in usable:
        supply[index] = tables.resources[index].num_gpus // number
    return tuple(supply)


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


def neighbours(tables: Tables, rows: StageRows, supply: Sequence[int]) -> list[StageRows]:
    """Return orders with one stage replaced, added or left out, or with two exchanged.

    Two stages are exchanged if they are neighbours, or one of them is an end. supply: GPUs of each
    resource that a pipeline may use.
    """
    free = list(supply)
    for row in rows:
        kind = tables.kind(row)
        free[kind.resource] -= kind.tp_degree

    # keys of a dictionary: each order once, in the order of the first change that leads to it
    found = dict[StageRows, None]()
    size = tables.rows[rows[0]].microbatch
    usable = rows_of(tables, supply, size)
    for at in range(len(rows)):
        before = rows[:at]
        after = rows[at + 1 :]
        if len(rows) > 1:
            found[(*before, *after)] = None
        for other in usable:
            if _can_replace(tables, rows[at], other, free):
                found[(*before, other, *after)] = None
        for exchanged in _exchanges(rows, at):
            found[exchanged] = None

    deepest = min(tables.deepest, tables.num_blocks)
    if len(rows) < deepest:
        for other in usable:
            kind = tables.kind(other)
            if kind.tp_degree <= free[kind.resource]:
                for at in range(len(rows) + 1):
                    found[(*rows[:at], other, *rows[at:])] = None

    found.pop(rows, None)
    return list(found)


def _can_replace(tables: Tables, row: int, other: int, free: Sequence[int]) -> bool:
    """Return True if a group of `other` fits in the GPUs of a group of `row` and the free ones."""
    old = tables.kind(row)
    new = tables.kind(other)
    given = old.tp_degree if old.resource == new.resource else 0
    return new.tp_degree <= free[new.resource] + given


def _exchanges(rows: StageRows, at: int) -> Iterator[StageRows]:
    """Yield the orders with stage `at` exchanged with an earlier one."""
    for before in range(at):
        is_end = before == 0 or at == len(rows) - 1
        is_next = at == before + 1
        if rows[before] != rows[at] and (is_end or is_next):
            exchanged = list(rows)
            exchanged[before] = rows[at]
            exchanged[at] = rows[before]
            yield tuple(exchanged)


@dataclass(frozen=True)
class Uses:
    """Best pipelines of one number of stages, by the GPUs that they use.

    seconds: bottleneck, infinite if there is none. levels, first_rows: its index in the levels, and
    the row of the first stage. These arrays have the shape (supply[0] + 1, ...). chosen: as in
    `Orders.order_from`.
    """

    orders: "Orders"
    depth: int
    seconds: Floats
    levels: Ints
    first_rows: Ints
    chosen: Sequence[Ints]

    def order(self, use: tuple[int, ...]) -> StageRows:
        """Return the stages of the pipeline that uses these GPUs."""
        level = int(self.levels[use])
        first_row = int(self.first_rows[use])
        return self.orders.order_from(use, level, first_row, self.chosen)


class Orders:
    """Best orders of the stages of a pipeline, by their number of stages.

    supply: GPUs of each resource that the pipeline may use. size: sequences of a microbatch.
    level, levels: ratio of two neighbouring bottlenecks, and their number.

    A state is the GPUs used so far. Arrays have the shape (levels, supply[0] + 1, ...).
    """

    def __init__(
        self,
        tables: Tables,
        supply: Sequence[int],
        size: int,
        level: float = limits.LEVEL,
        levels: int = limits.LEVELS,
    ):
        self.tables = tables
        self.supply = supply
        self.rows = rows_of(tables, supply, size)
        self._resource = [tables.kind(row).resource for row in self.rows]
        self._degree = [tables.tp_degree_by_row[row] for row in self.rows]
        num_gpus = sum(supply)
        self._deepest = min(tables.deepest, tables.num_blocks, num_gpus)
        self.least_s = self._least_s()
        self.levels = self.least_s * level ** np.arange(1, levels + 1)
        self._known_starts: dict[tuple[int, int], Ints] = {}

        num_levels = len(self.levels)
        states = [gpus + 1 for gpus in supply]
        self._shape = (num_levels, *states)
        # (levels, 1, ...), so that a level meets all states
        ones = [1] * len(supply)
        self._level_index = np.arange(num_levels).reshape(num_levels, *ones)
        # the last entry is that of row -1: no stage follows
        self._type_of = np.array([*self._resource, -1])

    @property
    def work(self) -> int:
        """Number of array entries that `found` computes."""
        num_states = int(np.prod(self._shape))
        return num_states * len(self.rows) * self._deepest

    def found(self) -> Iterator[StageRows]:
        """Yield the best orders for each type of the last stage and each number of stages.

        An order is the row of each stage, the first stage first.
        There are others with another type of the first stage, as far as the best order of fewer
        stages leaves it layers. An order with more stages is left out unless its bottleneck is
        less.
        """
        for last in sorted(set(self._resource)):
            yield from self._ending_with(last)

    def by_use(self) -> Iterator[Uses]:
        """Yield the best pipelines for each number of GPUs of each resource, by depth."""
        none = len(self.levels)
        seconds_of = np.append(self.levels, np.inf)
        start, chosen = self._from_end()
        every = range(len(self.rows))
        for after in range(self._deepest):
            start, row_of, whole = self._with_stage(every, after, start, chosen[-1])
            chosen.append(row_of)

            level = np.full(self._shape[1:], none)
            first_row = np.full(self._shape[1:], -1)
            for row, is_whole in whole.items():
                least = np.where(is_whole.any(axis=0), is_whole.argmax(axis=0), none)
                first_row = np.where(least < level, row, first_row)
                level = np.minimum(level, least)
            yield Uses(self, after + 1, seconds_of[level], level, first_row, tuple(chosen))

    def _least_s(self) -> float:
        """Return seconds of a bottleneck that nothing can beat; 0 without rows."""
        if not self.rows:
            return 0.0
        # (R,) microbatches a second of one GPU, if it did the whole model at its best row
        speeds = np.zeros(len(self.supply))
        model_s = self.tables.sums.time_sums[self.rows, -1]
        speeds_of_rows = 1.0 / (model_s * self._degree)
        np.maximum.at(speeds, self._resource, speeds_of_rows)
        return 1.0 / float(speeds @ np.array(self.supply))

    def _beside_s(self, row: int) -> float:
        """Return seconds of a stage beside its layers: its overhead and two quick transfers."""
        tolls = self.tables.boundaries[row, self.rows]
        possible = tolls[np.isfinite(tolls)]
        quickest_s = 0.0
        if len(possible):
            quickest_s = float(possible.min())
        share = 2 * self.tables.boundary_share
        return self.tables.stage_overhead_s + share * quickest_s

    def _starts(self, row: int, after: int) -> Ints:
        """Return what `_new_starts` does, cached: all types of the last stage ask for the same."""
        key = (row, after)
        if key not in self._known_starts:
            self._known_starts[key] = self._new_starts(self.rows[row], after)
        return self._known_starts[key]

    def _new_starts(self, row: int, after: int) -> Ints:
        """Return (levels, num_layers + 2) the earliest start of a stage that ends at each layer.

        num_layers + 1 if there is none. after: stages after it, which set the microbatches that it
        holds.
        """
        layers = self.tables.num_layers
        ends = np.arange(layers + 1)

        sums = self.tables.sums.time_sums[row]
        layers_s = np.maximum(self.levels - self._beside_s(row), 0.0)
        room_s = layers_s * (1 + 1e-9)
        begin_s = sums[None, :] - room_s[:, None]
        by_time = np.searchsorted(sums, begin_s, side="left")

        fits = self.tables.sums.last_layer_that_fits[row, after]
        by_memory = np.searchsorted(fits, ends, side="left")
        start = np.maximum(by_time, by_memory[None, :])
        if fits[0] == layers:
            start[:, layers] = by_time[:, layers]  # the whole model holds a tied tensor once

        none = layers + 1
        start[start == 1] = 2  # the first stage has a block as well
        latest = ends - 1
        latest[layers] -= 1  # the last stage has a block as well
        start[start > latest] = none
        start[:, :2] = none
        from_nowhere = np.full((len(self.levels), 1), none)
        return np.concatenate([start, from_nowhere], axis=1)

    def _ending_with(self, last: int) -> Iterator[StageRows]:
        """Yield the best orders whose last stage is on resource `last`."""
        start, chosen = self._from_end()
        best_level = dict.fromkeys(self._resource, len(self.levels))
        rows = [row for row, resource in enumerate(self._resource) if resource == last]
        for after in range(self._deepest):
            start, row_of, whole = self._with_stage(rows, after, start, chosen[-1])
            chosen.append(row_of)
            rows = list(range(len(self.rows)))

            for row, is_whole in whole.items():
                first = self._resource[row]
                level = _first_true(is_whole[: best_level[first]])
                if level is not None:
                    best_level[first] = level
                    yield self._order(level, is_whole[level], row, chosen)

    def _from_end(self) -> tuple[Ints, list[Ints]]:
        """Return the starts and rows of all states before any stage, at the model's end."""
        layers = self.tables.num_layers
        start = np.full(self._shape, layers + 1, dtype=np.int64)
        by_level = start.reshape(len(self.levels), -1)
        by_level[:, 0] = layers  # no GPU is used, no layer reached
        return start, [np.full(self._shape, -1, dtype=np.int64)]

    def _with_stage(
        self, rows: Sequence[int], after: int, start: Ints, following: Ints
    ) -> tuple[Ints, Ints, dict[int, Bools]]:
        """Return the best states after one more stage before the `after` stages of each state.

        rows: possible rows of the stage. start, following: earliest layer and row of the first
        stage of each state.

        Returns the new starts and rows, and for each row the states whose stages are a whole model
        if the new stage is of this row.
        """
        layers = self.tables.num_layers
        # earliest starts, of equal ones the row of the next stage, then its type: one number holds
        # all three
        none = 4 * (layers + 1)
        best = np.full(self._shape, none, dtype=np.int64)
        row_of = np.full(self._shape, -1, dtype=np.int64)
        whole: dict[int, Bools] = {}
        for row in rows:
            source, target = self._shift_states(row)
            starts = self._starts(row, after)
            reached = starts[self._level_index, start[source]]
            next_row = following[source]
            is_other_type = self._type_of[next_row] != self._resource[row]
            unlike = np.where(next_row == row, 0, 1 + is_other_type)
            value = 4 * reached + unlike

            better = value < best[target]
            best[target] = np.where(better, value, best[target])
            row_of[target] = np.where(better, row, row_of[target])
            is_whole = np.zeros(self._shape, dtype=np.bool_)
            is_whole[target] = reached == 0
            whole[row] = is_whole

        new_start = best // 4
        row_of = np.where(new_start <= layers, row_of, -1)
        return new_start, row_of, whole

    def _shift_states(self, row: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the states before and after a stage of this row is added."""
        axis = 1 + self._resource[row]
        degree = self._degree[row]
        source = [slice(None)] * len(self._shape)
        target = [slice(None)] * len(self._shape)
        source[axis] = slice(None, -degree)
        target[axis] = slice(degree, None)
        return tuple(source), tuple(target)

    def _order(self, level: int, whole: Bools, row: int, chosen: Sequence[Ints]) -> StageRows:
        """Return the order that begins with `row` and is whole at a level of bottlenecks.

        Of several it has the fewest GPUs. whole: True for the states of whole pipelines. chosen:
        as in `order_from`.
        """
        states = np.argwhere(whole)
        num_gpus = states.sum(axis=1)
        used = states[num_gpus.argmin()].tolist()
        return self.order_from(used, level, row, chosen)

    def order_from(
        self, use: Sequence[int], level: int, row: int, chosen: Sequence[Ints]
    ) -> StageRows:
        """Return the order that begins with `row` and uses these GPUs at a level of bottlenecks.

        chosen: row of the first stage of each state, by number of stages.
        """
        # take one stage after the other away, from the first to the last but one
        used = list(use)
        rows = [row]
        for by_state in chosen[-2:0:-1]:
            latest = rows[-1]
            used[self._resource[latest]] -= self._degree[latest]
            rows.append(int(by_state[(level, *used)]))
        return tuple(self.rows[each] for each in rows)


def _first_true(several: Bools) -> int | None:
    """Return the first index at which an array of (n, ...) has a True; None if it has none."""
    axes = tuple(range(1, several.ndim))
    found = np.flatnonzero(several.any(axis=axes))
    return int(found[0]) if len(found) else None
