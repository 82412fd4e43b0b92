"""Check that gradient sums of groups in stream order may start during the last backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from autohet.runtime.models import family_of
from autohet.runtime.parallel.buckets import groups_by_holders, plan_buckets, plan_buffers
from planner.plan import Plan, Stage

Starts = tuple[frozenset[str], ...]
"""Parameters of each bucket of a worker, in the order of the sums."""


def sums_have_one_order(plan: Plan, config: PreTrainedConfig, most: int | None = None) -> bool:
    """Return True if all workers start operations in one order although sums overlap with 1F1B.

    most: largest number of groups for gradient sums of one worker.

    Communicators of one GPU need the same order of launches on all ranks. After the last backward
    pass of a stage has begun, three things remain: its buckets, sums of its tensor-parallel group
    between them, and one message to the stage before. If pipelines are cut alike, buckets join only
    workers of equal stages. Those of the last stage then come first everywhere, then its message,
    then those of the stage before. A tied embedding joins two stages.

    Within a stage all ranks run one autograd graph. A bucket that waits for the same parameters
    therefore starts between the same two sums of the group on each rank. This gives one order of
    everything: for each bucket number, first the sums that each pipeline's group makes before it,
    then the buckets of this number. The order does not depend on how many sums come between, so
    pipelines may recompute differently.
    """
    pipelines = [list(map(_cut, pipeline.stages)) for pipeline in plan.pipelines]
    if any(cut != pipelines[0] for cut in pipelines):
        return False
    if any(stage.tp_shares for stage in plan.pipelines[0].stages):
        return False  # ranks of unlike shapes run unlike graphs
    if len(pipelines[0]) > 1 and family_of(config).tied_head(config):
        return False
    stages = [stage for stage in plan.pipelines[0].stages if stage.tp_degree > 1]
    if not stages:
        return True
    starts = _starts(plan, config, [w for stage in stages for w in stage.workers], most)
    return all(len({starts[worker] for worker in stage.workers}) == 1 for stage in stages)


def _cut(stage: Stage) -> tuple[object, ...]:
    return stage.first_layer, stage.num_layers, stage.tp_degree, stage.tp_shares


def _starts(
    plan: Plan, config: PreTrainedConfig, workers: Sequence[str], most: int | None
) -> dict[str, Starts]:
    buffers = plan_buffers(plan, config)
    members = groups_by_holders(plan, config, buffers, most)
    found: dict[str, list[frozenset[str]]] = {worker: [] for worker in workers}
    for bucket in plan_buckets(buffers):
        buffer = buffers[bucket.buffer]
        names = frozenset(each.parameter for each in buffer.pieces if bucket.touches(each))
        for worker in members.get(buffer.holders, buffer.holders):
            if worker in found:
                found[worker].append(names if worker in buffer.holders else frozenset())
    return {worker: tuple(each) for worker, each in found.items()}
