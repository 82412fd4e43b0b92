"""Step time against price: the Pareto front over numbers of nodes, and the cheapest plan per
token.
"""

import itertools
import math
from dataclasses import replace
from typing import TypeVar

from planner.errors import ConfigError, InfeasibleError
from planner.inputs.fleet import Fleet
from planner.search.problem import limits
from planner.search.problem.request import (
    TIME_IS_OVER,
    Answer,
    Rejected,
    Request,
    Search,
    narrow_to,
)
from planner.strategies.fasop import fleets_up_to
from planner.strategies.fleets import (
    FleetSearch,
    FleetSpace,
    cheapest,
    fastest,
    thinned_counts,
)
from planner.strategies.front import Front

T = TypeVar("T")


def pareto_front(
    search: Search, request: Request, *, may_idle: bool = True
) -> tuple[list[Answer], FleetSearch]:
    """Return the plans that no other beats in both step time and hourly price, fastest first.

    may_idle: the search may leave nodes idle, so that a node more makes no plan slower. Fleets are
    then searched in full from the fast end (`planner.strategies.front`). Else, or if the budget
    ends that, drafts are compared.

    Raises:
        ConfigError: a node has no price.
    """
    require_prices(request)
    space = FleetSpace(request)
    found = FleetSearch(search, space, _step_time_s)
    if not may_idle:
        return drop_dominated(_from_drafts(search, found)), found

    front = Front(found, thinned_counts(space.most, limits.FRONT_FLEETS))
    answers = front.plans()
    found.is_complete = front.has_all and not front.is_cut
    if front.is_cut:
        answers += _from_drafts(search, found)
    return drop_dominated(answers), found


def _from_drafts(search: Search, found: FleetSearch) -> list[Answer]:
    """Return answers of fleets compared by their drafts, and of the cheapest per token.

    The fleets are visited so that those seen at any moment are spread over the range, the whole
    fleet first. It is searched in full.
    """
    space = found.space
    every = itertools.product(*thinned_counts(space.most, limits.DRAFTED_FLEETS))
    for counts in spread(space.keep_allowed(every)):
        found.look(counts)

    by_token = cheapest(search, space, usd_per_token)
    whole = space.most if space.allows(space.most) else None
    answers = [*found.finish(also=whole), *by_token.finish()]
    found.answers |= by_token.answers
    return answers


def require_prices(request: Request) -> None:
    """Raise ConfigError if a node has no price."""
    for node in request.fleet.nodes:
        if node.node_type.usd_per_hour is None:
            raise ConfigError(
                f"node type '{node.node_type.name}' has no price; set the label"
                " 'autohet.io/usd-per-hour' to plan by cost"
            )


def usd_per_token(answer: Answer) -> float:
    return answer.prediction.usd_per_million_tokens or 0.0


def _usd_per_hour(answer: Answer) -> float:
    return answer.prediction.usd_per_hour or 0.0


def _step_time_s(answer: Answer) -> float:
    return answer.step_time_s


def spread(fleets: list[T]) -> list[T]:
    """Return the last fleet (the whole one) first, then the others spread over their order.

    They follow in steps of about the golden section of their number, so that any first few of them
    are spread over the order that they came in.
    """
    if len(fleets) < 3:
        return fleets[::-1]

    *others, whole = fleets
    number = len(others)

    # without a common divisor, so that the steps come to each of them once
    step = round(number * 0.618)
    while math.gcd(step, number) != 1:
        step += 1
    places = [(i + 1) * step % number for i in range(number)]
    return [whole, *(others[place] for place in places)]


def drop_dominated(answers: list[Answer]) -> list[Answer]:
    """Return the answers that no other beats in both step time and price, fastest first."""
    ordered = sorted(answers, key=lambda answer: (answer.step_time_s, _usd_per_hour(answer)))
    front: list[Answer] = []
    for answer in ordered:
        is_cheaper = not front or _usd_per_hour(answer) < _usd_per_hour(front[-1]) - 1e-9
        if is_cheaper:
            front.append(answer)
    return front


def search_objective(search: Search, request: Request, *, may_idle: bool = True) -> Answer:
    """Return the answer for the request's objective.

    For "pareto" it is the fastest of the front, with the front attached. may_idle: see
    `pareto_front`.
    """
    if request.objective == "time" and may_use_all(request):
        return search(request)

    front: list[Answer] = []
    if request.objective == "pareto":
        front, found = pareto_front(search, request, may_idle=may_idle)
        best = front[0] if front else None
    elif request.objective == "cost":
        require_prices(request)
        found = cheapest(search, FleetSpace(request), usd_per_token)
        best = min(found.finish(), key=_cheapest_then_fastest, default=None)
    else:
        if request.max_usd_per_hour is not None:
            require_prices(request)
        found = fastest(search, FleetSpace(request), _step_time_s)
        best = min(found.finish(), key=_step_time_s, default=None)

    if best is None:
        raise _refusal(search, request, found)
    return _with_report(best, front, found)


def may_use_all(request: Request) -> bool:
    """Return True if the whole fleet is within the price limit and the bound on nodes."""
    if request.bound is not None and not request.bound.allows_fleet(request.fleet):
        return False
    most = request.max_usd_per_hour
    price = request.fleet.usd_per_hour()
    return most is None or (price is not None and price <= most)


def _cheapest_then_fastest(answer: Answer) -> tuple[float, float]:
    return usd_per_token(answer), answer.step_time_s


def _with_report(best: Answer, front: list[Answer], found: FleetSearch) -> Answer:
    """Return the answer with its front, and how many of the fleets were looked at."""
    request = found.space.request
    looked_at = len(found.answers)
    every = found.space.number()
    report = replace(
        best.search,
        seconds=request.clock() - found.begin_s,
        plans_evaluated=sum(answer.search.plans_evaluated for answer in found.found),
        fleets_searched=looked_at,
        fleets=every,
    )
    choice = f"{best.choice}; {looked_at} of {every} fleets were looked at"
    if found.is_complete:
        choice += ", the others are parts of these"

    answer = replace(best, search=report, choice=choice, front=tuple(front))
    if not request.is_late:
        return answer
    left = f"{every - looked_at} of {every} fleets"
    return answer.add_rejected(Rejected(left, TIME_IS_OVER))


def _refusal(search: Search, request: Request, found: FleetSearch) -> InfeasibleError:
    """Return why no fleet has a plan: its price, else what refused the largest that may exist."""
    if request.max_usd_per_hour is None and found.refusal is not None:
        return found.refusal
    return InfeasibleError(_why_none(search, request))


def _why_none(search: Search, request: Request) -> str:
    """Explain that no fleet within the price trains the model; name the price of one that does."""
    limit = request.max_usd_per_hour
    if limit is None:
        return "no number of these nodes can train the model; add nodes"

    unlimited = replace(
        request, objective="time", max_usd_per_hour=None, time_limit_s=limits.MIN_SEARCH_S
    )
    fleets = fleets_up_to(request.fleet, limits.EXPLAINED_FLEETS)
    for fleet in sorted(fleets, key=_price_of):
        if _price_of(fleet) <= limit:
            continue
        try:
            answer = search(narrow_to(unlimited, fleet))
        except InfeasibleError:
            continue

        # the plan may leave nodes of the fleet idle
        price = answer.prediction.usd_per_hour or _price_of(fleet)
        return (
            f"no number of these nodes for at most {limit:.2f} $/h can train the model; the"
            f" cheapest found that can costs {price:.2f} $/h, {price - limit:.2f} more"
        )
    return (
        f"no number of these nodes can train the model, whatever max_usd_per_hour ({limit:.2f});"
        " add nodes"
    )


def _price_of(fleet: Fleet) -> float:
    return fleet.usd_per_hour() or 0.0
