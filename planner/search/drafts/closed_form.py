"""Families of near-equal pipelines, and the seconds of each by a closed form.

A family is a number of pipelines, a microbatch size and for each node type one TP degree, or none.
Its pipelines share the groups of each type evenly, even if the groups cannot be divided that way.
The groups are all groups, or those of one node of each type, which no slow link joins.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.search.drafts.side_by_side import Sync
from planner.search.problem import limits
from planner.search.problem.tables import Tables


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

    @property
    def used(self) -> Bools:
        """Node types that a family uses, (n, R)."""
        return self.rows >= 0


def families(tables: Tables) -> Families:
    """Return the families whose stages hold the model."""
    counts, of_a_node = _groups_by_row(tables)
    gpus_by_type = [resource.num_gpus for resource in tables.resources]
    node_gpus = max(resource.node_type.num_gpus for resource in tables.resources)
    numbers = _numbers(gpus_by_type, node_gpus)

    found = []
    for size in tables.sizes:
        rows = _rows_of_each_type(tables, size)
        rows = rows[rows.max(axis=1) >= 0]
        total_of_all = counts[rows].sum(axis=1)
        total_of_nodes = of_a_node[rows].sum(axis=1)
        supplies = ((counts, total_of_all), (of_a_node, total_of_nodes))

        for number, (supply, total) in itertools.product(numbers, supplies):
            enough = (total >= number) & ((number - 1) * size < tables.batch)
            if supply is of_a_node:
                # where one node of each type has all groups, this family is the same
                enough &= total < total_of_all

            # no pipeline deeper than asked: the same share of each node type is left idle
            some_rows = rows[enough]
            most_groups = number * tables.deepest
            share = np.minimum(1.0, most_groups / np.maximum(total[enough], 1))[:, None]
            groups = np.floor(supply[some_rows] * share + 1e-9).astype(np.int64)

            some = np.flatnonzero(groups.any(axis=1))
            groups = groups[some]
            chosen = np.where(groups > 0, some_rows[some], -1)
            found.append((np.full(len(some), number), chosen, groups))

    each_number, each_rows, each_groups = zip(*found, strict=True)
    return _alive(
        tables,
        np.concatenate(each_number),
        np.concatenate(each_rows),
        np.concatenate(each_groups),
    )


def _groups_by_row(tables: Tables) -> tuple[Ints, Ints]:
    """Return each row's groups in the fleet, and those on one node.

    Shapes (rows + 1,): the last entry, which -1 names, stands for a node type that is not used.
    """
    counts = []
    node_gpus = []
    for row in range(len(tables.rows)):
        counts.append(tables.kind(row).count)
        node_gpus.append(tables.resource_of(row).node_type.num_gpus)

    degree_of = np.array([*tables.tp_degree_by_row, 0])
    count_of = np.array([*counts, 0])
    gpus_of = np.array([*node_gpus, 0])
    of_a_node = np.minimum(count_of, gpus_of // np.maximum(degree_of, 1))
    return count_of, of_a_node


def _rows_of_each_type(tables: Tables, size: int) -> Ints:
    """Return (n, R) every choice of a row, or none (-1), for each node type."""
    options = [[-1] for _ in tables.resources]
    for r, row in enumerate(tables.rows):
        kind = tables.kind(r)
        if row.microbatch == size and kind.count:
            options[kind.resource].append(r)
    return np.array(list(itertools.product(*options)), dtype=np.int64)


def _alive(tables: Tables, number: Ints, rows: Ints, groups: Ints) -> Families:
    """Build the families from arrays, without those whose stages do not hold the model."""
    used = rows >= 0
    counts = groups / number[:, None]
    block = np.where(used, _a_block(tables.sums.time_sums, rows), 1e30)
    hop = np.where(used, tables.busiest_hop[rows], 0.0)

    # microbatches that a stage not far from the end keeps beside its own
    depth = counts.sum(axis=1, keepdims=True)
    ahead = np.minimum((depth / 16).astype(int), tables.deepest - 1)

    # layer 0 is the embedding, so a stage of blocks alone starts at layer 1
    last_layer = tables.sums.last_layer_that_fits[rows, ahead, 1]
    most = np.where(used, last_layer - 1, 0)

    by_all = 1.0 / np.where(used, counts / block, 0.0).sum(axis=1)
    with_boundaries = block + 2 * tables.boundary_share * hop
    alone = np.where(used, with_boundaries, 0.0).max(axis=1)

    holds_model = (counts * most).sum(axis=1) >= tables.num_blocks
    holds_a_block = ((most > 0) | ~used).all(axis=1)
    built = Families(number, rows, groups, counts, block, hop, most, by_all, alone)
    return built.take(np.flatnonzero(holds_model & holds_a_block))


def _numbers(supply: list[int], node: int) -> list[int]:
    """Return the numbers of pipelines to try.

    All small numbers; beyond those, numbers that leave no GPU of a type over or fill nodes, if they
    are well apart.
    """
    apart = limits.EVERY_NUMBER
    most_small = min(sum(supply), apart)
    found = set(range(1, most_small + 1))

    for gpus in supply:
        last = 2.0 * gpus
        for share in range(1, gpus // apart + 1):
            number = gpus // share
            is_apart = number * (1 + 1 / apart) <= last
            is_power_of_two = share & (share - 1) == 0
            if is_apart or is_power_of_two:
                found.add(number)
                found.add(number - number % node)
                last = number

    # fewer pipelines than a node has GPUs round down to none
    found.discard(0)
    return sorted(found)


def rank_families(
    tables: Tables, sequences: float, some: Families, sync: Sync
) -> Iterator[tuple[int, float]]:
    """Yield families with `roughly_s` of each, fastest first.

    A lower bound decides whose seconds have to be computed before the next family is known.
    """
    bottleneck_s = np.maximum(some.by_all_s * tables.num_blocks, some.alone_s)
    least_s = _further(tables, sequences, some) * bottleneck_s
    order = np.argsort(least_s, kind="stable")

    found = list[tuple[float, int]]()
    for begin in range(0, len(order), limits.CUTS_AT_ONCE):
        mine, later = np.split(order[begin:], [limits.CUTS_AT_ONCE])
        seconds = roughly_s(tables, sequences, some.take(mine), sync)
        found += zip(seconds.tolist(), mine.tolist(), strict=True)
        found.sort(reverse=True)

        # those that no later family can be faster than
        is_last = not later.size
        while found and (is_last or found[-1][0] < least_s[later[0]]):
            at_s, family = found.pop()
            yield family, at_s


def roughly_s(tables: Tables, sequences: float, some: Families, sync: Sync) -> Floats:
    """Return (n,) seconds of a step of `sequences` sequences.

    Each stage takes as many blocks as the bottleneck and its memory allow; kinds with the least
    sync come first.
    """
    bottleneck_s = _least_bottleneck(tables, some)
    held = _held(tables, some, bottleneck_s)

    work_s = np.where(some.used, held * some.block_s, 0.0)
    fill_s = (some.counts * (work_s + some.hop_s)).sum(axis=1)
    further_s = _further(tables, sequences, some) * bottleneck_s

    # a type on average less than once in a pipeline still has a whole stage to sum
    groups = np.maximum(1.0, some.counts)
    sync_s = _least_sync(tables, some, groups, held, sync)
    return np.asarray(fill_s + further_s + sync_s)


def _least_bottleneck(tables: Tables, some: Families) -> Floats:
    """Return (n,) the least seconds in which the stages do all blocks, by bisection."""
    low = np.maximum(some.by_all_s, some.alone_s)
    high = _longest_s(tables, some)
    while (high > (1 + limits.FINE) * low).any():
        middle = np.sqrt(low * high)
        blocks = (some.counts * _held(tables, some, middle)).sum(axis=1)
        good = blocks >= tables.num_blocks
        low = np.where(good, low, middle)
        high = np.where(good, middle, high)
    return high


def _further(tables: Tables, sequences: float, some: Families) -> Floats:
    """Return (n,) microbatches after a pipeline's first, less those that the warm-up hides."""
    any_row = some.rows.max(axis=1)  # all rows of a family have one microbatch size
    size_of_row = np.array(tables.sums.microbatch_by_row)
    size = size_of_row[any_row]
    microbatches = np.maximum(sequences / some.number / size, 1.0)
    further = microbatches - 1

    # half: the mean over the stages, of which the first begins most ahead and the last none
    stages_after = np.maximum(some.counts.sum(axis=1) - 1, 0.0)
    ahead = (tables.begun_ahead - 1) * stages_after / 2
    forward_share = np.where(some.used, tables.sums.forward_share[some.rows], 1.0).min(axis=1)
    hidden = forward_share * np.minimum(ahead, further)
    return np.asarray(further - hidden)


def _longest_s(tables: Tables, some: Families) -> Floats:
    """Return (n,) an upper bound of the bottleneck's seconds."""
    toll = 2 * tables.boundary_share * some.hop_s.max(axis=1)
    a_block = np.maximum(some.by_all_s, some.alone_s)
    return np.asarray(a_block * tables.num_blocks + toll)


def _held(tables: Tables, some: Families, period: Floats) -> Floats:
    """Return (n, R) blocks that a stage of each kind does in the period, and holds."""
    toll = 2 * tables.boundary_share * some.hop_s
    work = np.maximum(period[:, None] - toll, 0.0)
    by_time = np.floor(work / some.block_s + 1e-9)
    return np.minimum(by_time, some.most)


def _least_sync(tables: Tables, some: Families, groups: Floats, held: Floats, sync: Sync) -> Floats:
    """Return (n,) seconds of sync after the pipelines.

    Stages hold `held` blocks each and follow each other by the gradient bytes that they hold, least
    first.
    """
    num_bytes = held * _a_block(tables.sums.sync_sums, some.rows)
    backward_sums = tables.sums.time_sums - tables.sums.forward_sums
    back_s = held * _a_block(backward_sums, some.rows)

    bytes_or_last = np.where(some.used, num_bytes, np.inf)
    order = np.argsort(bytes_or_last, axis=1, kind="stable")
    rows = np.take_along_axis(some.rows, order, 1)
    groups = np.take_along_axis(groups, order, 1)
    num_bytes = np.take_along_axis(num_bytes, order, 1)
    back_s = np.take_along_axis(back_s, order, 1)

    # later stages end their backwards earlier, by the backwards of the stages before them
    all_back_s = back_s * groups
    early = np.cumsum(all_back_s, axis=1) - all_back_s
    return sync.after_kinds_s(some.number, rows, num_bytes, early, groups, back_s)


def _a_block(sums: Floats, rows: Ints) -> Floats:
    """Return (n, R) the value of each row's mean block, from sums over layers; 0 if unused."""
    # without the embedding, which is the first layer, and the head, which is the last
    blocks = sums[:, -2] - sums[:, 1]
    num_blocks = sums.shape[1] - 3
    mean_block = blocks / num_blocks
    return np.where(rows >= 0, mean_block[rows], 0.0)
