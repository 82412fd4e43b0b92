"""Plans of equal pipelines, each over its share of every node type, the same stage of all of them side by side on its nodes.

Gradients are then summed inside nodes, or cross a NIC once for all of a node's holders, while activations cross one at every
stage. Searches that place pipeline by pipeline do not see these plans; Metis's stage groups are of this kind (Um et al., ATC'24).
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from planner.plan import Plan
from planner.strategies.balance import Balancer
from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.placement import place_by_stage
from planner.strategies.refine import draft_fits, refine_shape
from planner.strategies.request import Request
from planner.strategies.tables import Ints, Tables

_ORDERS = 24
_MIXES = 120
_KEPT = (4, 24)
_PREDICTED_GPUS = 600
Mix = tuple[int, tuple[int, ...], tuple[int, ...]]  # pipelines; row of each node type used; groups of it in a pipeline


def alike_plans(request: Request, tables: Tables, estimator: Estimator) -> list[Plan]:
    """The fastest few by the tables, without their sync, which placement decides."""
    supply = np.array([resource.num_gpus for resource in tables.resources], dtype=np.int64)
    depth = request.deepest(tables.num_blocks)
    numbers = [n for n in _numbers(supply) if n >= request.min_node_disjoint_holders]
    mixes = [(n, *mix) for n in numbers for mix in _mixes(tables, supply // n, depth)]
    batch = request.global_batch_sequences
    found: list[tuple[float, int, Draft]] = []
    for number, shape in _timed(tables, batch, depth, _quickest(tables, batch, mixes)):
        draft = _draft(estimator, shape, number, batch)
        if draft is not None:
            found.append((estimator.pipeline_s(*draft.pipelines[0]), len(found), draft))
    plans, keep = [], min(max(_KEPT[0], _PREDICTED_GPUS // int(supply.sum())), _KEPT[1])
    for _, _, draft in sorted(found, key=lambda entry: entry[:2])[:keep]:
        shape, count = draft.pipelines[0]
        better = _draft(estimator, refine_shape(estimator, shape, count), len(draft.pipelines), batch) or draft
        plans.append(place_by_stage(tables, better, request.spec.name, batch, request.sequence_length))
    return [plan for plan in plans if plan is not None]


def _draft(estimator: Estimator, shape: Shape, number: int, batch: int) -> Draft | None:
    draft = assign_microbatches(estimator, [shape] * number, batch)
    return draft if draft is not None and draft_fits(estimator, draft) else None


def _numbers(supply: Ints) -> Iterator[int]:
    """Numbers of pipelines: all up to 16, then in steps of an eighth."""
    number = 2
    while number <= int(supply.max()):
        yield number
        number += max(1, number // 8)


def _mixes(tables: Tables, share: Ints, depth: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ways to use the whole share of some node types at one microbatch size, each at one TP degree."""
    for size in sorted({row.microbatch for row in tables.rows}):
        options: list[list[tuple[int, int] | None]] = [[None] for _ in share]
        for r, row in enumerate(tables.rows):
            kind = tables.kinds[row.kind]
            if row.microbatch == size and share[kind.resource] >= kind.tp_degree:
                options[kind.resource].append((r, int(share[kind.resource]) // kind.tp_degree))
        for picked in itertools.product(*options):
            chosen = [part for part in picked if part is not None]
            if chosen and sum(count for _, count in chosen) <= depth:
                yield tuple(row for row, _ in chosen), tuple(count for _, count in chosen)


def _quickest(tables: Tables, batch: int, mixes: Sequence[Mix]) -> list[Mix]:
    """Those that would be fastest if layers were divided in exact proportion to speed, among those whose memory may do."""
    whole, sizes = tables.time_sums[:, -1], [row.microbatch for row in tables.rows]
    most = tables.fitting(1)[:, 0, 1] - 1
    timed = []
    for i, (number, rows, counts) in enumerate(mixes):
        if sum(c * int(most[r]) for r, c in zip(rows, counts, strict=True)) < tables.num_blocks:
            continue
        period = 1.0 / sum(c / float(whole[r]) for r, c in zip(rows, counts, strict=True))
        timed.append((period * (batch / number / sizes[rows[0]] - 1 + sum(counts)), i))
    return [mixes[i] for _, i in sorted(timed)[:_MIXES]]


def _timed(tables: Tables, batch: int, max_stages: int, mixes: Sequence[Mix]) -> Iterator[tuple[int, Shape]]:
    """(number of pipelines, shape) of each mix's best order of node types, those that hold the model; fastest first."""
    entries = [
        (m, tuple(mix[1][i] for i in order for _ in range(mix[2][i])))
        for m, mix in enumerate(mixes)
        for order in itertools.islice(itertools.permutations(range(len(mix[1]))), _ORDERS)
    ]
    if not entries:
        return
    depth = np.array([len(rows) for _, rows in entries])
    rows = np.full((len(entries), int(depth.max())), -1, dtype=np.int64)
    for i, (_, row) in enumerate(entries):
        rows[i, : len(row)] = row
    cuts = Balancer(tables, max_stages).cut(rows, depth)
    counts = np.array([batch / mixes[m][0] / tables.rows[row[0]].microbatch for m, row in entries])
    held = np.isfinite(cuts.bottleneck_s)
    seconds = cuts.fill_s + (np.maximum(counts, 1.0) - 1) * np.where(held, cuts.bottleneck_s, 0.0)
    seen: set[int] = set()
    for i in np.argsort(seconds, kind="stable"):
        m, row = entries[i]
        if held[i] and m not in seen:
            seen.add(m)
            yield mixes[m][0], Shape(row, tuple(int(e) for e in cuts.ends[i, : depth[i]]))
