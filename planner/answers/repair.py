"""Repairs of a plan that lost workers, without a search.

`repair` keeps whole pipelines as they are. `recut` also keeps what is left of the others.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace

from planner.cost.model import CostModel
from planner.plans.plan import Pipeline, Plan
from planner.search.problem.request import Request
from planner.search.walk.moves import GpuGroup, Moves, groups_of


def repair(
    previous: Plan, request: Request, alive: set[str], *, in_place: bool = False
) -> Plan | None:
    """Return the previous plan without the pipelines that lost a worker.

    The rest share the batch so that the slowest ends earliest. None if they cannot meet it.

    in_place: stages stay all that they are, and the last microbatch may be smaller.
    """
    whole = [pipeline for pipeline in previous.pipelines if alive.issuperset(pipeline.workers)]
    if not whole:
        return None
    left = replace(previous, pipelines=tuple(whole))
    seconds = _seconds_of(request.cost, left)
    counts = _share(whole, seconds, request.global_batch_sequences, cuts_last=in_place)
    if counts is None:
        return None
    pipelines = []
    for pipeline, (count, last) in zip(whole, counts, strict=True):
        shared = replace(pipeline, num_microbatches=count, last_microbatch_sequences=last)
        if not in_place:
            shared = replace(shared, most_in_flight=())
        pipelines.append(shared)
    return replace(
        previous,
        global_batch_sequences=request.global_batch_sequences,
        pipelines=tuple(pipelines),
    )


def _seconds_of(cost: CostModel, plan: Plan) -> list[tuple[float, float]]:
    """Return the seconds of each pipeline's first microbatch, and of each further one."""
    found = []
    totals_s = cost.steps.pipelines_s(plan)
    for pipeline, total_s in zip(plan.pipelines, totals_s, strict=True):
        stages = [
            sum(cost.stages.seconds(pipeline, index)) for index in range(len(pipeline.stages))
        ]
        first_s = sum(stages)
        num_further = pipeline.num_microbatches - 1
        if num_further:
            further_s = (total_s - first_s) / num_further
        else:
            # The slowest stage sets the pace once the pipeline is full.
            further_s = max(stages)
        found.append((first_s, further_s))
    return found


def _share(
    pipelines: Sequence[Pipeline],
    seconds: Sequence[tuple[float, float]],
    batch: int,
    *,
    cuts_last: bool,
) -> list[tuple[int, int]] | None:
    """Return the microbatches by which the pipelines meet the batch, and the size of the last one.

    The size is 0 if it is that of the others. Each next microbatch goes where it ends earliest.
    None if the batch cannot be met.

    cuts_last: a microbatch that is too large for what is left becomes smaller.
    """
    counts = [(1, 0)] * len(pipelines)
    left = batch - sum(pipeline.microbatch_sequences for pipeline in pipelines)
    heap = [(first_s + further_s, i) for i, (first_s, further_s) in enumerate(seconds)]
    heapq.heapify(heap)
    while left > 0 and heap:
        end, i = heapq.heappop(heap)
        size = pipelines[i].microbatch_sequences
        if size > left and not cuts_last:
            continue
        number, _ = counts[i]
        counts[i] = (number + 1, left if size > left else 0)
        left -= min(size, left)
        further_s = seconds[i][1]
        heapq.heappush(heap, (end + further_s, i))
    return counts if left == 0 else None


def recut(previous: Plan, request: Request, alive: set[str], moves: Moves) -> Plan | None:
    """Return the previous plan with each pipeline that lost a worker cut again.

    It is cut over its whole groups and over the rests of others that may have uneven shares. The
    groups of pipelines that cannot hold the model without the lost ones make one new pipeline, if
    they can. None if nothing can be made.
    """
    pipelines = list[Pipeline]()
    left = list[GpuGroup]()
    for pipeline in previous.pipelines:
        groups = []
        for group in groups_of(pipeline):
            rest = tuple(worker for worker in group if worker in alive)
            if rest == group or moves.is_uneven(rest):
                groups.append(rest)
        is_whole = groups == groups_of(pipeline)
        cut = pipeline if is_whole else moves.cut(groups, pipeline.microbatch_sequences)
        if cut is None:
            left += groups
        else:
            pipelines.append(replace(cut, most_in_flight=()))

    if left:
        joined = moves.cut(left[: moves.tables.deepest], previous.microbatch_sequences)
        if joined is not None:
            pipelines.append(joined)
    if not pipelines:
        return None
    plan = replace(previous, global_batch_sequences=request.global_batch_sequences)
    return moves.share_batch(plan, pipelines)
