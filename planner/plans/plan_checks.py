"""Checks that a plan is whole."""

import itertools
from collections import Counter

from planner.errors import ConfigError
from planner.plans.in_flight import MOST_AHEAD, one_each
from planner.plans.plan import Pipeline, Plan


def check_plan(
    plan: Plan,
    num_layers: int,
    *,
    exact_batch: bool = True,
    max_tp_degree: int | None = None,
    limited_by: str = "heads",
) -> None:
    """Check that the plan is whole.

    Each pipeline has each block once, in order, and the plan has each worker at most once.

    exact_batch: the pipelines must also process the global batch, neither more nor less; published
    plans round their microbatches up. max_tp_degree: the model's, which must allow each stage's
    number of parts. limited_by: what limits that number (`ModelSpec.limit_of_parts`).

    Raises:
        ConfigError: the plan is not whole.
    """
    for index, pipeline in enumerate(plan.pipelines):
        _check_layers(pipeline, index, num_layers)
        _check_in_flight(pipeline, index)
    _check_spmd(plan)
    if max_tp_degree is not None:
        _check_parts(plan, max_tp_degree, limited_by)
    worker, count = Counter(plan.workers).most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"the plan names worker '{worker}' {count} times; a worker can serve one stage only"
        )
    total = sum(pipeline.num_sequences for pipeline in plan.pipelines)
    if exact_batch and total != plan.global_batch_sequences:
        raise ConfigError(
            f"the pipelines process {total} sequences a step, but global_batch_sequences is "
            f"{plan.global_batch_sequences}"
        )


def _check_parts(plan: Plan, max_tp_degree: int, limited_by: str) -> None:
    powers = [str(2**i) for i in range(max_tp_degree.bit_length())]
    allowed = " or ".join(powers)
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            if stage.spmd is None and max_tp_degree % stage.num_parts:
                raise ConfigError(
                    f"stage {number} of pipeline {index} cuts the model into {stage.num_parts}"
                    f" parts, but its {limited_by} allow {allowed}: change its workers or its"
                    " tp_shares"
                )


def _check_spmd(plan: Plan) -> None:
    """Check that a program has a whole model and a plan for itself."""
    stages = plan.stages
    for stage in stages:
        if stage.spmd is None:
            continue
        if plan.pipelines[0].last_microbatch_sequences:
            raise ConfigError(
                "a plan with an spmd stage has microbatches of one size; leave out"
                " last_microbatch_sequences"
            )
        if len(stages) > 1:
            raise ConfigError(
                "a plan with an spmd stage must consist of that stage alone; this one has"
                f" {len(stages)}"
            )
        stage.spmd.check(stage.workers, "the spmd stage")


def _check_in_flight(pipeline: Pipeline, index: int) -> None:
    most = pipeline.most_in_flight
    depth = len(pipeline.stages)
    if most and len(most) != depth:
        raise ConfigError(
            f"in_flight of pipeline {index} has {len(most)} numbers; expected one for each of"
            f" {depth} stages"
        )
    if most and most[-1] != 1:
        raise ConfigError(
            f"in_flight of the last stage of pipeline {index} is {most[-1]}; it must be 1."
            f" {_suggest_in_flight(depth)}"
        )
    for stage, (number, later) in enumerate(itertools.pairwise(most)):
        # a later stage returns what an earlier one keeps, so numbers fall from stage to stage
        if not later < number <= later + MOST_AHEAD:
            raise ConfigError(
                f"in_flight of stage {stage} of pipeline {index} is {number}; it must be one to"
                f" {MOST_AHEAD} more than that of the stage after it, {later}."
                f" {_suggest_in_flight(depth)}"
            )


def _suggest_in_flight(depth: int) -> str:
    largest = list(range(1 + MOST_AHEAD * (depth - 1), 0, -MOST_AHEAD))
    return (
        f"Set in_flight to at most {largest} (each stage 1 to {MOST_AHEAD} more than the next), or"
        f" leave it out for 1F1B's {list(one_each(depth))}"
    )


def _check_layers(pipeline: Pipeline, index: int, num_layers: int) -> None:
    expected = 0
    for number, stage in enumerate(pipeline.stages):
        if stage.first_layer != expected:
            raise ConfigError(
                f"stage {number} of pipeline {index} starts at layer {stage.first_layer}; expected"
                f" {expected}"
            )
        if stage.num_layers == 0:
            raise ConfigError(
                f"stage {number} of pipeline {index} has 0 layers, but each stage must have at"
                " least 1; leave the stage out, or move a layer to it"
            )
        expected = stage.end_layer
    if expected != num_layers:
        raise ConfigError(
            f"pipeline {index} covers {expected} layers, but the model has {num_layers}"
        )
