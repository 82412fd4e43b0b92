"""Searches of fleets whose GPU types compute in several formats.

A fleet's part that computes in the job's precision is searched alone, too: it shows what the other
types gain, and no larger fleet gets a worse plan than its part.
"""

from dataclasses import replace

from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet
from planner.plans.formats import can_compute
from planner.search.problem.request import Answer, Rejected, Request, Search, narrow_to
from planner.search.walk.judge import describe
from planner.strategies.pareto import usd_per_token


def search_formats(search: Search, request: Request) -> Answer:
    """Return the better plan of the whole fleet and of its part with units for the precision.

    Raises:
        InfeasibleError: none fits.
    """
    part = _with_units(request)
    if part is None or request.objective == "pareto":
        return search(request)
    try:
        whole = search(request)
    except InfeasibleError:
        # Seldom: a smaller fleet has other groups.
        return _idle_rest(request, search(narrow_to(request, part)), "no plan found uses them")
    if request.is_late:
        return whole
    try:
        other = search(narrow_to(request, part))
    except InfeasibleError as error:
        if not _uses_others(request, whole):
            return whole
        others = _others(request)
        left = Rejected(f"a plan without {others}", str(error))
        reason = f"{others} are needed: no plan fits without"
        return whole.add_rejected(left).add_reason(reason)
    return _better(request, whole, other)


def _with_units(request: Request) -> Fleet | None:
    """Return the nodes whose GPUs have units for the precision; None if these are all or none."""
    left = []
    is_any_in_another_format = False
    for node in request.fleet.nodes:
        gpu_type = node.node_type.gpu_type
        if can_compute(gpu_type, request.cost.precision):
            left.append(node)
        elif gpu_type in request.cost.formats:
            is_any_in_another_format = True

    if not left or not is_any_in_another_format:
        return None
    return Fleet(request.fleet.generation, tuple(left))


def _uses_others(request: Request, answer: Answer) -> bool:
    """Return True if some GPU of the plan lacks units for the precision."""
    used = request.fleet.gpu_types_of(answer.plan.workers)
    return not all(can_compute(gpu_type, request.cost.precision) for gpu_type in used)


def _others(request: Request) -> str:
    """Return the GPU types without units for the precision, with their formats, as a phrase."""
    precision = request.cost.precision
    by_format: dict[str, list[str]] = {}
    for gpu_type in sorted(request.fleet.gpu_types):
        if not can_compute(gpu_type, precision):
            compute = request.cost.formats.get(gpu_type, precision)
            by_format.setdefault(compute, []).append(gpu_type)

    phrases = [
        f"{' and '.join(gpu_types)} in {compute}" for compute, gpu_types in by_format.items()
    ]
    return ", ".join(phrases)


def _better(request: Request, whole: Answer, other: Answer) -> Answer:
    """Return the better answer, which says what the plan with the other types gains."""
    report = replace(
        whole.search,
        seconds=whole.search.seconds + other.search.seconds,
        plans_evaluated=whole.search.plans_evaluated + other.search.plans_evaluated,
    )
    whole = replace(whole, search=report, without_formats=other.prediction)
    whole_step = f"{whole.step_time_s:.4g} s a step"
    other_step = f"{other.step_time_s:.4g} s a step"

    if request.objective == "cost":
        is_worse = usd_per_token(other) < usd_per_token(whole)
    else:
        is_worse = other.step_time_s < whole.step_time_s
    if not is_worse:
        if not _uses_others(request, whole):
            return whole
        others = _others(request)
        gain = f"{others}: {_speed(whole)}, without {_speed(other)}"
        return whole.add_rejected(Rejected(f"a plan without {others}", other_step)).add_reason(gain)

    # the bound is that of the whole fleet
    bound_s = report.lower_bound_s
    gap = None if bound_s is None else other.step_time_s / bound_s - 1
    what = f"with {_others(request)}: {describe(whole.plan)}"
    chosen = replace(other, search=replace(report, gap=gap))
    chosen = chosen.add_rejected(Rejected(what, whole_step))
    return _idle_rest(request, chosen, "plans found with them are no better")


def _speed(answer: Answer) -> str:
    usd = answer.prediction.usd_per_million_tokens
    price = "" if usd is None else f" for {usd:.3g} $/M tokens"
    return f"{answer.step_time_s:.4g} s a step{price}"


def _idle_rest(request: Request, answer: Answer, why: str) -> Answer:
    """Return the answer of a part of the fleet with the other workers idle."""
    return answer.add_idle(request.workers_beside(answer.known_workers), why)
