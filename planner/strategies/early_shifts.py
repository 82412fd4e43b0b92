"""Blocks moved over the first cuts under the full prediction, where updates and sums overlap other stages."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from planner.plan import Pipeline, Plan, Stage

_EARLY = 3


def early_shifts(plan: Plan) -> Iterator[Plan]:
    """Plans with a block moved over one of the first cuts, in all pipelines that are cut alike: early stages end last, so what they hold
    decides when the gradients are summed."""
    for sizes in dict.fromkeys(tuple(stage.num_layers for stage in pipeline.stages) for pipeline in plan.pipelines):
        mine = [p for p, pipeline in enumerate(plan.pipelines) if tuple(s.num_layers for s in pipeline.stages) == sizes]
        moved = [itertools.islice(_block_moves(plan.pipelines[p].stages), 2 * _EARLY) for p in mine]
        for together in zip(*moved, strict=True):
            yield _with(plan, {p: replace(plan.pipelines[p], stages=s) for p, s in zip(mine, together, strict=True)})


def _with(plan: Plan, changed: dict[int, Pipeline]) -> Plan:
    return replace(plan, pipelines=tuple(changed.get(i, pipeline) for i, pipeline in enumerate(plan.pipelines)))


def _block_moves(stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    for i in range(len(stages) - 1):
        left, right = stages[i], stages[i + 1]
        for step in (-1, 1):
            if min(left.num_layers + step, right.num_layers - step) >= 1:
                yield _laid_out(
                    stages, i, replace(left, num_layers=left.num_layers + step),
                    replace(right, num_layers=right.num_layers - step),
                )  # fmt: skip


def _laid_out(stages: tuple[Stage, ...], at: int, left: Stage, right: Stage) -> tuple[Stage, ...]:
    """The stages with two neighbours replaced, their layers after one another."""
    first = stages[at].first_layer
    pair = replace(left, first_layer=first), replace(right, first_layer=first + left.num_layers)
    return (*stages[:at], *pair, *stages[at + 2 :])
