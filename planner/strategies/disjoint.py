"""Plans whose pipelines share no node: whatever node dies, the other pipelines hold every layer."""

import numpy as np

from planner.plan import Plan
from planner.strategies.balance import Balancer
from planner.strategies.drafts import Estimator, Shape, assign_microbatches
from planner.strategies.placement import place
from planner.strategies.refine import fits
from planner.strategies.request import Request
from planner.strategies.tables import Tables


def disjoint_plans(request: Request, tables: Tables, estimator: Estimator) -> list[Plan]:
    """One for each number of neighbouring nodes to a pipeline, TP degree and microbatch size that hold the model."""
    nodes, wanted = len(request.fleet.nodes), request.min_node_disjoint_holders
    sizes = sorted({row.microbatch for row in tables.rows})
    degrees = sorted({kind.tp_degree for kind in tables.kinds})
    found = [
        _plan(request, tables, estimator, count, degree, size)
        for count in range(1, nodes // wanted + 1)
        for degree in degrees
        for size in sizes
    ]
    return [plan for plan in found if plan is not None]


def _plan(request: Request, tables: Tables, estimator: Estimator, nodes: int, degree: int, size: int) -> Plan | None:
    """Every pipeline on so many nodes' GPUs; the last takes what is left over."""
    of = {name: i for i, resource in enumerate(tables.resources) for name in resource.node_names}
    row_of = {
        tables.kinds[row.kind].resource: (
            r,
            tables.resources[tables.kinds[row.kind].resource].node_type.num_gpus // degree,
        )
        for r, row in enumerate(tables.rows)
        if row.microbatch == size and tables.kinds[row.kind].tp_degree == degree
    }
    names = [name for resource in tables.resources for name in resource.node_names if of[name] in row_of]
    shapes = []
    for start in range(0, len(names) // nodes * nodes, nodes):
        mine = [row_of[of[name]] for name in names[start : start + nodes]]
        rows = [row for row, groups in mine for _ in range(groups)][: request.deepest(tables.num_blocks)]
        cuts = Balancer(tables, len(rows)).cut(np.array([rows], dtype=np.int64), np.array([len(rows)]))
        if not np.isfinite(cuts.bottleneck_s[0]):
            return None
        shapes.append(Shape(tuple(rows), tuple(int(end) for end in cuts.ends[0])))
    batch = request.global_batch_sequences
    draft = assign_microbatches(estimator, shapes, batch) if shapes else None
    if draft is None or not all(fits(estimator, shape, k) for shape, k in set(draft.pipelines)):
        return None
    return place(tables, draft, request.spec.name, batch, request.sequence_length)
