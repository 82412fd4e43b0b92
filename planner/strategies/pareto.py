"""Step time against price: the Pareto front over numbers of nodes, and the cheapest plan per
token.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import TypeVar

from planner.errors import ConfigError, InfeasibleError
from planner.search import limits
from planner.search.problem import TIME_IS_OVER, Answer, Rejected, Request, narrowed
from planner.strategies.fasop import fleets_up_to
from planner.strategies.fleets import FleetSearch, FleetSpace, cheapest, fastest
from planner.strategies.front import Front

T = TypeVar("T")

Search = Callable[[Request], Answer]


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
    found = FleetSearch(search, space, lambda answer: answer.prediction.step_time_s)
    answers: list[Answer] = []
    if may_idle:
        front = Front(found, _steps(space, limits.FRONT_FLEETS))
        answers = front.plans()
        found.is_complete = front.has_all and not front.is_cut
    if not may_idle or front.is_cut:
        answers += _from_drafts(search, found)
    return undominated(answers), found


def _from_drafts(search: Search, found: FleetSearch) -> list[Answer]:
    """Return answers of fleets compared by their drafts, and of the cheapest per token.

    The fleets are visited so that those seen at any moment are spread over the range, the whole
    fleet first. It is searched in full.
    """
    space = found.space
    every = itertools.product(*_steps(space, limits.DRAFTED_FLEETS))
    for counts in spread([counts for counts in every if space.allows(counts)]):
        found.look(counts)
    by_token = cheapest(search, space, usd_per_token)
    whole = space.most if space.allows(space.most) else None
    answers = [*found.finish(also=whole), *by_token.finish()]
    found.answers |= by_token.answers
    return answers


def _steps(space: FleetSpace, fleets: int) -> list[list[int]]:
    """Return the numbers of nodes of each machine for at most `fleets` fleets.

    Every second number of the widest is left out until they are few.
    """
    steps = [list(range(most + 1)) for most in space.most]
    while math.prod(map(len, steps)) > fleets and max(map(len, steps)) > 3:
        widest = max(range(len(steps)), key=lambda i: (len(steps[i]), -i))
        steps[widest] = sorted({*steps[widest][::2], steps[widest][-1]})
    return steps


def require_prices(request: Request) -> None:
    """ConfigError where a node has no price."""
    for node in request.fleet.nodes:
        if node.node_type.usd_per_hour is None:
            raise ConfigError(
                f"node type '{node.node_type.name}' has no price; set the label"
                " 'autohet.io/usd-per-hour' to plan by cost"
            )


def usd_per_token(answer: Answer) -> float:
    return answer.prediction.usd_per_million_tokens or 0.0


def spread(fleets: list[T]) -> list[T]:
    """The last (the whole fleet) first, then the others in steps of about the golden section of
    their number: any first few of them are spread over the order that they came in.
    """
    if len(fleets) < 3:
        return fleets[::-1]
    others = fleets[:-1]
    whole = fleets[-1]
    step = round(len(others) * 0.618)
    while math.gcd(step, len(others)) != 1:
        step += 1
    return [whole, *(others[(i + 1) * step % len(others)] for i in range(len(others)))]


def undominated(answers: list[Answer]) -> list[Answer]:
    """Return the answers that no other beats in both step time and price, fastest first."""
    ordered = sorted(
        answers, key=lambda a: (a.prediction.step_time_s, a.prediction.usd_per_hour or 0.0)
    )
    front: list[Answer] = []
    for answer in ordered:
        price = answer.prediction.usd_per_hour or 0.0
        if not front or price < (front[-1].prediction.usd_per_hour or 0.0) - 1e-9:
            front.append(answer)
    return front


def search_objective(search: Search, request: Request, *, may_idle: bool = True) -> Answer:
    """Return the answer for the request's objective.

    For "pareto" it is the fastest of the front, with the front attached. may_idle: see
    `pareto_front`.
    """
    whole = request.fleet.usd_per_hour()
    most = request.max_usd_per_hour
    within = most is None or (whole is not None and whole <= most)
    within = within and (request.bound is None or request.bound.allows_fleet(request.fleet))
    if request.objective == "time" and within:
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
        if most is not None:
            require_prices(request)
        found = fastest(search, FleetSpace(request), lambda a: a.prediction.step_time_s)
        best = min(found.finish(), key=lambda a: a.prediction.step_time_s, default=None)
    if best is None:
        raise _refusal(search, request, found)
    return _reported(best, front, found)


def _cheapest_then_fastest(answer: Answer) -> tuple[float, float]:
    return usd_per_token(answer), answer.prediction.step_time_s


def _reported(best: Answer, front: list[Answer], found: FleetSearch) -> Answer:
    """The answer with its front, and how many of the fleets were looked at."""
    begun = found.space.request.clock() - found.begin_s
    every = found.space.number()
    report = dataclasses.replace(
        best.search,
        seconds=begun,
        plans_evaluated=sum(a.search.plans_evaluated for a in found.answers.values() if a),
        fleets_searched=len(found.answers),
        fleets=every,
    )
    choice = f"{best.choice}; {len(found.answers)} of {every} fleets were looked at"
    if found.is_complete:
        choice += ", the others are parts of these"
    rejected = best.rejected
    if found.space.request.is_late:
        left = f"{every - len(found.answers)} of {every} fleets"
        rejected = (*rejected, Rejected(left, TIME_IS_OVER))
    return dataclasses.replace(
        best, search=report, choice=choice, rejected=rejected, front=tuple(front)
    )


def _refusal(search: Search, request: Request, found: FleetSearch) -> InfeasibleError:
    """Why no fleet has a plan: its price, else what refused the largest that may exist."""
    if request.max_usd_per_hour is None and found.refusal is not None:
        return found.refusal
    return InfeasibleError(_why_none(search, request))


def _why_none(search: Search, request: Request) -> str:
    """Explain that no fleet within the price trains the model; name the price of one that does."""
    limit = request.max_usd_per_hour
    if limit is None:
        return "no number of these nodes can train the model; add nodes"
    fleets = fleets_up_to(request.fleet, limits.EXPLAINED_FLEETS)
    unlimited = dataclasses.replace(
        request, objective="time", max_usd_per_hour=None, time_limit_s=limits.MIN_SEARCH_S
    )
    for fleet in sorted(fleets, key=lambda fleet: fleet.usd_per_hour() or 0.0):
        if (price := fleet.usd_per_hour() or 0.0) <= limit:
            continue
        try:
            price = search(narrowed(unlimited, fleet)).prediction.usd_per_hour or price
        except InfeasibleError:
            continue
        return (
            f"no number of these nodes for at most {limit:.2f} $/h can train the model; the"
            f" cheapest found that can costs {price:.2f} $/h, {price - limit:.2f} more"
        )
    return (
        f"no number of these nodes can train the model, whatever max_usd_per_hour ({limit:.2f});"
        " add nodes"
    )
