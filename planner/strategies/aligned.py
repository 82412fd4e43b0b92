"""The same groups with the node types of all pipelines in one order, so that layers lie on like GPUs and their sync on like links."""

import itertools
from collections.abc import Sequence

import numpy as np

from planner.search.cut import Balancer
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.refine import draft_fits

_ORDERS = 24


def aligned(estimator: Estimator, shapes: Sequence[Shape], batch: int, max_stages: int) -> Draft | None:
    """The best order of node types by the tables, with all pipelines cut anew; None where none holds the model."""
    kinds = [estimator.tables.kinds[row.kind] for row in estimator.tables.rows]
    different = list(dict.fromkeys(shapes))
    used = sorted({kinds[row].resource for shape in different for row in shape.rows})
    orders = list(itertools.islice(itertools.permutations(used), _ORDERS))
    arranged = [
        tuple(sorted(shape.rows, key=lambda row: (order.index(kinds[row].resource), kinds[row].tp_degree, row)))
        for order in orders
        for shape in different
    ]
    cut = _cut(Balancer(estimator.tables, max_stages), arranged)
    found: list[tuple[float, int, Draft]] = []
    for number in range(len(orders)):
        mine = cut[number * len(different) : (number + 1) * len(different)]
        new = {shape: other for shape, other in zip(different, mine, strict=True) if other is not None}
        draft = assign_microbatches(estimator, [new[s] for s in shapes], batch) if len(new) == len(different) else None
        if draft is not None and draft_fits(estimator, draft):
            found.append((estimator.draft_s(draft), number, draft))
    return min(found)[2] if found else None


def _cut(balancer: Balancer, arranged: Sequence[tuple[int, ...]]) -> list[Shape | None]:
    """Each with the best cut for its order; None where it cannot hold the model."""
    cuts = balancer.cut_each(arranged)
    held = np.isfinite(cuts.bottleneck_s)
    return [
        Shape(rows, tuple(cuts.ends[i, : len(rows)].tolist())) if held[i] else None for i, rows in enumerate(arranged)
    ]
