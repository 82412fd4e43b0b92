"""Plans of equal pipelines, each over its share of every node type, the same stage of all of them side by side on its nodes.

Gradients are then summed inside nodes, or cross a NIC once for all of a node's holders, while activations cross one at every
stage. Searches that place pipeline by pipeline do not see these plans; Metis's stage groups are of this kind (Um et al., ATC'24).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.plan import Plan
from planner.strategies.balance import Balancer
from planner.strategies.cost_tables import ring_rate
from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.placement import place_by_stage
from planner.strategies.refine import draft_fits, refine_shape
from planner.strategies.request import Request
from planner.strategies.tables import Ints, Tables

_ORDERS = 24
_MIXES = 60
_KEPT = (4, 24)
_PREDICTED_GPUS = 600
_SIMULATED = 4
Mix = tuple[int, tuple[int, ...], tuple[int, ...]]  # pipelines; row of each node type used; groups of it in a pipeline


def alike_plans(request: Request, tables: Tables, estimator: Estimator) -> list[Plan]:
    """The fastest few by the tables and by the sync that lying side by side leaves."""
    supply = np.array([resource.num_gpus for resource in tables.resources], dtype=np.int64)
    depth, batch = request.deepest(tables.num_blocks), request.global_batch_sequences
    numbers = [n for n in _numbers(supply) if n >= request.min_node_disjoint_holders]
    mixes = [(n, *mix) for n in numbers for mix in _mixes(tables, supply // n, depth, request.mixed_tp)]
    sync, apart = _SideBySide(request, tables), _apart(request, tables)
    alone, whole, by = dict[Draft, float](), dict[Draft, float](), dict[Draft, Estimator]()
    chosen = _quickest(tables, batch, mixes, sync)
    keep = min(max(_KEPT[0], _PREDICTED_GPUS // int(supply.sum())), _KEPT[1])
    for timing in (estimator, Estimator(apart)):
        mine = [mix for mix in chosen if _fills_nodes(tables, mix) == (timing.tables is apart)]
        timed = list(_timed(timing.tables, batch, depth, mine, sync))
        for number, shape in _shortlist(timing, batch, timed, sync, _SIMULATED * keep):
            draft = _draft(timing, shape, number, batch)
            if draft is not None:
                by[draft] = timing
                alone[draft] = timing.pipeline_s(*draft.pipelines[0])
                whole[draft] = alone[draft] + sync.of_cut(number, shape)
    plans = []
    # early stages hide some of the sync of later ones, so what is fastest without it may be fastest
    for draft in dict.fromkeys(
        [*sorted(whole, key=whole.__getitem__)[:keep], *sorted(alone, key=alone.__getitem__)[:keep]]
    ):
        shape, count = draft.pipelines[0]
        better = _draft(by[draft], refine_shape(by[draft], shape, count), len(draft.pipelines), batch) or draft
        plans.append(place_by_stage(tables, better, request.spec.name, batch, request.sequence_length))
    return [plan for plan in plans if plan is not None]


def _fills_nodes(tables: Tables, mix: Mix) -> bool:
    """Whether so many pipelines leave no two stages on one node, but at the edges."""
    number, rows, _ = mix
    return number >= max(int(tables.groups_a_node[row]) for row in rows)


def _apart(request: Request, tables: Tables) -> Tables:
    """Every boundary crosses a NIC, which all groups of a node use at once: enough pipelines that a stage fills whole nodes."""
    kinds = [tables.kinds[row.kind] for row in tables.rows]

    def seconds(one: int, other: int) -> float:
        sender, receiver = (tables.resources[kinds[row].resource].node_type for row in (one, other))
        flows = int(tables.groups_a_node[one]) * float(kinds[other].tp_degree)
        return 2 * request.cost.boundary_s(sender, receiver, tables.rows[one].microbatch, flows=flows)

    return replace(tables, boundary_s=seconds, crossing_s=None)


class _SideBySide:
    """Seconds of gradient sync where the same stage of all pipelines fills one node after the other: a node's NIC carries each
    gradient once, whatever the number of its holders there."""

    def __init__(self, request: Request, tables: Tables):
        self._cost, self._tables = request.cost, tables
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}

    def of_bytes(self, number: int, row: int, num_bytes: float) -> float:
        """One stage of so many pipelines, with so many gradient bytes a worker."""
        if (number, row) not in self._rates:
            kind = self._tables.kinds[self._tables.rows[row].kind]
            node = self._tables.resources[kind.resource].node_type
            held = int(self._tables.groups_a_node[row])
            members = [(str(i // held), node) for i in range(number)]
            flows = node.num_gpus / (number % held or held)  # on a node shared with another stage, all its rings cross
            self._rates[number, row] = ring_rate(self._cost, members, flows)
        latency, each = self._rates[number, row]
        return latency + each * num_bytes

    def of_period(self, number: int, rows: Sequence[int], period: float) -> float:
        """If every stage takes as long as the bottleneck."""
        rate = [self._tables.sync_sums[row, -1] / self._tables.time_sums[row, -1] for row in rows]
        return max(self.of_bytes(number, row, period * float(each)) for row, each in zip(rows, rate, strict=True))

    def of_cut(self, number: int, shape: Shape) -> float:
        sums = self._tables.sync_sums
        held = [
            (r, float(sums[r, end] - sums[r, start])) for r, start, end in zip(shape.rows, shape.starts, shape.ends)
        ]
        return max(self.of_bytes(number, row, num_bytes) for row, num_bytes in held)


def _shortlist(
    timing: Estimator, batch: int, timed: Sequence[tuple[int, Shape]], sync: _SideBySide, most: int
) -> list[tuple[int, Shape]]:
    """Those that are worth a simulation by the closed form: the best so many with sync, and without."""
    alone = {
        (number, shape): timing.quick_s(shape, max(1, batch // number // timing.microbatch(shape)))
        for number, shape in timed
    }
    whole = {pair: seconds + sync.of_cut(*pair) for pair, seconds in alone.items()}
    return list(
        dict.fromkeys([*sorted(whole, key=whole.__getitem__)[:most], *sorted(alone, key=alone.__getitem__)[:most]])
    )


def _draft(estimator: Estimator, shape: Shape, number: int, batch: int) -> Draft | None:
    draft = assign_microbatches(estimator, [shape] * number, batch)
    return draft if draft is not None and draft_fits(estimator, draft) else None


def _numbers(supply: Ints) -> Iterator[int]:
    """Numbers of pipelines: all up to 16, then in steps of an eighth."""
    number = 2
    while number <= int(supply.max()):
        yield number
        number += max(1, number // 8)


def _mixes(
    tables: Tables, share: Ints, depth: int, mixed_tp: bool
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ways to use the whole share of some node types at one microbatch size, each at one TP degree."""
    for size in sorted({row.microbatch for row in tables.rows}):
        options: list[list[tuple[int, int] | None]] = [[None] for _ in share]
        for r, row in enumerate(tables.rows):
            kind = tables.kinds[row.kind]
            if row.microbatch == size and share[kind.resource] >= kind.tp_degree:
                options[kind.resource].append((r, int(share[kind.resource]) // kind.tp_degree))
        for picked in itertools.product(*options):
            chosen = [part for part in picked if part is not None]
            if chosen and sum(count for _, count in chosen) <= depth and (mixed_tp or _one_degree(tables, chosen)):
                yield tuple(row for row, _ in chosen), tuple(count for _, count in chosen)


def _one_degree(tables: Tables, chosen: Sequence[tuple[int, int]]) -> bool:
    return len({tables.kinds[tables.rows[row].kind].tp_degree for row, _ in chosen}) == 1


def _quickest(tables: Tables, batch: int, mixes: Sequence[Mix], sync: _SideBySide) -> list[Mix]:
    """Those that would be fastest if layers were divided in exact proportion to speed, among those whose memory may do."""
    whole, sizes = tables.time_sums[:, -1], [row.microbatch for row in tables.rows]
    most = tables.fitting(1)[:, 0, 1] - 1
    timed = []
    for i, (number, rows, counts) in enumerate(mixes):
        if sum(c * int(most[r]) for r, c in zip(rows, counts, strict=True)) < tables.num_blocks:
            continue
        period = 1.0 / sum(c / float(whole[r]) for r, c in zip(rows, counts, strict=True))
        alone = period * (batch / number / sizes[rows[0]] - 1 + sum(counts))
        timed.append((alone, alone + sync.of_period(number, rows, period), i))
    first = [i for _, _, i in sorted(timed)[:_MIXES]]
    return [mixes[i] for i in dict.fromkeys(first + [i for _, _, i in sorted(timed, key=lambda t: t[1:])[:_MIXES]])]


def _timed(
    tables: Tables, batch: int, max_stages: int, mixes: Sequence[Mix], sync: _SideBySide
) -> Iterator[tuple[int, Shape]]:
    """(number of pipelines, shape) of each mix that holds the model, in its best order of stages, and in its best with sync."""
    entries = [(m, rows) for m, mix in enumerate(mixes) for rows in _arrangements(mix)]
    if not entries:
        return
    cuts = Balancer(tables, max_stages).cut_each([rows for _, rows in entries])
    counts = np.array([batch / mixes[m][0] / tables.rows[row[0]].microbatch for m, row in entries])
    held = np.flatnonzero(np.isfinite(cuts.bottleneck_s))
    shapes = {i: Shape(entries[i][1], tuple(cuts.ends[i, : len(entries[i][1])].tolist())) for i in held.tolist()}
    alone = {i: float(cuts.fill_s[i] + (max(counts[i], 1.0) - 1) * cuts.bottleneck_s[i]) for i in shapes}
    whole = {i: seconds + sync.of_cut(mixes[entries[i][0]][0], shapes[i]) for i, seconds in alone.items()}
    seen = set[tuple[int, Shape]]()
    for seconds in (alone, whole):
        best: dict[int, int] = {}
        for i in sorted(shapes, key=seconds.__getitem__):
            best.setdefault(entries[i][0], i)
        for m, i in best.items():
            if (m, shapes[i]) not in seen:
                seen.add((m, shapes[i]))
                yield mixes[m][0], shapes[i]


def _arrangements(mix: Mix) -> Iterator[tuple[int, ...]]:
    """Rows of the stages: node types one after the other, and the first one's last stage at the end, where the head is."""
    _, rows, counts = mix
    for order in itertools.islice(itertools.permutations(range(len(rows))), _ORDERS):
        arranged = tuple(rows[i] for i in order for _ in range(counts[i]))
        yield arranged
        if len(order) > 1 and counts[order[0]] > 1:
            yield (*arranged[1:], arranged[0])
