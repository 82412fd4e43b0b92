"""The same GPUs in tensor-parallel groups of other sizes: where one degree leaves blocks that do not divide well, a few groups of
half or twice the size do."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from planner.search.cut import Balancer
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches
from planner.search.tables import Tables
from planner.strategies.refine import After, by_time, draft_fits, fastest_of, fits

_ROUNDS = 3
_FEW = 4  # groups changed: one to so many, half of them, all of them
_WORTH = 1e-3
_ORDERS = 24
_KEPT = 4
_NEAR = 1.01


def regrouped(
    estimator: Estimator, draft: Draft, batch: int, max_stages: int, after_s: After | None = None, reorder: bool = False
) -> Draft | None:
    """Each pipeline with the groups that make it fastest for its microbatches, with what follows it; None where none gains. reorder:
    whether to begin with other orders of its node types as well, since which is best depends on the groups."""
    balancer = Balancer(estimator.tables, max_stages)
    better = dict[Shape, Shape]()
    for shape, count in draft.pipelines:
        if shape not in better:
            starts = [shape, *(_in_other_orders(estimator, balancer, shape, count, after_s) if reorder else ())]
            found = [_regroup(estimator, balancer, start, count, max_stages, after_s) for start in starts]
            better[shape] = min(found, key=by_time)[1]
    if all(shape == other for shape, other in better.items()):
        return None
    moved = assign_microbatches(estimator, [better[shape] for shape, _ in draft.pipelines], batch)
    return moved if moved is not None and draft_fits(estimator, moved) else None


def _regroup(
    estimator: Estimator, balancer: Balancer, shape: Shape, microbatches: int, max_stages: int, after_s: After | None
) -> tuple[float, Shape]:
    """(seconds, shape) of what changes of a few groups at a time lead to."""
    best, seconds = shape, estimator.pipeline_s(shape, microbatches) + (after_s(shape) if after_s else 0.0)
    for _ in range(_ROUNDS):
        options = list(dict.fromkeys(other_groups(estimator.tables, best.rows, max_stages)))
        if not options:
            break
        quick = ((estimator.quick_s(other, microbatches), other) for other in _cut(balancer, options))
        fastest = fastest_of(estimator, quick, microbatches, seconds, after_s)
        if fastest is None or fastest[0] > seconds * (1 - _WORTH):
            break
        seconds, best = fastest
    return seconds, best


def _in_other_orders(
    estimator: Estimator, balancer: Balancer, shape: Shape, microbatches: int, after_s: After | None
) -> list[Shape]:
    """The best few, of those hardly behind the best of them."""
    tables = estimator.tables
    kinds = [tables.kinds[tables.rows[row].kind].resource for row in shape.rows]
    orders = [
        tuple(row for kind in order for row, of in zip(shape.rows, kinds) if of == kind)
        for order in itertools.islice(itertools.permutations(dict.fromkeys(kinds)), _ORDERS)
    ]
    others = [rows for rows in dict.fromkeys(orders) if rows != shape.rows]
    quick = [
        (estimator.quick_s(other, microbatches) + (after_s(other) if after_s else 0.0), other)
        for other in (_cut(balancer, others) if others else ())
        if fits(estimator, other, microbatches)
    ]
    near = _NEAR * min((seconds for seconds, _ in quick), default=0.0)
    return [other for seconds, other in sorted(quick, key=by_time)[:_KEPT] if seconds <= near]


def _cut(balancer: Balancer, pipelines: Sequence[tuple[int, ...]]) -> list[Shape]:
    """Those that hold the model."""
    cuts = balancer.cut_each(pipelines)
    held = np.flatnonzero(np.isfinite(cuts.bottleneck_s)).tolist()
    return [Shape(pipelines[i], tuple(cuts.ends[i, : len(pipelines[i])].tolist())) for i in held]


def other_groups(tables: Tables, rows: tuple[int, ...], max_stages: int) -> Iterator[tuple[int, ...]]:
    """Some groups at the head or the tail of a run of equal ones merged two by two, or halved."""
    at = 0
    for row, run in itertools.groupby(rows):
        count = len(list(run))
        for other, merged in _other_degrees(tables, row):
            most = count // 2 if merged else count
            for changed in sorted({*range(1, min(_FEW, most) + 1), most // 2, most} - {0}):
                new = (other,) * (changed if merged else 2 * changed)
                old = (row,) * (count - (2 * changed if merged else changed))
                for part in (new + old, old + new):
                    if len(rows) - count + len(part) <= max_stages:
                        yield (*rows[:at], *part, *rows[at + count :])
        at += count


def _other_degrees(tables: Tables, row: int) -> Iterator[tuple[int, bool]]:
    """(row, whether its groups are twice as large) of half and twice the degree, on the same GPUs with the same microbatch."""
    kind = tables.kinds[tables.rows[row].kind]
    node_type, size = tables.resources[kind.resource].node_type, tables.rows[row].microbatch
    for degree in (kind.tp_degree // 2, 2 * kind.tp_degree):
        other = tables.row_of.get((node_type, degree, size))
        if other is not None:
            yield other, degree > kind.tp_degree
