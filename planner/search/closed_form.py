"""Families of near-equal pipelines: all that there are, and the seconds of each by a closed form.

A family is a number of pipelines, a microbatch size and for each node type one TP degree, or none; its pipelines share the groups of each
type evenly, whether or not these can be divided so.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from planner.search import limits
from planner.search.side_by_side import Sync
from planner.search.tables import Floats, Ints, Tables


@dataclass(frozen=True)
class Families:
    """number: (n,) pipelines. rows: (n, R) table row of each node type, -1 where it is not used. groups: (n, R) of it in the fleet."""

    number: Ints
    rows: Ints
    groups: Ints

    def take(self, index: Ints) -> "Families":
        return Families(self.number[index], self.rows[index], self.groups[index])


def families(tables: Tables, mixed_tp: bool) -> Families:
    """All of them."""
    degrees = np.array([tables.kinds[row.kind].tp_degree for row in tables.rows] + [0])
    counts = np.array([tables.kinds[row.kind].count for row in tables.rows] + [0])
    supply = [resource.num_gpus for resource in tables.resources]
    node = max(resource.node_type.num_gpus for resource in tables.resources)
    found = []
    for size in tables.sizes:
        options = [[-1] for _ in supply]
        for r, row in enumerate(tables.rows):
            if row.microbatch == size and tables.kinds[row.kind].count:
                options[tables.kinds[row.kind].resource].append(r)
        rows = np.array(list(itertools.product(*options)), dtype=np.int64)
        used = np.where(rows >= 0, degrees[rows], 0)
        one_degree = (np.where(used > 0, used, used.max(axis=1, keepdims=True)) == used.max(axis=1, keepdims=True)).all(
            axis=1
        )
        rows = rows[(used.max(axis=1) > 0) & (one_degree | mixed_tp)]
        for number in _numbers(supply, node):
            total = counts[rows].sum(axis=1)
            enough = np.flatnonzero(total >= number) if (number - 1) * size < tables.batch else np.zeros(0, dtype=np.int64)
            # no pipeline deeper than asked: the same share of each node type is left idle
            share = np.minimum(1.0, number * tables.deepest / np.maximum(total[enough], 1))[:, None]
            groups = np.floor(counts[rows[enough]] * share + 1e-9).astype(np.int64)
            some = np.flatnonzero(groups.any(axis=1))
            chosen = np.where(groups > 0, rows[enough], -1)[some]
            found.append(Families(np.full(len(some), number), chosen, groups[some]))
    return Families(*(np.concatenate([getattr(f, name) for f in found]) for name in ("number", "rows", "groups")))


def _numbers(supply: list[int], node: int) -> list[int]:
    """Numbers of pipelines: all small ones, and beyond those that leave no GPU of a type over or fill nodes, if well apart."""
    apart = limits.EVERY_NUMBER
    found = set(range(1, min(sum(supply), apart) + 1))
    for gpus in supply:
        last = 2.0 * gpus
        for share in range(1, gpus // apart + 1):
            number = gpus // share
            if number * (1 + 1 / apart) <= last or share & (share - 1) == 0:
                found |= {number, number - number % node}
                last = number
    return sorted(found - {0})


def roughly_s(tables: Tables, sequences: float, some: Families, sync: Sync) -> Floats:
    """(n,) a step of so many sequences if each stage took as many blocks as the bottleneck and its memory allow, the kinds with the least
    sync first; infinite where all stages hold too few blocks."""
    used, rows, counts = some.rows >= 0, some.rows, some.groups / some.number[:, None]
    blocks, block = tables.num_blocks, np.where(used, _a_block(tables.time_sums, rows), 1e30)
    hop = np.where(used, tables.busiest_hop[rows], 0.0)
    toll = 2 * tables.boundary_share * hop
    # microbatches that a stage not far from the end keeps beside its own
    ahead = np.minimum((counts.sum(axis=1, keepdims=True) / 16).astype(int), tables.deepest - 1)
    most = np.where(used, tables.last_layer_that_fits[rows, ahead, 1] - 1, 0)
    alive = ((counts * most).sum(axis=1) >= blocks) & ((most > 0) | ~used).all(axis=1)
    one = np.where(used, block + toll, 0.0).max(axis=1)  # each stage holds a block
    low = np.maximum(1.0 / np.where(used, counts / block, 0.0).sum(axis=1), one)
    high = np.maximum(low * blocks + toll.max(axis=1), one)
    while (high > (1 + limits.FINE) * low)[alive].any():
        middle = np.sqrt(low * high)
        good = (counts * _blocks(middle, toll, block, most)).sum(axis=1) >= blocks
        low, high = np.where(good, low, middle), np.where(good, middle, high)
    held = _blocks(high, toll, block, most)
    fill = (counts * (np.where(used, held * block, 0.0) + hop)).sum(axis=1)
    size = np.array([row.microbatch for row in tables.rows])[rows.max(axis=1)]
    further = np.maximum(sequences / some.number / size, 1.0) - 1
    share = np.where(used, tables.forward_share[rows], 1.0).min(axis=1)
    hidden = share * np.minimum((tables.begun_ahead - 1) * np.maximum(counts.sum(axis=1) - 1, 0.0) / 2, further)
    after = _least_sync(tables, some, np.maximum(1.0, counts), held, sync)
    return np.where(alive, fill + (further - hidden) * high + after, np.inf)


def _blocks(period: Floats, toll: Floats, block: Floats, most: Ints) -> Floats:
    """(n, R) blocks that a stage of each kind does in the period, and holds."""
    return np.minimum(np.floor(np.maximum(period[:, None] - toll, 0.0) / block + 1e-9), most)


def _least_sync(tables: Tables, some: Families, groups: Floats, held: Floats, sync: Sync) -> Floats:
    """(n,) sync after the pipelines if stages of so many blocks follow each other by what they hold."""
    num_bytes = held * _a_block(tables.sync_sums, some.rows)
    back_s = held * _a_block(tables.time_sums - tables.forward_sums, some.rows)
    order = np.argsort(np.where(some.rows >= 0, num_bytes, np.inf), axis=1, kind="stable")
    groups, num_bytes, back_s = (np.take_along_axis(each, order, 1) for each in (groups, num_bytes, back_s))
    early = np.cumsum(back_s * groups, axis=1) - back_s * groups
    rows = np.take_along_axis(some.rows, order, 1)
    return sync.after_kinds_s(some.number, rows, num_bytes, early, groups, back_s)


def _a_block(sums: Floats, rows: Ints) -> Floats:
    """(n, R) the mean block's of each row, from sums over layers; 0 where no row is used."""
    return np.where(rows >= 0, ((sums[:, -2] - sums[:, 1]) / (sums.shape[1] - 3))[rows], 0.0)
