"""Check that gradient sums of groups in stream order may start during the last backward pass."""

from __future__ import annotations

from transformers import PreTrainedConfig

from autohet.runtime.models import family_of
from planner.plan import Plan


def sums_have_one_order(plan: Plan, config: PreTrainedConfig) -> bool:
    """Return True if all workers start operations in one order although sums overlap with 1F1B.

    Communicators of one GPU need the same order of launches on all ranks. After the last backward
    pass of a stage has begun, only its buckets and one message to the stage before remain. If
    pipelines are cut alike, buckets join only workers of equal stages. Those of the last stage then
    come first everywhere, then its message, then those of the stage before. A tied embedding joins
    two stages, and tensor parallelism puts its own sums between the buckets.
    """
    pipelines = [
        [(stage.first_layer, stage.num_layers) for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]
    if any(stage.tp_degree > 1 for pipeline in plan.pipelines for stage in pipeline.stages):
        return False
    if any(cut != pipelines[0] for cut in pipelines):
        return False
    return len(pipelines[0]) == 1 or not family_of(config).tied_head(config)
