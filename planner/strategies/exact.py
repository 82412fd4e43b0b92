"""Columns made exact: the best order of the stages and the best cut of the layers, for many columns at once."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.strategies.balance import Balancer
from planner.strategies.columns import Columns
from planner.strategies.drafts import Shape
from planner.strategies.tables import Floats, Ints, Tables


@dataclass(frozen=True)
class Pipelines:
    """One entry a column that can hold the model. index: which column it came from; sync sizes in bytes as in
    `SyncShape`.
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
) -> Pipelines:
    """The best pipeline of each of `columns[index]` for a step of about `seconds`, over up to `orders` orders of its
    kinds.

    leanings: each gives every order one more cut, in which a stage may take longer than the bottleneck in proportion
    to a power of
    its speed: with few microbatches the way through counts, and fast stages should hold more. With several, all are
    kept.
    """
    if len(index) == 0:
        return _empty(tables, columns)
    chosen = columns.take(index)
    rows, owner = _arrangements(chosen, orders)
    stages = chosen.num_stages[owner]
    parts = [balancer.cut(rows, stages, _weights(tables, rows, leaning)) for leaning in leanings]
    many = len(parts)
    ends, bottleneck, fill = (
        np.concatenate([getattr(cut, name) for cut in parts]) for name in ("ends", "bottleneck_s", "fill_s")
    )
    rows, owner, stages = np.tile(rows, (many, 1)), np.tile(owner, many), np.tile(stages, many)
    if many == 1:
        best = _best_of_owner(owner, bottleneck, fill, seconds)
    else:
        best = np.flatnonzero(np.isfinite(bottleneck))
    worker, whole, least, most = _sync_sizes(tables, rows[best], ends[best], stages[best])
    own = owner[best]
    return Pipelines(
        index[own], rows[best], ends[best], stages[best], chosen.microbatch[own], chosen.usage[own],
        bottleneck[best], fill[best], worker, whole, least, most,
    )  # fmt: skip


def _best_of_owner(owner: Ints, bottleneck: Floats, fill: Floats, seconds: float) -> Ints:
    """The arrangement of each column that does most in `seconds`; columns that cannot hold the model are left out."""
    finite = np.isfinite(bottleneck)
    room = np.where(finite, seconds - np.where(finite, fill, 0.0), -1.0)
    score = np.where(finite, np.where(room > 0, room / np.where(finite, bottleneck, 1.0) + 1, room), -np.inf)
    order = np.lexsort((np.arange(len(owner)), -score, owner))
    first = np.ones(len(order), dtype=bool)
    first[1:] = owner[order][1:] != owner[order][:-1]
    best = order[first]
    return np.asarray(best[finite[best]], dtype=np.int64)


def _weights(tables: Tables, rows: Ints, leaning: float) -> Floats | None:
    if leaning == 0.0:
        return None
    whole = np.where(rows >= 0, tables.time_sums[:, -1][rows], np.inf)
    return np.asarray((whole.min(axis=1)[:, None] / whole) ** leaning, dtype=np.float64)


def _empty(tables: Tables, columns: Columns) -> Pipelines:
    n = np.zeros(0, dtype=np.int64)
    wide = np.zeros((0, 1), dtype=np.int64)
    f = np.zeros(0)
    return Pipelines(n, wide, wide, n, n, np.zeros((0, len(tables.resources)), dtype=np.int64), f, f, f, f, n, n)


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


def _sync_sizes(tables: Tables, rows: Ints, ends: Ints, stages: Ints) -> tuple[Floats, Floats, Ints, Ints]:
    degree = np.array([tables.kinds[row.kind].tp_degree for row in tables.rows])
    valid = np.arange(rows.shape[1])[None, :] < stages[:, None]
    starts = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), ends[:, :-1]], axis=1)
    size = np.where(
        valid,
        tables.sync_sums[rows, np.where(valid, ends, 0)] - tables.sync_sums[rows, np.where(valid, starts, 0)],
        0.0,
    )
    tp = np.where(valid, degree[rows], 10**6)
    return (
        size.max(axis=1),
        np.where(valid, size * degree[rows], 0.0).max(axis=1),
        tp.min(axis=1),
        np.where(valid, degree[rows], 0).max(axis=1),
    )
