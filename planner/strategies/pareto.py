"""Step time against price: the Pareto front over numbers of nodes, and the cheapest plan per
token.
"""

import dataclasses
import math
from collections.abc import Callable

from planner.cluster import Fleet
from planner.errors import ConfigError, InfeasibleError
from planner.search import limits
from planner.search.problem import Answer, Request, narrowed
from planner.strategies.fasop import fleets_up_to

Search = Callable[[Request], Answer]


def pareto_front(search: Search, request: Request, most_fleets: int = 100) -> list[Answer]:
    """Plans of which none is both faster and cheaper an hour than another, fastest first.
    ConfigError where a node has no price.

    Under a time limit the fleets are visited so that those seen at any moment lie all over the
    range, the whole fleet first, and each search has its share of the time that is left.
    """
    for node in request.fleet.nodes:
        if node.node_type.usd_per_hour is None:
            raise ConfigError(
                f"node type '{node.node_type.name}' has no price; set the label"
                " 'autohet.io/usd-per-hour' to plan by cost"
            )
    begin = request.clock()
    answers: list[Answer] = []
    fleets = spread(list(fleets_up_to(request.fleet, most_fleets)))
    for index, fleet in enumerate(fleets):
        left_s = request.time_limit_s - (request.clock() - begin)
        if left_s <= 0 and answers:
            break
        price = fleet.usd_per_hour() or 0.0
        if request.max_usd_per_hour is not None and price > request.max_usd_per_hour:
            continue
        if request.bound is not None and not request.bound.allows_fleet(fleet):
            continue
        try:
            share_s = max(limits.MIN_SEARCH_S, limits.SEARCH_SHARE * left_s / (len(fleets) - index))
            asked = dataclasses.replace(
                narrowed(request, fleet), objective="time", time_limit_s=min(left_s, share_s)
            )
            answers.append(search(asked))
        except InfeasibleError:
            continue
    return undominated(answers)


def spread(fleets: list[Fleet]) -> list[Fleet]:
    """The last (the whole fleet) first, then the others in steps of about the golden section of
    their number: any first few of them are spread over the order that they came in.
    """
    if len(fleets) < 3:
        return fleets[::-1]
    others, whole = fleets[:-1], fleets[-1]
    step = round(len(others) * 0.618)
    while math.gcd(step, len(others)) != 1:
        step += 1
    return [whole, *(others[(i + 1) * step % len(others)] for i in range(len(others)))]


def undominated(answers: list[Answer]) -> list[Answer]:
    """Those that no other beats in both step time and price, fastest first."""
    ordered = sorted(
        answers, key=lambda a: (a.prediction.step_time_s, a.prediction.usd_per_hour or 0.0)
    )
    front: list[Answer] = []
    for answer in ordered:
        price = answer.prediction.usd_per_hour or 0.0
        if not front or price < (front[-1].prediction.usd_per_hour or 0.0) - 1e-9:
            front.append(answer)
    return front


def search_objective(search: Search, request: Request) -> Answer:
    """The answer for the request's objective; for "pareto" the fastest of the front, with the front
    attached.
    """
    whole, most = request.fleet.usd_per_hour(), request.max_usd_per_hour
    within = most is None or (whole is not None and whole <= most)
    within = within and (request.bound is None or request.bound.allows_fleet(request.fleet))
    if request.objective == "time" and within:
        return search(request)
    request = dataclasses.replace(request, prove=False)  # many fleets are searched
    front = pareto_front(search, request)
    if not front:
        raise InfeasibleError(_why_none(search, request))
    if request.objective == "cost":
        best = min(
            front,
            key=lambda a: (a.prediction.usd_per_million_tokens or 0.0, a.prediction.step_time_s),
        )
    else:
        best = front[0]
    return dataclasses.replace(best, front=tuple(front))


def _why_none(search: Search, request: Request) -> str:
    """That no fleet within the price trains the model, and the price of one that does."""
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
