"""Plans of equal pipelines, each over its share of every node type, the same stage of all of them side by side on its nodes.

Gradients are then summed inside nodes, or cross a NIC once for all of a node's holders, while activations cross one at every
stage. Searches that place pipeline by pipeline do not see these plans; Metis's stage groups are of this kind (Um et al., ATC'24).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.plan import Plan
from planner.search.cost_tables import FEW_GPUS
from planner.search.cut import Balancer, padded
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches
from planner.search.place import place_by_stage
from planner.search.problem import Request
from planner.search.tables import Floats, Ints, Tables
from planner.strategies.exact import sync_sizes
from planner.strategies.refine import FAR_BEHIND, draft_fits, refine_shape
from planner.strategies.regroup import regrouped
from planner.strategies.rivals import MOST_GPUS
from planner.strategies.side_by_side import SideBySide, beside

_ORDERS = 24
_MIXES = (60, 240)  # of large and of small fleets
_KEPT = (4, 32)
_PREDICTED_GPUS = 1000
_SIMULATED = 4
_BISECTIONS = 12
_ALL = 16
_PARTS = (1, 2, 3, 4, 6, 8)
_ROUGHLY = 1.1
_PARTED_GPUS = 512  # beyond, parts of one size
_PART_GPUS = 256
_REGROUPED = (3, 8)


def alike_plans(request: Request, tables: Tables, known_s: float = np.inf, *, hasty: bool = False) -> list[Plan]:
    """The fastest few by the tables, with the sync that lying side by side leaves, undivided and in as many parts as each layer has to
    lie on nodes; and, unless hasty, some in other numbers of parts and with other groups. known_s: a step time known before, of layers on
    any nodes; on more than a few GPUs nothing far behind is looked at closely."""
    wanted, gpus = request.min_node_disjoint_holders, len(request.fleet.workers)
    keep = min(max(_KEPT[0], _PREDICTED_GPUS // gpus), _KEPT[1])
    search = _Search(request, tables, keep, known_s, prunes=gpus > FEW_GPUS and wanted == 1, regroups=not hasty)
    most = max(2, *(len(resource.node_names) for resource in tables.resources))
    several = () if hasty else _PARTS if gpus <= _PARTED_GPUS else (-(-gpus // _PART_GPUS),)
    others = [parts for parts in several if 1 < parts <= most and parts != wanted]
    share = 4 if gpus <= MOST_GPUS else 8
    plans = [search.plans(parts) for parts in dict.fromkeys((wanted, 1))] + [search.plans(p, share) for p in others]
    return list(itertools.chain.from_iterable(plans))


class _Search:
    """All equal pipelines of one request. keep: plans of one number of parts; known_s: as `alike_plans`; prunes: whether what is far behind
    that or the best so far is left out; regroups: whether other groups are tried."""

    def __init__(self, request: Request, tables: Tables, keep: int, known_s: float, prunes: bool, regroups: bool):
        self.request, self.tables, self.keep, self.prunes = request, tables, keep, prunes
        self._most_s = FAR_BEHIND * known_s if prunes else np.inf
        self.small = len(request.fleet.workers) <= MOST_GPUS
        self.most_mixes, self.most_regrouped = _MIXES[self.small], regroups * _REGROUPED[self.small]
        self.batch, self.depth = request.global_batch_sequences, request.deepest(tables.num_blocks)
        self.groups = int(tables.groups_a_node.max())
        self.mixes = _mixes(request, tables)
        self._timings: dict[int, Estimator] = {}
        tables.fitting(self.depth)  # once for all

    def plans(self, parts: int, share: int = 1) -> Iterator[Plan]:
        """Of pipelines divided into so many parts, those of each part side by side. With a share of more than 1 one plan in so many is
        looked at, of those whose nodes fewer pipelines share than without parts."""
        request, sync = self.request, SideBySide(self.request, self.tables, parts)
        possible = self.mixes.number >= parts
        if parts > 1 and share > 1:
            possible &= sync.side(self.mixes.number) < self.groups
        best = self._simulated(self.mixes.take(np.flatnonzero(possible)), sync, share)
        if best and self.prunes:
            self._most_s = min(self._most_s, FAR_BEHIND * best[0][0])
        for i, (seconds, draft, timing) in enumerate(best):
            if seconds > self._most_s:
                return
            shape, count = draft.pipelines[0]
            number = len(draft.pipelines)
            after_s = partial(sync.after_one_s, timing, number)
            better = _draft(timing, refine_shape(timing, shape, count, after_s), number, self.batch) or draft
            more = request.mixed_tp and i < self.most_regrouped
            others = regrouped(timing, better, self.batch, self.depth, after_s, not self.small) if more else None
            for each in (better, *([] if others is None else [others])):
                plan = place_by_stage(self.tables, each, parts, request.spec.name, self.batch, request.sequence_length)
                if plan is not None:
                    yield plan

    def _simulated(self, mixes: "_Mixes", sync: SideBySide, share: int) -> list[tuple[float, Draft, Estimator]]:
        """(seconds with sync, draft, what timed it) of the most promising, fastest first."""
        request, keep = self.request, max(1, self.keep // share)
        shared = np.minimum(sync.side(mixes.number), self.groups)
        timings = {n: self._timing(n) for n in np.unique(shared).tolist()}
        seconds = np.full(len(shared), np.inf)
        for n, timing in timings.items():
            mine = np.flatnonzero(shared == n)
            seconds[mine] = _roughly_s(timing.tables, request, mixes.take(mine), sync)
        quickest = np.argsort(seconds, kind="stable")[: self.most_mixes // share]
        quickest = quickest[np.isfinite(seconds[quickest]) & (seconds[quickest] <= _ROUGHLY * self._most_s)]
        timed = [
            (*shape, timing)
            for n, timing in timings.items()
            for shape in _timed(timing, request, mixes.take(quickest[shared[quickest] == n]), sync)
        ]
        found = {}
        for _, number, shape, after, timing in sorted(timed, key=lambda entry: entry[:2])[: _SIMULATED * keep]:
            draft = _draft(timing, shape, number, self.batch)
            if draft is not None:
                found[draft] = timing.pipeline_s(*draft.pipelines[0]) + after, draft, timing
        return sorted(found.values(), key=lambda entry: entry[0])[:keep]

    def _timing(self, side: int) -> Estimator:
        """What times pipelines of which so many share each node."""
        if side not in self._timings:
            self._timings[side] = Estimator(beside(self.request, self.tables, side))
        return self._timings[side]


@dataclass(frozen=True)
class _Mixes:
    """One entry a family of equal pipelines. number: (n,) of them; rows: (n, R) table row of each node type used, -1 where unused;
    counts: (n, R) groups of it in a pipeline."""

    number: Ints
    rows: Ints
    counts: Ints

    def take(self, index: Ints) -> "_Mixes":
        return _Mixes(self.number[index], self.rows[index], self.counts[index])

    def arrangements(self, i: int) -> Iterator[tuple[int, ...]]:
        """Rows of the stages: node types one after the other, and the first one's last stage at the end, where the head is."""
        used = np.flatnonzero(self.rows[i] >= 0)
        rows, counts = self.rows[i, used].tolist(), self.counts[i, used].tolist()
        for order in itertools.islice(itertools.permutations(range(len(rows))), _ORDERS):
            arranged = tuple(rows[j] for j in order for _ in range(counts[j]))
            yield arranged
            if len(order) > 1 and counts[order[0]] > 1:
                yield (*arranged[1:], arranged[0])


def _mixes(request: Request, tables: Tables) -> _Mixes:
    """Ways to use the whole share of some node types at one microbatch size, each at one TP degree."""
    supply = np.array([resource.num_gpus for resource in tables.resources], dtype=np.int64)
    depth, found = request.deepest(tables.num_blocks), list[tuple[int, list[int], list[int]]]()
    degrees = np.array([tables.kinds[row.kind].tp_degree for row in tables.rows])
    node = max(resource.node_type.num_gpus for resource in tables.resources)
    for number in _numbers(supply, node, request.min_node_disjoint_holders):
        for rows in _rows(tables, supply // number, request.mixed_tp):
            counts = [int(supply[r]) // number // int(degrees[row]) if row >= 0 else 0 for r, row in enumerate(rows)]
            if 0 < sum(counts) <= depth:
                found.append((number, list(rows), counts))
    width = len(supply)
    return _Mixes(
        np.array([number for number, _, _ in found], dtype=np.int64),
        np.array([rows for _, rows, _ in found], dtype=np.int64).reshape(-1, width),
        np.array([counts for _, _, counts in found], dtype=np.int64).reshape(-1, width),
    )


def _numbers(supply: Ints, node: int, least: int) -> list[int]:
    """Numbers of pipelines: all up to 16, and beyond those that leave no GPU of a type over or fill nodes, if well apart."""
    most = int(supply.max())
    found = set(range(2, min(most, _ALL) + 1))
    for gpus in supply.tolist():
        last = 2 * gpus
        for share in range(1, gpus // _ALL + 1):
            number = gpus // share
            if number * 9 <= last * 8 or share & (share - 1) == 0:
                found |= {number, number - number % node}
                last = number
    return sorted(number for number in found if number >= least)


def _rows(tables: Tables, share: Ints, mixed_tp: bool) -> Iterator[tuple[int, ...]]:
    """For each node type a row of one microbatch size, or -1; its groups fit into the share."""
    degree = [tables.kinds[row.kind].tp_degree for row in tables.rows]
    for size in sorted({row.microbatch for row in tables.rows}):
        options = [[-1] for _ in share]
        for r, row in enumerate(tables.rows):
            resource = tables.kinds[row.kind].resource
            if row.microbatch == size and share[resource] >= degree[r]:
                options[resource].append(r)
        for picked in itertools.product(*options):
            if mixed_tp or len({degree[r] for r in picked if r >= 0}) == 1:
                yield picked


def _roughly_s(tables: Tables, request: Request, mixes: _Mixes, sync: SideBySide) -> Floats:
    """(n,) a step if each stage took as many blocks as the bottleneck and its memory allow, the kinds with the least sync first;
    infinite where all stages hold too few blocks."""
    used, rows, counts = mixes.rows >= 0, mixes.rows, mixes.counts
    blocks, block = tables.num_blocks, np.where(used, _a_block(tables.time_sums, rows), 1e30)
    hop = np.where(used, tables.busiest_hop[rows], 0.0)
    toll = 2 * tables.boundary_share * hop
    ahead = (
        counts.sum(axis=1, keepdims=True) // 4
    )  # microbatches that a stage not far from the end keeps beside its own
    most = np.where(used, tables.fitting(request.deepest(tables.num_blocks))[rows, ahead, 1] - 1, 0)
    alive = ((counts * most).sum(axis=1) >= blocks) & ((most > 0) | ~used).all(axis=1)
    one = np.where(used, block + toll, 0.0).max(axis=1)  # each stage holds a block
    low = np.maximum(1.0 / np.where(used, counts / block, 0.0).sum(axis=1), one)
    high = np.maximum(low * blocks + toll.max(axis=1), one)
    for _ in range(_BISECTIONS):
        middle = np.sqrt(low * high)
        good = (counts * _blocks(middle, toll, block, most)).sum(axis=1) >= blocks
        low, high = np.where(good, low, middle), np.where(good, middle, high)
    held = _blocks(high, toll, block, most)
    fill = (counts * (np.where(used, held * block, 0.0) + hop)).sum(axis=1)
    size = np.array([row.microbatch for row in tables.rows])[rows.max(axis=1)]
    each = request.global_batch_sequences / mixes.number / size
    further = np.maximum(each, 1.0) - 1
    alone = fill + further * high - _worked_ahead_s(tables, mixes, further) * high
    return np.where(alive, alone + _least_sync(tables, mixes, held, sync), np.inf)


def _worked_ahead_s(tables: Tables, mixes: _Mixes, further: Floats) -> Floats:
    """(n,) periods that stages in the middle work ahead where they would wait for their first backward; 1F1B's do not."""
    share = np.where(mixes.rows >= 0, tables.forward_share[mixes.rows], 1.0).min(axis=1)
    ahead = (tables.begun_ahead - 1) * (mixes.counts.sum(axis=1) - 1) / 2
    return np.asarray(share * np.minimum(ahead, further))


def _blocks(period: Floats, toll: Floats, block: Floats, most: Ints) -> Floats:
    """(n, R) blocks that a stage of each kind does in the period, and holds."""
    return np.minimum(np.floor(np.maximum(period[:, None] - toll, 0.0) / block + 1e-9), most)


def _least_sync(tables: Tables, mixes: _Mixes, held: Floats, sync: SideBySide) -> Floats:
    """(n,) sync after the pipelines if stages of so many blocks follow each other by what they hold."""
    num_bytes = held * _a_block(tables.sync_sums, mixes.rows)
    back_s = held * _a_block(tables.time_sums - tables.forward_sums, mixes.rows)
    order = np.argsort(np.where(mixes.rows >= 0, num_bytes, np.inf), axis=1, kind="stable")
    rows, counts = (np.take_along_axis(each, order, 1) for each in (mixes.rows, mixes.counts))
    num_bytes, back_s = (np.take_along_axis(each, order, 1) for each in (num_bytes, back_s))
    early = np.cumsum(back_s * counts, axis=1) - back_s * counts
    return sync.after_kinds_s(mixes.number, rows, num_bytes, early, counts, back_s)


def _a_block(sums: Floats, rows: Ints) -> Floats:
    """(n, R) the mean block's of each row, from sums over layers; 0 where no row is used."""
    return np.where(rows >= 0, ((sums[:, -2] - sums[:, 1]) / (sums.shape[1] - 3))[rows], 0.0)


def _timed(
    timing: Estimator, request: Request, mixes: _Mixes, sync: SideBySide
) -> Iterator[tuple[float, int, Shape, float]]:
    """(seconds by the closed form, number of pipelines, shape, sync after them) of each mix that holds the model, in its best order
    with equal ends and in its best with others."""
    entries = [(m, rows) for m in range(len(mixes.number)) for rows in mixes.arrangements(m)]
    if not entries:
        return
    tables, batch = timing.tables, request.global_batch_sequences
    balancer, pipelines = Balancer(tables, request.deepest(tables.num_blocks)), [rows for _, rows in entries]
    sizes = np.array([tables.rows[rows[0]].microbatch for rows in pipelines])
    each = np.maximum(batch / mixes.number[[m for m, _ in entries]] / sizes, 1.0)
    ways = (each, None) if tables.begun_ahead > 1 else (None,)
    for cuts in (balancer.cut_each(pipelines, way) for way in ways):
        held = np.flatnonzero(np.isfinite(cuts.bottleneck_s))
        rows = padded([entries[i][1] for i in held], cuts.ends.shape[1])
        owner = np.array([entries[i][0] for i in held], dtype=np.int64)
        ends, number = cuts.ends[held], mixes.number[owner]
        _, _, num_bytes, early, _, _ = sync_sizes(tables, rows, ends, (rows >= 0).sum(axis=1))
        after = sync.after_s(number, rows, num_bytes, early)
        order = np.argsort(cuts.fill_s[held] + (each[held] - 1) * cuts.bottleneck_s[held] + after, kind="stable")
        last = rows[np.arange(len(rows)), (rows >= 0).sum(axis=1) - 1]
        around = rows[:, 0] == last  # a tied embedding is then summed inside nodes, which the tables do not know
        _, first = np.unique(2 * owner[order] + around[order], return_index=True)
        for j in order[first].tolist():
            shape = Shape(tuple(entries[held[j]][1]), tuple(ends[j, rows[j] >= 0].tolist()))
            quick = timing.quick_s(shape, max(1, int(each[held[j]])))
            yield quick + float(after[j]), int(number[j]), shape, float(after[j])


def _draft(estimator: Estimator, shape: Shape, number: int, batch: int) -> Draft | None:
    draft = assign_microbatches(estimator, [shape] * number, batch)
    return draft if draft is not None and draft_fits(estimator, draft) else None
