"""Families of near-equal pipelines, and the seconds of each by a closed form.

A family is a number of pipelines, a microbatch size and for each node type one TP degree, or none.
Its pipelines share the groups of each type evenly, even if the groups cannot be divided that way.
The groups are all groups, or those of one node of each type, which no slow link joins.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from planner.search import limits
from planner.search.side_by_side import Sync
from planner.search.stage_sums import Floats, Ints
from planner.search.tables import Tables


@dataclass(frozen=True)
class Families:
    """Arrays over families (n) and node types (R).

    number: (n,) pipelines. rows: (n, R) table row of each node type, -1 if it is not used. groups:
    (n, R) its groups in the fleet; counts: its groups in a pipeline on average. block_s, hop_s: (n,
    R) seconds of a block, 1e30 if a type is not used, and of a boundary. most: (n, R) blocks that
    memory holds. by_all_s, alone_s: (n,) seconds of a block by all stages together, and by the
    slowest stage with its boundaries.
    """

    number: Ints
    rows: Ints
    groups: Ints
    counts: Floats
    block_s: Floats
    hop_s: Floats
    most: Ints
    by_all_s: Floats
    alone_s: Floats

    def take(self, index: Ints) -> "Families":
        return Families(*(getattr(self, each.name)[index] for each in fields(self)))


def families(tables: Tables, mixed_tp: bool) -> Families:
    """Return the families whose stages hold the model."""
    degrees = np.array([tables.kinds[row.kind].tp_degree for row in tables.rows] + [0])
    counts = np.array([tables.kinds[row.kind].count for row in tables.rows] + [0])
    of_a_node = np.array(
        [
            tables.resources[tables.kinds[row.kind].resource].node_type.num_gpus
            for row in tables.rows
        ]
        + [0]
    )
    of_a_node = np.minimum(counts, of_a_node // np.maximum(degrees, 1))
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
        one_degree = (
            np.where(used > 0, used, used.max(axis=1, keepdims=True))
            == used.max(axis=1, keepdims=True)
        ).all(axis=1)
        rows = rows[(used.max(axis=1) > 0) & (one_degree | mixed_tp)]
        shares = [(of, of[rows].sum(axis=1)) for of in (counts, of_a_node)]
        for number, (of, total) in itertools.product(_numbers(supply, node), shares):
            enough = (
                (total >= number)
                & ((number - 1) * size < tables.batch)
                & ((of is counts) | (total < shares[0][1]))
            )
            # no pipeline deeper than asked: the same share of each node type is left idle
            share = np.minimum(1.0, number * tables.deepest / np.maximum(total[enough], 1))[:, None]
            groups = np.floor(of[rows[enough]] * share + 1e-9).astype(np.int64)
            some = np.flatnonzero(groups.any(axis=1))
            chosen = np.where(groups > 0, rows[enough], -1)[some]
            found.append((np.full(len(some), number), chosen, groups[some]))
    return _alive(tables, *(np.concatenate(each) for each in zip(*found, strict=True)))


def _alive(tables: Tables, number: Ints, rows: Ints, groups: Ints) -> Families:
    """Build the families from arrays, without those whose stages do not hold the model."""
    used = rows >= 0
    counts = groups / number[:, None]
    block = np.where(used, _a_block(tables.sums.time_sums, rows), 1e30)
    hop = np.where(used, tables.busiest_hop[rows], 0.0)
    # microbatches that a stage not far from the end keeps beside its own
    ahead = np.minimum((counts.sum(axis=1, keepdims=True) / 16).astype(int), tables.deepest - 1)
    most = np.where(used, tables.sums.last_layer_that_fits[rows, ahead, 1] - 1, 0)
    by_all = 1.0 / np.where(used, counts / block, 0.0).sum(axis=1)
    alone = np.where(used, block + 2 * tables.boundary_share * hop, 0.0).max(axis=1)
    alive = ((counts * most).sum(axis=1) >= tables.num_blocks) & ((most > 0) | ~used).all(axis=1)
    return Families(number, rows, groups, counts, block, hop, most, by_all, alone).take(
        np.flatnonzero(alive)
    )


def _numbers(supply: list[int], node: int) -> list[int]:
    """Return the numbers of pipelines to try.

    All small numbers; beyond those, numbers that leave no GPU of a type over or fill nodes, if they
    are well apart.
    """
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


def ranked(
    tables: Tables, sequences: float, some: Families, sync: Sync
) -> Iterator[tuple[int, float]]:
    """Yield families with `roughly_s` of each, fastest first.

    A lower bound decides whose seconds have to be computed before the next family is known.
    """
    least = _further(tables, sequences, some) * np.maximum(
        some.by_all_s * tables.num_blocks, some.alone_s
    )
    order = np.argsort(least, kind="stable")
    found = list[tuple[float, int]]()
    for begin in range(0, len(order), limits.CUTS_AT_ONCE):
        mine, later = np.split(order[begin:], [limits.CUTS_AT_ONCE])
        seconds = roughly_s(tables, sequences, some.take(mine), sync)
        found = sorted([*found, *zip(seconds.tolist(), mine.tolist(), strict=True)], reverse=True)
        while found and (not later.size or found[-1][0] < least[later[0]]):
            at_s, family = found.pop()
            yield family, at_s


def roughly_s(tables: Tables, sequences: float, some: Families, sync: Sync) -> Floats:
    """Return (n,) seconds of a step of `sequences` sequences.

    Each stage takes as many blocks as the bottleneck and its memory allow; kinds with the least
    sync come first.
    """
    low = np.maximum(some.by_all_s, some.alone_s)
    high = _longest_s(tables, some)
    blocks = tables.num_blocks
    while (high > (1 + limits.FINE) * low).any():
        middle = np.sqrt(low * high)
        good = (some.counts * _held(tables, some, middle)).sum(axis=1) >= blocks
        low = np.where(good, low, middle)
        high = np.where(good, middle, high)
    held = _held(tables, some, high)
    fill = (some.counts * (np.where(some.rows >= 0, held * some.block_s, 0.0) + some.hop_s)).sum(
        axis=1
    )
    after = _least_sync(tables, some, np.maximum(1.0, some.counts), held, sync)
    return np.asarray(fill + _further(tables, sequences, some) * high + after)


def _further(tables: Tables, sequences: float, some: Families) -> Floats:
    """Return (n,) microbatches after a pipeline's first, less those that the warm-up hides."""
    size = np.array([row.microbatch for row in tables.rows])[some.rows.max(axis=1)]
    further = np.maximum(sequences / some.number / size, 1.0) - 1
    share = np.where(some.rows >= 0, tables.sums.forward_share[some.rows], 1.0).min(axis=1)
    depth = some.counts.sum(axis=1)
    hidden = share * np.minimum((tables.begun_ahead - 1) * np.maximum(depth - 1, 0.0) / 2, further)
    return np.asarray(further - hidden)


def _longest_s(tables: Tables, some: Families) -> Floats:
    """Return (n,) an upper bound of the bottleneck's seconds."""
    toll = 2 * tables.boundary_share * some.hop_s.max(axis=1)
    return np.asarray(np.maximum(some.by_all_s, some.alone_s) * tables.num_blocks + toll)


def _held(tables: Tables, some: Families, period: Floats) -> Floats:
    """Return (n, R) blocks that a stage of each kind does in the period, and holds."""
    work = np.maximum(period[:, None] - 2 * tables.boundary_share * some.hop_s, 0.0)
    return np.minimum(np.floor(work / some.block_s + 1e-9), some.most)


def _least_sync(tables: Tables, some: Families, groups: Floats, held: Floats, sync: Sync) -> Floats:
    """Return (n,) seconds of sync after the pipelines.

    Stages hold `held` blocks each and follow each other by the gradient bytes that they hold, least
    first.
    """
    num_bytes = held * _a_block(tables.sums.sync_sums, some.rows)
    back_s = held * _a_block(tables.sums.time_sums - tables.sums.forward_sums, some.rows)
    order = np.argsort(np.where(some.rows >= 0, num_bytes, np.inf), axis=1, kind="stable")
    groups, num_bytes, back_s = (
        np.take_along_axis(each, order, 1) for each in (groups, num_bytes, back_s)
    )
    early = np.cumsum(back_s * groups, axis=1) - back_s * groups
    rows = np.take_along_axis(some.rows, order, 1)
    return sync.after_kinds_s(some.number, rows, num_bytes, early, groups, back_s)


def _a_block(sums: Floats, rows: Ints) -> Floats:
    """Return (n, R) the value of each row's mean block, from sums over layers; 0 if unused."""
    return np.where(rows >= 0, ((sums[:, -2] - sums[:, 1]) / (sums.shape[1] - 3))[rows], 0.0)
