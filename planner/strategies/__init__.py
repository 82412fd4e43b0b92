"""Search strategies for plans: `plan_with(strategy, request)`.

See planner/README.md for each strategy.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from planner.errors import ConfigError, InfeasibleError
from planner.plan import Plan
from planner.search import limits
from planner.search.judge import describe
from planner.search.problem import (
    TIME_IS_OVER,
    Answer,
    Idle,
    Rejected,
    Request,
    SearchReport,
    with_cut,
)
from planner.strategies.dispatch import dispatch_reason
from planner.strategies.exhaustive import search_exhaustive
from planner.strategies.fasop import search_fasop
from planner.strategies.formats import search_formats
from planner.strategies.hap import search_hap
from planner.strategies.metis import search_metis
from planner.strategies.pareto import search_objective
from planner.strategies.staged import search_megatron, search_varuna
from planner.strategies.zones import search_zones
from planner.uneven import search_with_uneven

STRATEGIES: dict[str, Callable[[Request], Answer]] = {
    "autohet": search_with_uneven,
    "metis": search_metis,
    "fasop": search_fasop,
    "hap": search_hap,
    "megatron": search_megatron,
    "varuna": search_varuna,
    "exhaustive": search_exhaustive,
}
MAY_IDLE = frozenset({"autohet", "exhaustive"})
"""Strategies whose plans may leave any node idle."""

__all__ = ["STRATEGIES", "Answer", "Idle", "Rejected", "Request", "SearchReport", "plan_with"]


def plan_with(strategy: str, request: Request) -> Answer:
    """The best plan that the strategy finds for the request's objective.

    InfeasibleError where none fits; ConfigError for an unknown strategy. With objective "pareto"
    `Answer.front` is the front.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy '{strategy}' does not exist; strategies are: {', '.join(STRATEGIES)}"
        )
    search = partial(search_zones, partial(_in_one_zone, strategy))
    try:
        found = search_formats(search, request) if strategy == "autohet" else search(request)
        return _with_reasons(request, with_cut(request, found))
    except InfeasibleError:
        if strategy != "autohet" or not _may_offload(request):
            raise
        asked = replace(request, cost=request.cost.offloading())
        try:
            answer = search(asked)
        except InfeasibleError:
            answer = None
        if answer is None:
            raise
    return _with_reasons(request, with_cut(request, _priced(answer)))


def _with_reasons(request: Request, answer: Answer) -> Answer:
    """Return the answer with each stage's format, and why tokens reach experts as they do."""
    answer = _with_formats(request, answer)
    why = dispatch_reason(request.cost, answer.plan)
    if not why:
        return answer
    return replace(answer, choice=f"{answer.choice}; {why}" if answer.choice else why)


def _with_formats(request: Request, answer: Answer) -> Answer:
    """Return the answer with the format of each stage in its plans."""
    if not request.cost.formats:
        return answer
    plan = request.cost.stage_choices.with_formats(answer.plan)
    prediction = replace(answer.prediction, plan=plan)
    front = tuple(_with_formats(request, each) for each in answer.front)
    candidates = tuple(map(request.cost.stage_choices.with_formats, answer.candidates))
    return replace(answer, plan=plan, prediction=prediction, front=front, candidates=candidates)


def _in_one_zone(strategy: str, request: Request) -> Answer:
    answer = _or_cutting_sequences(strategy, request)
    programs = strategy == "autohet" and request.spmd and request.objective == "time"
    # A program's state lies on the GPUs.
    return _or_program(answer, request) if programs and not answer.plan.offloads else answer


def _priced(answer: Answer) -> Answer:
    """Return the answer with the price of optimizer state in host memory."""
    prediction = answer.prediction
    update_s = prediction.breakdown_s["optimizer"]
    why = (
        "no plan fits the GPUs unless masters and moments lie in host memory: their update there"
        f" takes {update_s:.3g} s of each step's {prediction.step_time_s:.3g} s"
    )
    choice = f"{answer.choice}; {why}" if answer.choice else why
    return replace(answer, choice=choice, front=tuple(map(_priced, answer.front)))


def _may_offload(request: Request) -> bool:
    """Return True if host memory is separate from the GPUs' memory."""
    kinds = {node.node_type.gpu_type for node in request.fleet.nodes}
    has_it_already = request.cost.parameters.offload_optimizer
    return request.cost.choices.offload and not has_it_already and "CPU" not in kinds


def _or_cutting_sequences(strategy: str, request: Request) -> Answer:
    """The strategy's answer; where nothing fits, of plans of sequence-parallel stages."""
    may_idle = strategy in MAY_IDLE
    try:
        return search_objective(STRATEGIES[strategy], request, may_idle=may_idle)
    except InfeasibleError:
        if not _may_cut_sequences(request):
            raise
        cost = request.cost.cutting_sequences()
        try:
            asked = replace(request, cost=cost)
            answer = search_objective(STRATEGIES[strategy], asked, may_idle=may_idle)
        except InfeasibleError:
            answer = None
        if answer is None:
            raise
    front = tuple(_marked(each) for each in answer.front)
    candidates = tuple(_with_cut_sequences(plan) for plan in answer.candidates)
    return replace(_marked(answer), front=front, candidates=candidates)


def _may_cut_sequences(request: Request) -> bool:
    choices = request.cost.choices.recompute
    return request.cost.parameters.may_cut_sequence and any(c != "selective" for c in choices)


def _marked(answer: Answer) -> Answer:
    why = "no plan fits unless tensor-parallel stages cut the sequence"
    choice = f"{answer.choice}; {why}" if answer.choice else why
    plan = _with_cut_sequences(answer.plan)
    return replace(
        answer, plan=plan, prediction=replace(answer.prediction, plan=plan), choice=choice
    )


def _with_cut_sequences(plan: Plan) -> Plan:
    """The plan whose tensor-parallel stages are sequence parallel."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = tuple(
            replace(stage, sequence_parallel=stage.tp_degree > 1 and stage.recompute != "selective")
            for stage in pipeline.stages
        )
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


def _or_program(answer: Answer, request: Request) -> Answer:
    """The fastest SPMD program instead, where it is by limits.MIN_SPEEDUP faster than the best
    pipelines; either says so of the other.
    """
    pipelines_s = answer.prediction.step_time_s
    if request.is_late:
        skipped = Rejected("one SPMD program", TIME_IS_OVER)
        return replace(answer, rejected=(*answer.rejected, skipped))
    try:
        other = search_objective(search_hap, request)
    except InfeasibleError as error:
        return replace(
            answer, rejected=(*answer.rejected, Rejected("one SPMD program", str(error)))
        )
    program_s = other.prediction.step_time_s
    if program_s > pipelines_s / limits.MIN_SPEEDUP:
        why = (
            f"{program_s:.4g} s a step, not {limits.MIN_SPEEDUP - 1:.0%} faster than pipelines with"
            f" {pipelines_s:.4g} s"
        )
        return replace(
            answer, rejected=(*answer.rejected, Rejected("one SPMD program on uneven shares", why))
        )
    why = f"{pipelines_s:.4g} s a step, the program on uneven shares takes {program_s:.4g} s"
    rejected = (Rejected(f"the best pipelines: {describe(answer.plan)}", why), *other.rejected)
    return replace(other, strategy="autohet", rejected=rejected)
