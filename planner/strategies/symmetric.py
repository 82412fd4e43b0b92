"""Symmetric grids: `megatron` (TP x PP x DP, equal split of the layers) and `varuna` (no TP, cuts balanced by compute).

Both treat the GPUs as equal, in the fleet's order; the grid is chosen under our cost model. Narayanan et al.,
"Efficient
large-scale language model training on GPU clusters using Megatron-LM", SC'21; Athlur et al., "Varuna", EuroSys'22.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from planner.cluster import Fleet
from planner.plan import Pipeline, Plan, Stage
from planner.strategies.drafts import Draft, Estimator, Shape
from planner.strategies.refine import draft_fits
from planner.strategies.request import Request
from planner.strategies.tables import Tables

Split = Callable[[int], tuple[int, ...]]


def grid_plans(request: Request, tables: Tables, *, max_tp: int, balanced: bool) -> Iterator[Plan]:
    """Every grid that fills most of the fleet and whose data-parallel degree divides the batch."""
    sizes = sorted({row.microbatch for row in tables.rows})
    degrees = sorted({d for d in (tables.kinds[row.kind].tp_degree for row in tables.rows) if d <= max_tp})
    for tp in degrees:
        groups = _groups(request.fleet, tp)
        for depth in range(1, min(len(groups), request.deepest(tables.num_blocks)) + 1):
            split = _balanced_split(tables, depth, tp) if balanced else equal_split(tables.num_blocks, depth)
            for size in sizes:
                plan = _grid(request, groups, depth, size, split)
                if plan is not None:
                    yield plan


def _groups(fleet: Fleet, tp: int) -> list[tuple[str, ...]]:
    """Tensor-parallel groups inside nodes, in the fleet's order."""
    return [node.workers[i : i + tp] for node in fleet.nodes for i in range(0, len(node.workers) - tp + 1, tp)]


def _grid(
    request: Request, groups: list[tuple[str, ...]], depth: int, size: int, split: tuple[int, ...]
) -> Plan | None:
    batch = request.global_batch_sequences
    if batch % size:
        return None
    total = batch // size
    width = next((d for d in range(min(len(groups) // depth, total), 0, -1) if total % d == 0), 0)
    if width == 0:
        return None
    first = [0, *itertools.accumulate(split)]
    pipelines = tuple(
        Pipeline(
            tuple(Stage(first[p], split[p], groups[d + width * p]) for p in range(depth)),
            total // width,
            size,
        )
        for d in range(width)
    )
    return Plan(request.spec.name, batch, size, request.sequence_length, pipelines)


def equal_split(blocks: int, depth: int) -> tuple[int, ...]:
    """Blocks of each stage, the first ones take the rest."""
    return tuple(blocks // depth + (1 if i < blocks % depth else 0) for i in range(depth))


def _balanced_split(tables: Tables, depth: int, tp: int) -> tuple[int, ...]:
    """Cuts nearest to equal shares of one device's time, every stage at least one block."""
    row = next(i for i, r in enumerate(tables.rows) if tables.kinds[r.kind].tp_degree == tp)
    sums = tables.time_sums[row]
    blocks = tables.num_blocks
    cuts = [0]
    for i in range(1, depth):
        near = int(np.argmin(np.abs(sums[1 : blocks + 2] - sums[-1] * i / depth)))
        cuts.append(min(max(near, cuts[-1] + 1), blocks - (depth - i)))
    return tuple(b - a for a, b in zip(cuts, [*cuts[1:], blocks]))


def draft_of(tables: Tables, plan: Plan, fleet: Fleet) -> Draft | None:
    """The plan as a draft over these tables; None where it uses what the tables do not have."""
    out = []
    for pipeline in plan.pipelines:
        rows, ends = [], []
        for stage in pipeline.stages:
            kind = fleet.node_of(stage.workers[0]).node_type.name
            row = tables.row_of.get((kind, stage.tp_degree, pipeline.microbatch_sequences))
            if row is None:
                return None
            rows.append(row)
            ends.append(stage.end_layer + 1)
        ends[-1] += 1
        out.append((Shape(tuple(rows), tuple(ends)), pipeline.num_microbatches))
    return Draft(tuple(out))


def ranked_grids(
    fleet: Fleet, tables: Tables, plans: Iterator[Plan], estimator: Estimator, keep: int
) -> list[tuple[float, Plan]]:
    """The `keep` fastest grids that fit memory by the tables; only those whose bound allows it are simulated."""
    bounded = []
    for number, plan in enumerate(plans):
        draft = draft_of(tables, plan, fleet)
        if draft is not None and draft_fits(estimator, draft):
            least = max(estimator.quick_s(shape, k) for shape, k in set(draft.pipelines))
            bounded.append((least, number, draft, plan))
    found: list[tuple[float, int, Plan]] = []
    for least, number, draft, plan in sorted(bounded, key=lambda item: item[:2]):
        if len(found) >= keep and least >= found[keep - 1][0]:
            break
        found = sorted([*found, (estimator.draft_s(draft), number, plan)], key=lambda item: item[:2])
    return [(seconds, plan) for seconds, _, plan in found[:keep]]
