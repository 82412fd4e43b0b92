"""Search strategies for plans: `plan_with(strategy, request)`.

All strategies are costed by one model. `metis`, `fasop` and `hap` are re-implementations of
published algorithms; their modules say what was kept. `metis`, `fasop`, `megatron` and `varuna`
differ in what they enumerate; `staged` ranks it by one closed form and predicts the first few.
`autohet` reads no clock, so equal input gives the equal plan in every process. `metis`, `fasop` and
`hap` end at `time_limit_s`; `Request.deadline_s` ends every strategy with its best plan so far.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from planner.cost.model import CostModel
from planner.errors import ConfigError, InfeasibleError
from planner.plans.plan import Plan, Stage
from planner.plans.plan_checks import check_plan
from planner.search.problem import limits
from planner.search.problem.request import (
    TIME_IS_OVER,
    Answer,
    Idle,
    Rejected,
    Request,
    Search,
    SearchReport,
    with_cut,
)
from planner.search.walk.judge import describe
from planner.strategies.autohet_uneven import search_with_uneven
from planner.strategies.dispatch import dispatch_reason
from planner.strategies.exhaustive import search_exhaustive
from planner.strategies.fasop import search_fasop
from planner.strategies.formats import search_formats
from planner.strategies.hap import search_hap
from planner.strategies.metis import search_metis
from planner.strategies.pareto import search_objective
from planner.strategies.staged import search_megatron, search_varuna
from planner.strategies.zones import search_zones

STRATEGIES: dict[str, Search] = {
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
    """Return the best plan that the strategy finds for the request's objective.

    With objective "pareto" `Answer.front` is the front.

    Raises:
        InfeasibleError: no plan fits.
        ConfigError: the strategy is unknown, or answered with a plan that does not do the work.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy '{strategy}' does not exist; strategies are: {', '.join(STRATEGIES)}"
        )
    search = partial(search_zones, partial(_in_one_zone, strategy))
    if strategy != "autohet":
        answer = search(request)
    else:
        answer = _or_offloading(search, request)
    check_answer(strategy, request, answer)
    return _with_reasons(request, with_cut(request, answer))


def _or_offloading(search: Search, request: Request) -> Answer:
    """Return the search's answer; if nothing fits, one that uses host memory.

    Inputs of blocks are moved there first, since their copies run beside the passes.
    """
    try:
        return search_formats(search, request)
    except InfeasibleError as error:
        refusal = error
    for cost in _costs_with_host_memory(request):
        try:
            return _with_price(search(replace(request, cost=cost)))
        except InfeasibleError:
            continue
    # of the plans that the job asks for
    raise refusal


def _costs_with_host_memory(request: Request) -> Iterator[CostModel]:
    """Yield the cost models of plans that use host memory as the job allows, the fastest first."""
    # on a CPU all memory is host memory
    if "CPU" in request.fleet.gpu_types:
        return
    cost = request.cost
    if cost.choices.offload_inputs:
        cost = cost.with_offloaded_inputs()
        yield cost
    if cost.choices.offload and not cost.parameters.offload_optimizer:
        yield cost.with_offloading()


def _search_or(refusal: InfeasibleError, search: Search, request: Request) -> Answer:
    """Return the search's answer; raise the first refusal if nothing fits here either.

    That one is of the plans that the job asks for.
    """
    try:
        return search(request)
    except InfeasibleError:
        raise refusal from None


def _with_reasons(request: Request, answer: Answer) -> Answer:
    """Return the answer with each stage's format, and why tokens reach experts as they do."""
    answer = _with_formats(request, answer)
    why = dispatch_reason(request.cost, answer.plan)
    return answer.add_reason(why) if why else answer


def _with_formats(request: Request, answer: Answer) -> Answer:
    """Return the answer with the format of each stage in its plans."""
    if not request.cost.formats:
        return answer

    with_formats = request.cost.stage_choices.with_formats
    plan = with_formats(answer.plan)
    prediction = replace(answer.prediction, plan=plan)
    candidates = tuple(with_formats(each) for each in answer.candidates)
    changed = replace(answer, plan=plan, prediction=prediction, candidates=candidates)
    return changed.with_front(lambda each: _with_formats(request, each))


def _in_one_zone(strategy: str, request: Request) -> Answer:
    answer = _or_cutting_sequences(strategy, request)
    asks_for_programs = strategy == "autohet" and request.spmd and request.objective == "time"
    # a program's state lies on the GPUs
    if asks_for_programs and not answer.plan.offloads:
        return _or_program(answer, request)
    return answer


def _with_price(answer: Answer) -> Answer:
    """Return the answer with the price of what lies in host memory."""
    what = list[str]()
    if any(stage.recompute == "offload" for stage in answer.plan.stages):
        what.append("inputs of blocks, which are copied beside the passes, lie in host memory")
    if answer.plan.offloads:
        update_s = answer.prediction.breakdown_s["optimizer"]
        what.append(
            "masters and moments lie in host memory: their update there"
            f" takes {update_s:.3g} s of each step's {answer.step_time_s:.3g} s"
        )
    priced = answer.with_front(_with_price)
    if not what:
        return priced
    return priced.add_reason(f"no plan fits the GPUs unless {', and '.join(what)}")


def _or_cutting_sequences(strategy: str, request: Request) -> Answer:
    """Return the strategy's answer; if nothing fits, one of sequence-parallel stages."""
    search = partial(search_objective, STRATEGIES[strategy], may_idle=strategy in MAY_IDLE)
    try:
        return search(request)
    except InfeasibleError as refusal:
        if not _may_cut_sequences(request):
            raise
        cutting = replace(request, cost=request.cost.with_cut_sequences())
        answer = _search_or(refusal, search, cutting)
    candidates = tuple(_with_cut_sequences(plan) for plan in answer.candidates)
    marked = _mark_cut(answer).with_front(_mark_cut)
    return replace(marked, candidates=candidates)


def _may_cut_sequences(request: Request) -> bool:
    if not request.cost.parameters.may_cut_sequence:
        return False

    # stages that recompute selectively do not cut the sequence
    ways = request.cost.choices.recompute
    return any(way != "selective" for way in ways)


def _mark_cut(answer: Answer) -> Answer:
    """Return the answer with sequence-parallel stages in its plan, and the reason for them."""
    plan = _with_cut_sequences(answer.plan)
    prediction = replace(answer.prediction, plan=plan)
    marked = replace(answer, plan=plan, prediction=prediction)
    return marked.add_reason("no plan fits unless tensor-parallel stages cut the sequence")


def _with_cut_sequences(plan: Plan) -> Plan:
    """Return the plan whose tensor-parallel stages are sequence parallel."""

    def cut(stage: Stage) -> Stage:
        cuts_sequence = stage.tp_degree > 1 and stage.recompute != "selective"
        return replace(stage, sequence_parallel=cuts_sequence)

    return plan.map_stages(cut)


def _or_program(answer: Answer, request: Request) -> Answer:
    """Return the fastest SPMD program instead if it is clearly faster than the best pipelines.

    Either answer says how slow the other one is.
    """
    pipelines_s = answer.step_time_s
    if request.is_late:
        return answer.add_rejected(Rejected("one SPMD program", TIME_IS_OVER))
    try:
        other = search_objective(search_hap, request)
    except InfeasibleError as error:
        return answer.add_rejected(Rejected("one SPMD program", str(error)))

    program_s = other.step_time_s
    if program_s > pipelines_s / limits.MIN_SPEEDUP:
        why = (
            f"{program_s:.4g} s a step, not {limits.MIN_SPEEDUP - 1:.0%} faster than pipelines with"
            f" {pipelines_s:.4g} s"
        )
        return answer.add_rejected(Rejected("one SPMD program on uneven shares", why))

    why = f"{pipelines_s:.4g} s a step, the program on uneven shares takes {program_s:.4g} s"
    rejected = (Rejected(f"the best pipelines: {describe(answer.plan)}", why), *other.rejected)
    return replace(other, strategy="autohet", rejected=rejected)


def check_answer(strategy: str, request: Request, answer: Answer) -> None:
    """Check that each plan of the answer does the work that was asked for, on the fleet's workers.

    A plan that leaves sequences out is costed as the faster one, so nothing else would show it.

    Raises:
        ConfigError: a plan is not whole, or is one of another request; names the strategy.
    """
    for each in (answer, *answer.front):
        try:
            _check_plan(request, each.plan)
        except ConfigError as error:
            raise ConfigError(
                f"strategy '{strategy}' answered with a wrong plan: {error}; correct the strategy,"
                " or choose another one"
            ) from error


def _check_plan(request: Request, plan: Plan) -> None:
    check_plan(plan, request.spec.num_layers)
    if plan.global_batch_sequences != request.global_batch_sequences:
        raise ConfigError(
            f"its global_batch_sequences is {plan.global_batch_sequences}, but the request's is"
            f" {request.global_batch_sequences}"
        )

    asked = request.microbatch_sequences
    sizes = plan.microbatch_sizes
    if asked is not None and sizes != [asked]:
        raise ConfigError(
            f"its microbatches have {sizes} sequences, but the request's have {asked}"
        )

    strangers = sorted(set(plan.workers).difference(request.fleet.workers))
    if strangers:
        raise ConfigError(f"worker '{strangers[0]}' is not in the fleet")
