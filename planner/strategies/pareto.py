"""Step time against price: the Pareto front over numbers of nodes, and the cheapest plan per token."""

import dataclasses
from collections.abc import Callable

from planner.errors import ConfigError, InfeasibleError
from planner.strategies.fasop import fleets_up_to, narrowed
from planner.strategies.request import Answer, Request

Search = Callable[[Request], Answer]


def pareto_front(search: Search, request: Request, most_fleets: int = 100) -> list[Answer]:
    """Plans of which none is both faster and cheaper an hour than another, fastest first. ConfigError where a node
    has no price.
    """
    for node in request.fleet.nodes:
        if node.node_type.usd_per_hour is None:
            raise ConfigError(
                f"node type '{node.node_type.name}' has no price; set the label 'autohet.io/usd-per-hour' to plan by cost"
            )
    begin = request.clock()
    answers: list[Answer] = []
    for fleet in fleets_up_to(request.fleet, most_fleets):
        price = sum(node.node_type.usd_per_hour or 0.0 for node in fleet.nodes)
        if request.max_usd_per_hour is not None and price > request.max_usd_per_hour:
            continue
        try:
            answers.append(search(dataclasses.replace(narrowed(request, fleet), objective="time")))
        except InfeasibleError:
            continue
        if request.clock() - begin > request.time_limit_s:
            break
    return undominated(answers)


def undominated(answers: list[Answer]) -> list[Answer]:
    """Those that no other beats in both step time and price, fastest first."""
    ordered = sorted(answers, key=lambda a: (a.prediction.step_time_s, a.prediction.usd_per_hour or 0.0))
    front: list[Answer] = []
    for answer in ordered:
        price = answer.prediction.usd_per_hour or 0.0
        if not front or price < (front[-1].prediction.usd_per_hour or 0.0) - 1e-9:
            front.append(answer)
    return front


def search_objective(search: Search, request: Request) -> Answer:
    """The answer for the request's objective; for "pareto" the fastest of the front, with the front attached."""
    if request.objective == "time" and request.max_usd_per_hour is None:
        return search(request)
    if request.objective == "time":
        whole = request.fleet.usd_per_hour()
        if whole is not None and request.max_usd_per_hour is not None and whole <= request.max_usd_per_hour:
            return search(request)
    front = pareto_front(search, request)
    if not front:
        limit = request.max_usd_per_hour
        text = f" for at most {limit:.2f} $/h" if limit is not None else ""
        raise InfeasibleError(
            f"no number of these nodes{text} can train the model; raise max_usd_per_hour or add nodes"
        )
    if request.objective == "cost":
        best = min(front, key=lambda a: (a.prediction.usd_per_million_tokens or 0.0, a.prediction.step_time_s))
    else:
        best = front[0]
    return dataclasses.replace(best, front=tuple(front))
