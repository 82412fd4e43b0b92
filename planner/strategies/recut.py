"""Pipelines that lost workers, cut again over those that they have left: the repair that wastes no GPU."""

from collections.abc import Sequence, Set

import numpy as np

from planner.plan import Pipeline, Plan, Stage
from planner.strategies.balance import Balancer
from planner.strategies.cost_tables import tables_of
from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.refine import draft_fits
from planner.strategies.request import Request
from planner.strategies.staged import Stager
from planner.strategies.tables import Tables

_EVERY = (1, 2, 3, 4, 5, 6)
_MOST_WALLS = 12


def recut(previous: Plan, request: Request, alive: Set[str]) -> Plan | None:
    """The previous plan with each broken pipeline cut anew over its whole stages, in their order; None where none is broken or
    the batch cannot be shared. A pipeline whose rest cannot hold the model is left out.

    Gradient sync is shorter where pipelines are cut at the same blocks, so the cuts of each whole pipeline, and every second to
    sixth of them, are tried as walls; the estimate with its sync chooses.
    """
    whole = [set(p.workers) <= alive for p in previous.pipelines]
    if all(whole) or not any(set(p.workers) & alive for p in previous.pipelines):
        return None
    tables = tables_of(request)
    estimator = Estimator(tables)
    kept = [tuple(stage for stage in p.stages if set(stage.workers) <= alive) for p in previous.pipelines]
    walls = _walls([p for p, is_whole in zip(previous.pipelines, whole, strict=True) if is_whole])
    found = [_plan(previous, request, estimator, kept, whole, cuts) for cuts in walls]
    timed = [(seconds, i, plan) for i, (seconds, plan) in enumerate(f for f in found if f is not None)]
    return min(timed, key=lambda item: item[:2])[2] if timed else None


def _walls(pipelines: Sequence[Pipeline]) -> list[tuple[int, ...]]:
    """Sets of blocks after which a new cut may be made to fall, none among them."""
    out: dict[tuple[int, ...], None] = {(): None}
    for cuts in dict.fromkeys(tuple(stage.end_layer for stage in p.stages[:-1]) for p in pipelines):
        for every in _EVERY:
            out.setdefault(cuts[every - 1 :: every])
    return list(out)[:_MOST_WALLS]


def _plan(
    previous: Plan, request: Request, estimator: Estimator, kept: Sequence[tuple[Stage, ...]], whole: Sequence[bool],
    walls: tuple[int, ...],
) -> tuple[float, Plan] | None:  # fmt: skip
    stager, shapes, groups = Stager(estimator.tables, request.fleet), [], []
    for pipeline, stages, is_whole in zip(previous.pipelines, kept, whole, strict=True):
        rows = [stager.row(stage.workers, pipeline.microbatch_sequences) for stage in stages]
        if not rows or any(row is None for row in rows):
            continue
        known = tuple(row for row in rows if row is not None)
        shape = _same(stages, known) if is_whole else _cut(estimator.tables, known, walls)
        if shape is not None:
            shapes.append(shape)
            groups.append(stages)
    draft = assign_microbatches(estimator, shapes, request.global_batch_sequences) if shapes else None
    if draft is None or not draft_fits(estimator, draft):
        return None
    return estimator.draft_s(draft), _with_workers(previous, request, estimator, draft, groups)


def _same(stages: Sequence[Stage], rows: tuple[int, ...]) -> Shape:
    ends = [stage.end_layer + 1 for stage in stages]
    return Shape(rows, (*ends[:-1], ends[-1] + 1))


def _cut(tables: Tables, rows: tuple[int, ...], walls: tuple[int, ...]) -> Shape | None:
    """The cut with the smallest bottleneck; None where the groups cannot hold the model."""
    if len(rows) > tables.num_blocks:
        return None
    cut = Balancer(tables, len(rows), walls).cut(np.array([rows]), np.array([len(rows)]))
    return Shape(rows, tuple(int(e) for e in cut.ends[0])) if np.isfinite(cut.bottleneck_s[0]) else None


def _with_workers(
    previous: Plan, request: Request, estimator: Estimator, draft: Draft, groups: Sequence[Sequence[Stage]]
) -> Plan:
    last = estimator.tables.num_blocks
    pipelines = []
    for (shape, count), stages in zip(draft.pipelines, groups, strict=True):
        cuts = [(max(s - 1, 0), min(e - 1, last)) for s, e in zip(shape.starts, shape.ends, strict=True)]
        placed = tuple(Stage(a, b - a, stage.workers) for (a, b), stage in zip(cuts, stages, strict=True))
        pipelines.append(Pipeline(placed, count, estimator.microbatch(shape)))
    batch = request.global_batch_sequences
    return Plan(previous.model, batch, previous.microbatch_sequences, previous.sequence_length, tuple(pipelines))
