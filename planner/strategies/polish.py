"""Small changes to whole plans under the full prediction, where updates and sums overlap other stages: for small fleets."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.plan import Pipeline, Plan, Stage
from planner.strategies.request import Request

_TRIED = 90
_EARLY = 3


def neighbours(plan: Plan, request: Request, sizes: Sequence[int]) -> Iterator[Plan]:
    """Plans one change away: a block to the neighbouring stage; two neighbours' workers exchanged, with their layers or without;
    another microbatch size for a pipeline; idle workers that take a block; a microbatch's sequences to another pipeline. At most
    90, in a fixed order."""
    for number, changed in enumerate(_changes(plan, request, sizes)):
        if number == _TRIED:
            return
        yield changed


def early_shifts(plan: Plan) -> Iterator[Plan]:
    """Plans with a block moved over one of the first cuts, in all pipelines that are cut alike: early stages end last, so what they hold
    decides when the gradients are summed."""
    for sizes in dict.fromkeys(tuple(stage.num_layers for stage in pipeline.stages) for pipeline in plan.pipelines):
        mine = [p for p, pipeline in enumerate(plan.pipelines) if tuple(s.num_layers for s in pipeline.stages) == sizes]
        moved = [itertools.islice(_block_moves(plan.pipelines[p].stages), 2 * _EARLY) for p in mine]
        for together in zip(*moved, strict=True):
            yield _with(plan, {p: replace(plan.pipelines[p], stages=s) for p, s in zip(mine, together, strict=True)})


def _changes(plan: Plan, request: Request, sizes: Sequence[int]) -> Iterator[Plan]:
    for p, pipeline in enumerate(plan.pipelines):
        for stages in (*_block_moves(pipeline.stages), *_exchanges(pipeline.stages)):
            if request.mixed_tp or len({stage.tp_degree for stage in stages}) == 1:
                yield _with(plan, {p: replace(pipeline, stages=stages)})
    if request.mixed_microbatch:
        for p, pipeline in enumerate(plan.pipelines):
            for size in sizes:
                if size != pipeline.microbatch_sequences and pipeline.num_sequences % size == 0:
                    yield _with(plan, {p: _sized(pipeline, size, pipeline.num_sequences)})
    yield from _joins(plan, request)
    yield from _sequence_moves(plan)


def _with(plan: Plan, changed: dict[int, Pipeline]) -> Plan:
    return replace(plan, pipelines=tuple(changed.get(i, pipeline) for i, pipeline in enumerate(plan.pipelines)))


def _sized(pipeline: Pipeline, size: int, sequences: int) -> Pipeline:
    return replace(pipeline, microbatch_sequences=size, num_microbatches=sequences // size)


def _block_moves(stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    for i in range(len(stages) - 1):
        left, right = stages[i], stages[i + 1]
        for step in (-1, 1):
            if min(left.num_layers + step, right.num_layers - step) >= 1:
                yield _laid_out(
                    stages, i, replace(left, num_layers=left.num_layers + step),
                    replace(right, num_layers=right.num_layers - step),
                )  # fmt: skip


def _exchanges(stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    for i in range(len(stages) - 1):
        left, right = stages[i], stages[i + 1]
        yield _laid_out(stages, i, replace(left, workers=right.workers), replace(right, workers=left.workers))
        yield _laid_out(stages, i, right, left)


def _joins(plan: Plan, request: Request) -> Iterator[Plan]:
    """The first idle workers of each node become a stage before or after another, of as many workers, with a block of its."""
    used = set(plan.workers)
    idle = [[worker for worker in node.workers if worker not in used] for node in request.fleet.nodes]
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.stages) == request.deepest(request.spec.num_layers):
            continue
        for (i, stage), workers in itertools.product(enumerate(pipeline.stages), idle):
            if stage.num_layers > 1 and len(workers) >= stage.tp_degree:
                for pair in _shared(stage, tuple(workers[: stage.tp_degree])):
                    stages = (*pipeline.stages[:i], *pair, *pipeline.stages[i + 1 :])
                    yield _with(plan, {p: replace(pipeline, stages=stages)})


def _shared(stage: Stage, added: tuple[str, ...]) -> Iterator[tuple[Stage, Stage]]:
    """The stage with its first block at the added workers, or its last."""
    rest = replace(stage, num_layers=stage.num_layers - 1)
    yield Stage(stage.first_layer, 1, added), replace(rest, first_layer=stage.first_layer + 1)
    yield rest, Stage(stage.end_layer - 1, 1, added)


def _laid_out(stages: tuple[Stage, ...], at: int, left: Stage, right: Stage) -> tuple[Stage, ...]:
    """The stages with two neighbours replaced, their layers after one another."""
    first = stages[at].first_layer
    pair = replace(left, first_layer=first), replace(right, first_layer=first + left.num_layers)
    return (*stages[:at], *pair, *stages[at + 2 :])


def _sequence_moves(plan: Plan) -> Iterator[Plan]:
    for p, giver in enumerate(plan.pipelines):
        given = giver.microbatch_sequences
        for q, taker in enumerate(plan.pipelines):
            if p != q and giver.num_microbatches > 1 and given % taker.microbatch_sequences == 0:
                more = _sized(taker, taker.microbatch_sequences, taker.num_sequences + given)
                less = _sized(giver, given, giver.num_sequences - given)
                yield _with(plan, {p: less, q: more})
