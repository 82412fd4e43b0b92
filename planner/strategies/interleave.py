"""Node types of a pipeline in any order, where searches by tables keep those of one type together."""

from collections import Counter
from collections.abc import Iterator

from planner.plan import Plan
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches
from planner.search.place import place
from planner.search.problem import Request
from planner.search.tables import Tables
from planner.strategies.refine import draft_fits
from planner.strategies.stage_orders import best_orders
from planner.strategies.symmetric import draft_of

_LONGER = 1.1
_KEPT = 2


def interleaved(request: Request, tables: Tables, estimator: Estimator, plan: Plan) -> Iterator[Plan]:
    """Plans in which pipelines of one shape have their groups, and those that are idle, in another order."""
    draft = draft_of(tables, plan, request.fleet) if tables.begun_ahead > 1 else None
    if draft is None:
        return
    batch, length = request.global_batch_sequences, request.sequence_length
    for shape, count in dict(draft.pipelines).items():
        groups = _groups(tables, draft, shape)
        if len(groups) == 1:
            continue
        forward, backward, _ = estimator.stages(shape)
        longest_s = _LONGER * max(f + b for f, b in zip(forward, backward, strict=True))
        orders = best_orders(tables, groups, count, request.deepest(tables.num_blocks), longest_s)
        for other in sorted(orders, key=lambda one: estimator.quick_s(one, count))[:_KEPT]:
            shapes = [other if each == shape else each for each, _ in draft.pipelines]
            moved = assign_microbatches(estimator, shapes, batch)
            if moved is not None and draft_fits(estimator, moved):
                placed = place(tables, moved, request.spec.name, batch, length)
                if placed is not None:
                    yield placed


def _groups(tables: Tables, draft: Draft, shape: Shape) -> dict[int, int]:
    """Groups for each pipeline of this shape, by table row: its own, and of idle GPUs those of the same degrees."""
    kinds = [tables.kinds[row.kind] for row in tables.rows]
    copies = sum(1 for each, _ in draft.pipelines if each == shape)
    used = Counter[int]()
    for each, _ in draft.pipelines:
        for row in each.rows:
            used[kinds[row].resource] += kinds[row].tp_degree
    own, size = Counter(shape.rows), tables.rows[shape.rows[0]].microbatch
    degrees = {kinds[row].resource: kinds[row].tp_degree for row in shape.rows}
    out: dict[int, int] = {}
    for row, kind in enumerate(kinds):
        idle = 0
        if degrees.get(kind.resource, kinds[shape.rows[0]].tp_degree) == kind.tp_degree:
            idle = (tables.resources[kind.resource].num_gpus - used[kind.resource]) // kind.tp_degree // copies
        if tables.rows[row].microbatch == size and own[row] + idle > 0:
            out[row] = own[row] + idle
    return out
