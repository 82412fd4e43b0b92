"""Searches of fleets whose GPU types compute in several formats.

A fleet's part that computes in the job's precision is searched alone, too: it shows what the other
types gain, and no larger fleet gets a worse plan than its part.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.cluster import Fleet
from planner.errors import InfeasibleError
from planner.formats import can_compute
from planner.search.judge import describe
from planner.search.problem import Answer, Idle, Rejected, Request, narrowed
from planner.strategies.pareto import usd_per_token

Search = Callable[[Request], Answer]


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
        return _idle_rest(request, search(narrowed(request, part)), "no plan found uses them")
    if request.is_late:
        return whole
    try:
        other = search(narrowed(request, part))
    except InfeasibleError as error:
        if not _uses_others(request, whole):
            return whole
        why = Rejected(f"a plan without {_others(request)}", str(error))
        choice = f"{_others(request)} are needed: no plan fits without"
        return replace(whole, rejected=(*whole.rejected, why), choice=_and(whole.choice, choice))
    return _better(request, whole, other)


def _with_units(request: Request) -> Fleet | None:
    """Return the nodes whose GPUs have units for the precision; None if these are all or none."""
    precision = request.cost.precision
    nodes = request.fleet.nodes
    left = tuple(node for node in nodes if can_compute(node.node_type.gpu_type, precision))
    formats = request.cost.formats
    gone = [node for node in nodes if node not in left and node.node_type.gpu_type in formats]
    return Fleet(request.fleet.generation, left) if left and gone else None


def _uses_others(request: Request, answer: Answer) -> bool:
    types = {request.fleet.gpu_type(worker) for worker in answer.plan.workers}
    return not all(can_compute(each, request.cost.precision) for each in types)


def _others(request: Request) -> str:
    """Return the GPU types without units for the precision, with their formats, as a phrase."""
    types = {node.node_type.gpu_type for node in request.fleet.nodes}
    by_format: dict[str, list[str]] = {}
    for gpu_type in sorted(types):
        if not can_compute(gpu_type, request.cost.precision):
            compute = request.cost.formats.get(gpu_type, request.cost.precision)
            by_format.setdefault(compute, []).append(gpu_type)
    return ", ".join(f"{' and '.join(each)} in {f}" for f, each in by_format.items())


def _better(request: Request, whole: Answer, other: Answer) -> Answer:
    """Return the better answer, which says what the plan with the other types gains."""
    ours = whole.prediction.step_time_s
    theirs = other.prediction.step_time_s
    report = replace(
        whole.search,
        seconds=whole.search.seconds + other.search.seconds,
        plans_evaluated=whole.search.plans_evaluated + other.search.plans_evaluated,
    )
    whole = replace(whole, search=report, without_formats=other.prediction)
    by_price = request.objective == "cost"
    is_worse = usd_per_token(other) < usd_per_token(whole) if by_price else theirs < ours
    if not is_worse and not _uses_others(request, whole):
        return whole
    if not is_worse:
        gain = f"{_others(request)}: {_speed(whole)}, without {_speed(other)}"
        why = Rejected(f"a plan without {_others(request)}", f"{theirs:.4g} s a step")
        return replace(whole, rejected=(*whole.rejected, why), choice=_and(whole.choice, gain))
    bound = report.lower_bound_s
    report = replace(report, gap=None if bound is None else theirs / bound - 1)
    why = Rejected(f"with {_others(request)}: {describe(whole.plan)}", f"{ours:.4g} s a step")
    chosen = replace(other, search=report, rejected=(*other.rejected, why))
    return _idle_rest(request, chosen, "plans found with them are no better")


def _speed(answer: Answer) -> str:
    usd = answer.prediction.usd_per_million_tokens
    price = "" if usd is None else f" for {usd:.3g} $/M tokens"
    return f"{answer.prediction.step_time_s:.4g} s a step{price}"


def _idle_rest(request: Request, answer: Answer, why: str) -> Answer:
    """Return the answer of a part of the fleet with the other workers idle."""
    known = {*answer.plan.workers, *(w for idle in answer.idle for w in idle.workers)}
    rest = tuple(worker for worker in request.fleet.workers if worker not in known)
    return replace(answer, idle=(*answer.idle, Idle(rest, why)) if rest else answer.idle)


def _and(choice: str, more: str) -> str:
    return f"{choice}; {more}" if choice else more
