"""Plans whose pipelines share no node: whatever node dies, the other pipelines hold every layer."""

import numpy as np

from planner.plan import Plan
from planner.search.cut import Balancer
from planner.search.draft import Estimator, Shape, assign_microbatches
from planner.search.place import place
from planner.search.problem import Request
from planner.search.tables import Tables
from planner.strategies.refine import draft_fits


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
    """Every pipeline on so many nodes' GPUs; nodes that are left over stay idle."""
    of_resource = {
        kind.resource: r
        for r, row in enumerate(tables.rows)
        if row.microbatch == size and (kind := tables.kinds[row.kind]).tp_degree == degree
    }
    of_node = [of_resource[r] for r in sorted(of_resource) for _ in tables.resources[r].node_names]
    shapes = []
    for start in range(0, len(of_node) // nodes * nodes, nodes):
        mine = of_node[start : start + nodes]
        rows = np.repeat(mine, tables.groups_a_node[mine])[: request.deepest(tables.num_blocks)]
        cuts = Balancer(tables, len(rows)).cut(rows[None, :], np.array([len(rows)]))
        if not np.isfinite(cuts.bottleneck_s[0]):
            return None
        shapes.append(Shape(tuple(rows.tolist()), tuple(int(end) for end in cuts.ends[0])))
    batch = request.global_batch_sequences
    draft = assign_microbatches(estimator, shapes, batch) if shapes else None
    if draft is None or not draft_fits(estimator, draft):
        return None
    return place(tables, draft, request.spec.name, batch, request.sequence_length)
