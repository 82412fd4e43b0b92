"""Check that gradient sums of groups in stream order may start during the last backward pass."""

from transformers import PreTrainedConfig

from autohet.runtime.models.registry import family_of
from autohet.runtime.parallel.buckets import groups_by_holders, plan_buckets, plan_buffers
from planner.plans.plan import Pipeline, Plan

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
    first = plan.pipelines[0]
    cuts = _cuts(first)
    for other in plan.pipelines[1:]:
        if _cuts(other) != cuts:
            return False
    for stage in first.stages:
        # Ranks of unlike shapes run unlike graphs.
        if stage.tp_shares:
            return False
    # A tied embedding joins the first and the last stage.
    is_tied = family_of(config).tied_head(config)
    if is_tied and len(first.stages) > 1:
        return False

    stages = [stage for stage in first.stages if stage.tp_degree > 1]
    if not stages:
        return True
    starts = _starts(plan, config, most)
    for stage in stages:
        orders = {starts[worker] for worker in stage.workers}
        if len(orders) > 1:
            return False
    return True


def _cuts(pipeline: Pipeline) -> list[tuple[object, ...]]:
    """Return what decides the collectives of each stage, and their order."""
    cuts: list[tuple[object, ...]] = [
        (stage.first_layer, stage.num_layers, stage.tp_degree, stage.tp_shares)
        for stage in pipeline.stages
    ]
    return cuts


def _starts(plan: Plan, config: PreTrainedConfig, most: int | None) -> dict[str, Starts]:
    """Return the parameters that each sum of a worker waits for, by worker."""
    buffers = plan_buffers(plan, config)
    members = groups_by_holders(plan, config, buffers, most)
    found: dict[str, list[frozenset[str]]] = {worker: [] for worker in plan.workers}
    for bucket in plan_buckets(buffers):
        buffer = buffers[bucket.buffer]
        names = frozenset(piece.parameter for piece in bucket.pieces_in(buffer))
        for worker in members.get(buffer.holders, buffer.holders):
            if worker in buffer.holders:
                found[worker].append(names)
            else:
                # It gives zeros to the bucket of others, so it waits for nothing.
                found[worker].append(frozenset())
    return {worker: tuple(each) for worker, each in found.items()}
