"""Columns made exact: the best order of the stages and the best cut of the layers, for many columns at once."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.cut import Balancer
from planner.search.draft import Shape
from planner.search.tables import Floats, Ints, Tables
from planner.strategies.columns import Columns

Ring = Callable[[Floats, Ints], Floats]
"""Seconds that the links of workers of these table rows need for so many gradient bytes; arrays of one shape, rows -1 where none is."""


@dataclass(frozen=True)
class Pipelines:
    """One entry a column that can hold the model. index: which column it came from; worker_bytes, stage_bytes: sync sizes as in
    `SyncShape`. held_bytes: (n, P) gradient bytes of a worker of each stage; early_s: (n, P) how long before the pipeline's end
    each has done its last backward.
    """

    index: Ints
    rows: Ints
    ends: Ints
    num_stages: Ints
    microbatch: Ints
    usage: Ints
    bottleneck_s: Floats
    fill_s: Floats
    worker_bytes: Floats
    stage_bytes: Floats
    held_bytes: Floats
    early_s: Floats
    least_tp: Ints
    most_tp: Ints

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: Ints) -> "Pipelines":
        return Pipelines(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def microbatches_in(self, seconds: Floats | float) -> Ints:
        """(n,) microbatches that each completes in so many seconds: fill + (K - 1) bottleneck."""
        room = seconds - self.fill_s
        return np.where(room >= 0, np.floor(room / self.bottleneck_s + 1 + 1e-9), 0).astype(np.int64)

    def sync_s(self, ring: Ring) -> Floats:
        """(n,) how long after a pipeline's end its last gradients are summed."""
        return np.asarray(np.maximum(ring(self.held_bytes, self.rows) - self.early_s, 0.0).max(axis=1))

    def shape(self, i: int) -> Shape:
        depth = int(self.num_stages[i])
        return Shape(tuple(int(r) for r in self.rows[i, :depth]), tuple(int(e) for e in self.ends[i, :depth]))


def make_exact(
    tables: Tables,
    balancer: Balancer,
    columns: Columns,
    index: Ints,
    seconds: float,
    orders: int = 6,
    leanings: Sequence[float] = (0.0,),
    ring: Ring | None = None,
) -> Pipelines:
    """The best pipeline of each of `columns[index]` for a step of about `seconds`, over up to `orders` orders of its
    kinds.

    leanings: each gives every order one more cut, in which a stage may take longer than the bottleneck in proportion
    to a power of
    its speed: with few microbatches the way through counts, and fast stages should hold more. Where stages work ahead, a cut for that is
    one more, or instead of the only one. With several, all are
    kept. ring: as in `Pipelines.sync_s`, where the best order is to count the sync that it leaves.
    """
    if len(index) == 0:
        return _empty(tables, columns)
    chosen = columns.take(index)
    rows, owner = _arrangements(chosen, orders)
    stages = chosen.num_stages[owner]
    ahead, parts = tables.begun_ahead > 1, []
    if len(leanings) > 1 or not ahead:
        parts = [balancer.cut(rows, stages, _weights(tables, rows, leaning)) for leaning in leanings]
    if ahead:
        most = np.maximum(chosen.microbatches_in(np.full(len(chosen), seconds)), 1).astype(float)
        parts.append(balancer.cut(rows, stages, None, most[owner]))
    many = len(parts)
    ends, bottleneck, fill = (
        np.concatenate([getattr(cut, name) for cut in parts]) for name in ("ends", "bottleneck_s", "fill_s")
    )
    rows, owner, stages = np.tile(rows, (many, 1)), np.tile(owner, many), np.tile(stages, many)
    held = np.flatnonzero(np.isfinite(bottleneck))
    rows, owner, stages, ends = rows[held], owner[held], stages[held], ends[held]
    found = Pipelines(
        index[owner], rows, ends, stages, chosen.microbatch[owner], chosen.usage[owner],
        bottleneck[held], fill[held], *sync_sizes(tables, rows, ends, stages),
    )  # fmt: skip
    if many > 1:
        return found
    return found.take(_best_of_owner(owner, found, seconds - (0.0 if ring is None else found.sync_s(ring))))


def _best_of_owner(owner: Ints, found: Pipelines, seconds: Floats | float) -> Ints:
    """The arrangement of each column that does most in `seconds`."""
    room = seconds - found.fill_s
    score = np.where(room > 0, room / found.bottleneck_s + 1, room)
    order = np.lexsort((np.arange(len(owner)), -score, owner))
    first = np.ones(len(order), dtype=bool)
    first[1:] = owner[order][1:] != owner[order][:-1]
    return np.asarray(order[first], dtype=np.int64)


def _weights(tables: Tables, rows: Ints, leaning: float) -> Floats | None:
    if leaning == 0.0:
        return None
    whole = np.where(rows >= 0, tables.time_sums[:, -1][rows], np.inf)
    return np.asarray((whole.min(axis=1)[:, None] / whole) ** leaning, dtype=np.float64)


def _empty(tables: Tables, columns: Columns) -> Pipelines:
    n = np.zeros(0, dtype=np.int64)
    wide = np.zeros((0, 1), dtype=np.int64)
    f, empty = np.zeros(0), np.zeros((0, 1))
    usage = np.zeros((0, len(tables.resources)), dtype=np.int64)
    return Pipelines(n, wide, wide, n, n, usage, f, f, f, f, empty, empty, n, n)


def _arrangements(columns: Columns, orders: int) -> tuple[Ints, Ints]:
    """(m, P) table rows of the stages for each order of each column's kinds, and (m,) the column it belongs to. Equal
    kinds stay together.
    """
    width = columns.rows.shape[1]
    depth = int(columns.num_stages.max())
    kinds = (columns.rows >= 0).sum(axis=1)
    rows, owners = [], []
    for number in range(1, width + 1):
        mine = np.flatnonzero(kinds == number)
        if len(mine) == 0:
            continue
        for order in (
            list(itertools.permutations(range(number)))[:orders] if number <= 3 else _few_orders(number, orders)
        ):
            picked = columns.rows[mine][:, list(order)]
            until = np.cumsum(columns.counts[mine][:, list(order)], axis=1)
            slot = (np.arange(depth)[None, :, None] >= until[:, None, :]).sum(axis=2)
            row = np.take_along_axis(
                np.concatenate([picked, np.full((len(mine), 1), -1)], axis=1), np.minimum(slot, number), axis=1
            )
            rows.append(row)
            owners.append(mine)
    return np.concatenate(rows), np.concatenate(owners)


def _few_orders(number: int, orders: int) -> list[tuple[int, ...]]:
    """Rotations of the order and of its reverse: each kind comes first and last once."""
    forward = [tuple((i + k) % number for i in range(number)) for k in range(number)]
    found = [order for pair in zip(forward, [tuple(reversed(o)) for o in forward]) for order in pair]
    return found[:orders]


def sync_sizes(
    tables: Tables, rows: Ints, ends: Ints, stages: Ints
) -> tuple[Floats, Floats, Floats, Floats, Ints, Ints]:
    """worker_bytes to most_tp of `Pipelines`. rows, ends: (n, P) table row and end layer of each stage."""
    degree = np.array([tables.kinds[row.kind].tp_degree for row in tables.rows])
    valid = np.arange(rows.shape[1])[None, :] < stages[:, None]
    starts = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), ends[:, :-1]], axis=1)
    first, last = np.where(valid, starts, 0), np.where(valid, ends, 0)
    held = tables.held_sync_bytes(rows, first, last)
    back = tables.time_sums - tables.forward_sums
    back_s = back[rows, last] - back[rows, first]
    tp = np.where(valid, degree[rows], 0)
    return (
        held.max(axis=1),
        (held * tp).max(axis=1),
        held,
        np.cumsum(back_s, axis=1) - back_s,
        np.where(valid, tp, 10**6).min(axis=1),
        tp.max(axis=1),
    )
