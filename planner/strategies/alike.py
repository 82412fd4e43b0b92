"""Plans of equal pipelines, each over its share of every node type, the same stage of all of them side by side on its nodes.

Gradients are then summed inside nodes, or cross a NIC once for all of a node's holders, while activations cross one at every
stage. Searches that place pipeline by pipeline do not see these plans; Metis's stage groups are of this kind (Um et al., ATC'24).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.plan import Plan
from planner.strategies.balance import Balancer, padded
from planner.strategies.cost_tables import ring_rate
from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.exact import sync_sizes
from planner.strategies.placement import place_by_stage
from planner.strategies.refine import draft_fits, refine_shape
from planner.strategies.regroup import regrouped
from planner.strategies.request import Request
from planner.strategies.tables import Floats, Ints, Tables

_ORDERS = 24
_MIXES = 120
_KEPT = (4, 48)
_PREDICTED_GPUS = 500
_SIMULATED = 4
_BISECTIONS = 12
_ALL = 16
_REGROUPED = 4


def alike_plans(request: Request, tables: Tables) -> list[Plan]:
    """The fastest few by the tables, with the sync that lying side by side leaves."""
    batch, depth, gpus = request.global_batch_sequences, request.deepest(tables.num_blocks), len(request.fleet.workers)
    keep = min(max(_KEPT[0], _PREDICTED_GPUS // gpus), _KEPT[1])
    plans: list[Plan | None] = []
    sync = _SideBySide(request, tables)
    for _, draft, timing in _simulated(request, tables, sync, _SIMULATED * keep)[:keep]:
        shape, count = draft.pipelines[0]
        after_s = partial(sync.after_one_s, timing, len(draft.pipelines))
        better = _draft(timing, refine_shape(timing, shape, count, after_s), len(draft.pipelines), batch) or draft
        more = request.mixed_tp and len(plans) < _REGROUPED
        others = regrouped(timing, better, batch, depth, after_s) if more else None
        for each in (better, *([] if others is None else [others])):
            plans.append(place_by_stage(tables, each, request.spec.name, batch, request.sequence_length))
    return [plan for plan in plans if plan is not None]


def _simulated(
    request: Request, tables: Tables, sync: "_SideBySide", most: int
) -> list[tuple[float, Draft, Estimator]]:
    """(seconds with sync, draft, what timed it) of the most promising, fastest first."""
    mixes = _mixes(request, tables)
    shared = np.minimum(mixes.number, int(tables.groups_a_node.max()))
    tables.fitting(request.deepest(tables.num_blocks))  # once for all
    timings = {int(n): Estimator(beside(request, tables, int(n))) for n in np.unique(shared)}
    seconds = np.full(len(shared), np.inf)
    for n, timing in timings.items():
        mine = np.flatnonzero(shared == n)
        seconds[mine] = _roughly_s(timing.tables, request, mixes.take(mine), sync)
    quickest = np.argsort(seconds, kind="stable")[:_MIXES]
    quickest = quickest[np.isfinite(seconds[quickest])]
    timed = [
        (*shape, timing)
        for n, timing in timings.items()
        for shape in _timed(timing, request, mixes.take(quickest[shared[quickest] == n]), sync)
    ]
    found = {}
    for _, number, shape, after, timing in sorted(timed, key=lambda entry: entry[:2])[:most]:
        draft = _draft(timing, shape, number, request.global_batch_sequences)
        if draft is not None:
            found[draft] = timing.pipeline_s(*draft.pipelines[0]) + after, draft, timing
    return sorted(found.values(), key=lambda entry: entry[0])


def beside(request: Request, tables: Tables, number: int) -> Tables:
    """With so many pipelines side by side on each node: what leaves one leaves it for all of them at once."""
    kinds = [tables.kinds[row.kind] for row in tables.rows]
    nodes = [tables.resources[kind.resource].node_type for kind in kinds]

    def crossing(one: int, other: int) -> float:
        flows = min(number, int(tables.groups_a_node[one])) * float(kinds[other].tp_degree)
        return 2 * request.cost.boundary_s(nodes[one], nodes[other], tables.rows[one].microbatch, flows=flows)

    def seconds(one: int, other: int) -> float:
        gpus = number * (kinds[one].tp_degree + kinds[other].tp_degree)
        same = kinds[one].resource == kinds[other].resource and gpus <= nodes[one].num_gpus
        return float(tables.boundaries[one, other]) if same else crossing(one, other)

    return tables.linked(seconds, lambda row: crossing(row, row), number)


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


class _SideBySide:
    """Seconds of gradient sync where the same stage of all pipelines fills one node after the other: a node's NIC carries each
    gradient once, whatever the number of its holders there. All pipelines end their stages together."""

    def __init__(self, request: Request, tables: Tables):
        self._cost, self._tables = request.cost, tables
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}
        self._sums: list[list[float]] = tables.sync_sums.tolist()
        update = [tables.update_s(np.array([0.0, 1e9]), (tables.kinds[row.kind].resource,)) for row in tables.rows]
        self._update = [float(more - none) / 1e9 for none, more in update]

    def after_s(self, number: Ints, rows: Ints, held_bytes: Floats, early_s: Floats) -> Floats:
        """(n,) how long after the pipelines' end the last gradients are summed, and the updates done. rows, held_bytes, early_s: (n, P)
        of each stage its table row or -1, its worker's gradient bytes and how long before the end it has done its last backward."""
        width = len(self._tables.rows) + 1
        keys, at = np.unique(number[:, None] * width + rows + 1, return_inverse=True)
        rates = np.array([self._rate(int(key) // width, int(key) % width - 1) for key in keys]).reshape(-1, 2)
        rates = rates[at.reshape(rows.shape)]
        ring = np.where(rows >= 0, rates[..., 0] + rates[..., 1] * held_bytes, 0.0)
        update = np.where(rows >= 0, np.array(self._update)[rows] * held_bytes, 0.0).max(axis=1, initial=0.0)
        return np.asarray(np.maximum(ring - early_s, 0.0).max(axis=1, initial=0.0) + update)

    def after_one_s(self, timing: Estimator, number: int, shape: Shape) -> float:
        """As `after_s`, of so many pipelines of one shape."""
        summed = updated = early = 0.0
        for row, start, end, back in zip(shape.rows, shape.starts, shape.ends, timing.stages(shape)[1]):
            fixed, rate = self._rate(number, row)
            num_bytes = self._sums[row][end] - self._sums[row][start]
            summed = max(summed, fixed + rate * num_bytes - early)
            updated = max(updated, self._update[row] * num_bytes)
            early += back
        return summed + updated

    def _rate(self, number: int, row: int) -> tuple[float, float]:
        if row >= 0 and (number, row) not in self._rates:
            kind = self._tables.kinds[self._tables.rows[row].kind]
            node = self._tables.resources[kind.resource].node_type
            held = int(self._tables.groups_a_node[row])
            members = [(str(i // held), node) for i in range(number)]
            if held % number:
                members[-1] = ("last", node)
            flows = node.num_gpus / math.gcd(
                number, held
            )  # where stages begin anywhere in a node, few of a ring share one
            self._rates[number, row] = ring_rate(self._cost, members, flows)
        return self._rates[number, row] if row >= 0 else (0.0, 0.0)


def _roughly_s(tables: Tables, request: Request, mixes: _Mixes, sync: _SideBySide) -> Floats:
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
    alive = (counts * most).sum(axis=1) >= blocks
    low = 1.0 / np.where(used, counts / block, 0.0).sum(axis=1)
    high = low * blocks + toll.max(axis=1)
    for _ in range(_BISECTIONS):
        middle = np.sqrt(low * high)
        good = (counts * _blocks(middle, toll, block, most)).sum(axis=1) >= blocks
        low, high = np.where(good, low, middle), np.where(good, middle, high)
    held = _blocks(high, toll, block, most)
    fill = (counts * (np.where(used, held * block, 0.0) + hop)).sum(axis=1)
    size = np.array([row.microbatch for row in tables.rows])[rows.max(axis=1)]
    each = request.global_batch_sequences / mixes.number / size
    alone = fill + (np.maximum(each, 1.0) - 1) * high
    return np.where(alive, alone + _least_sync(tables, mixes, held, sync), np.inf)


def _blocks(period: Floats, toll: Floats, block: Floats, most: Ints) -> Floats:
    """(n, R) blocks that a stage of each kind does in the period, and holds."""
    return np.minimum(np.floor(np.maximum(period[:, None] - toll, 0.0) / block + 1e-9), most)


def _least_sync(tables: Tables, mixes: _Mixes, held: Floats, sync: _SideBySide) -> Floats:
    """(n,) sync after the pipelines if stages of so many blocks follow each other by what they hold."""
    num_bytes = held * _a_block(tables.sync_sums, mixes.rows)
    back_s = held * _a_block(tables.time_sums - tables.forward_sums, mixes.rows) * mixes.counts
    order = np.argsort(np.where(mixes.rows >= 0, num_bytes, np.inf), axis=1, kind="stable")
    early = np.cumsum(np.take_along_axis(back_s, order, 1), axis=1) - np.take_along_axis(back_s, order, 1)
    rows = np.take_along_axis(mixes.rows, order, 1)
    return sync.after_s(mixes.number, rows, np.take_along_axis(num_bytes, order, 1), early)


def _a_block(sums: Floats, rows: Ints) -> Floats:
    """(n, R) the mean block's of each row, from sums over layers; 0 where no row is used."""
    return np.where(rows >= 0, ((sums[:, -2] - sums[:, 1]) / (sums.shape[1] - 3))[rows], 0.0)


def _timed(
    timing: Estimator, request: Request, mixes: _Mixes, sync: _SideBySide
) -> Iterator[tuple[float, int, Shape, float]]:
    """(seconds by the closed form, number of pipelines, shape, sync after them) of each mix that holds the model, in its best order
    with equal ends and in its best with others."""
    entries = [(m, rows) for m in range(len(mixes.number)) for rows in mixes.arrangements(m)]
    if not entries:
        return
    tables, batch = timing.tables, request.global_batch_sequences
    cuts = Balancer(tables, request.deepest(tables.num_blocks)).cut_each([rows for _, rows in entries])
    held = np.flatnonzero(np.isfinite(cuts.bottleneck_s))
    rows = padded([entries[i][1] for i in held], cuts.ends.shape[1])
    owner = np.array([entries[i][0] for i in held], dtype=np.int64)
    ends, number = cuts.ends[held], mixes.number[owner]
    _, _, num_bytes, early, _, _ = sync_sizes(tables, rows, ends, (rows >= 0).sum(axis=1))
    after = sync.after_s(number, rows, num_bytes, early)
    size = np.array([row.microbatch for row in tables.rows])[rows[:, 0]]
    further = np.maximum(batch / number / size, 1.0) - 1
    order = np.argsort(cuts.fill_s[held] + further * cuts.bottleneck_s[held] + after, kind="stable")
    last = rows[np.arange(len(rows)), (rows >= 0).sum(axis=1) - 1]
    around = rows[:, 0] == last  # a tied embedding is then summed inside nodes, which the tables do not know
    _, first = np.unique(2 * owner[order] + around[order], return_index=True)
    for j in order[first].tolist():
        shape = Shape(tuple(entries[held[j]][1]), tuple(ends[j, rows[j] >= 0].tolist()))
        microbatches = max(1, batch // int(number[j]) // int(size[j]))
        yield timing.quick_s(shape, microbatches) + float(after[j]), int(number[j]), shape, float(after[j])


def _draft(estimator: Estimator, shape: Shape, number: int, batch: int) -> Draft | None:
    draft = assign_microbatches(estimator, [shape] * number, batch)
    return draft if draft is not None and draft_fits(estimator, draft) else None
