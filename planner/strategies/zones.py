"""Plans of a fleet whose nodes are in several zones.

Three searches are compared: the fleet as if it were in one zone, each zone by itself, and zones
together at the true cost of the data between them. The best of their plans is the answer. So a plan
is never dearer than the one that a planner without zones would have chosen. The bound is the first
search's, which holds for any zones.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet
from planner.search.problem import limits
from planner.search.problem.request import Answer, Idle, Rejected, Request, Search, narrow_to
from planner.search.walk.judge import describe, unacceptable, zones_of
from planner.strategies.pareto import drop_dominated, usd_per_token


def search_zones(search: Search, request: Request) -> Answer:
    """Return the search's answer; over several zones the best of its answers for parts of them.

    Raises:
        InfeasibleError: no part of the fleet may have a plan.
    """
    if not spans_zones(request):
        return search(request)
    return _over_zones(search, request, _blind(search, request))


def _over_zones(search: Search, request: Request, blind: "_Blind") -> Answer:
    known = [*_answers(search, request), *_as_it_is(request, blind)]
    if not known:
        if request.max_transfer_share is not None:
            return _beyond_share(search, request, blind)
        plan = blind.answer.plan
        why = unacceptable(request, plan, request.cost.predict(plan))
        if why is None:
            why = "no zone has enough nodes"
        raise InfeasibleError(
            f"no plan fits into zones that one plan may lie in; over all zones: {why}"
        )

    if request.objective == "pareto":
        front = [_complete(request, each, (), blind) for each in drop_dominated(known)]
        return replace(front[0], front=tuple(front))
    return _complete(request, _best(request, known, blind), known, blind)


def spans_zones(request: Request) -> bool:
    """Return True if the fleet has several zones, so that they matter to the request."""
    return len(request.cost.zones) > 1


def zone_sets(request: Request) -> Iterator[tuple[str, ...]]:
    """Yield sets of the fleet's zones that one plan may lie in.

    First each zone, then the largest sets between all of which data may go.
    """
    zones = request.cost.zones
    table = request.cost.links.zones
    for zone in zones:
        yield (zone,)

    most = min(len(zones), request.max_zones or len(zones))
    kept: list[set[str]] = []
    for size in range(most, 1, -1):
        for some in _largest(request, size):
            is_inside = any(larger.issuperset(some) for larger in kept)
            if is_inside or table.first_unconnected(some):
                continue
            kept.append(set(some))
            yield some
            if len(kept) == limits.ZONE_SETS:
                return


def _largest(request: Request, size: int) -> list[tuple[str, ...]]:
    """Return sets of so many zones, those with the most GPUs first."""
    gpus = dict.fromkeys(request.cost.zones, 0)
    for node in request.fleet.nodes:
        zone = node.node_type.zone
        if zone in gpus:
            gpus[zone] += node.node_type.num_gpus

    def num_gpus(some: tuple[str, ...]) -> int:
        return sum(gpus[zone] for zone in some)

    every = itertools.islice(itertools.combinations(gpus, size), limits.COUNTED_FLEETS)
    return sorted(every, key=num_gpus, reverse=True)


@dataclass(frozen=True)
class _Blind:
    """The answer of a planner without zones; with `plans` the whole front."""

    answer: Answer
    plans: tuple[Answer, ...]


def _blind(search: Search, request: Request) -> _Blind:
    """Search as if all zones were one. InfeasibleError if that finds no plan either."""
    cost = request.cost.without_zones()
    answer = search(replace(request, cost=cost, max_transfer_share=None, max_zones=None))
    return _Blind(answer, tuple(answer.front) or (answer,))


def _as_it_is(request: Request, blind: _Blind) -> list[Answer]:
    """Return the blind plans that may be chosen, at their true price."""
    found = []
    for answer in blind.plans:
        prediction = request.cost.predict(answer.plan)
        may_be_chosen = unacceptable(request, answer.plan, prediction) is None
        if may_be_chosen:
            # `_complete` counts the blind search once for all of its plans
            uncounted = replace(answer.search, seconds=0.0, plans_evaluated=0)
            found.append(replace(answer, prediction=prediction, search=uncounted, front=()))
    return found


def _answers(search: Search, request: Request) -> list[Answer]:
    """Return the answers found in each set of zones."""
    found: list[Answer] = []
    for zones in zone_sets(request):
        if found and request.is_late:
            break  # not before there is a plan
        wanted = {*zones, ""}
        nodes = tuple(node for node in request.fleet.nodes if node.node_type.zone in wanted)
        part = Fleet(request.fleet.generation, nodes)
        try:
            answer = search(narrow_to(request, part))
        except InfeasibleError:
            continue
        if answer.front:
            found += [replace(each, front=()) for each in answer.front]
        else:
            found.append(answer)
    return found


def _beyond_share(search: Search, request: Request, blind: _Blind) -> Answer:
    """Return the best plan at any price, if every plan exceeds the allowed share of transfers."""
    answer = _over_zones(search, replace(request, max_transfer_share=None), blind)
    usd = answer.prediction.transfers_usd_per_hour
    why = (
        f"no plan fits into fewer zones, so {usd:.2f} $/h for data between zones exceed"
        f" {request.max_transfer_share:.0%} of the nodes' price"
    )
    return answer.add_reason(why)


def _best(request: Request, known: list[Answer], blind: _Blind) -> Answer:
    """Return the cheapest plan per token, or the fastest within the price of the blind plan.

    The price is per token; the blind plan counts at its true price.
    """
    if request.objective == "cost":
        return min(known, key=lambda answer: (usd_per_token(answer), answer.step_time_s))

    within = known
    true_usd = request.cost.predict(blind.answer.plan).usd_per_million_tokens
    if true_usd is not None:
        most_usd = true_usd * (1 + 1e-9)
        within = [answer for answer in known if usd_per_token(answer) <= most_usd]

    # none is within where the blind plan may not be chosen
    return min(within or known, key=lambda answer: (answer.step_time_s, usd_per_token(answer)))


def _complete(request: Request, best: Answer, known: Iterable[Answer], blind: _Blind) -> Answer:
    """Complete an answer: the bound for any zones, rejected plans of other zones, idle nodes."""
    of_blind = blind.answer.search
    others = []
    num_tried = of_blind.plans_evaluated
    for each in known:
        num_tried += each.search.plans_evaluated
        if each.plan != best.plan:
            zones = zones_of(request.fleet, each.plan)
            price = each.prediction.usd_per_million_tokens
            why = f"{each.step_time_s:.4g} s a step"
            if price:
                why += f", {price:.3f} $/M tokens"
            others.append(Rejected(f"in {', '.join(zones)}: {describe(each.plan)}", why))

    # zones only make plans slower, so the bound without them holds
    bound_s = of_blind.lower_bound_s
    report = replace(
        best.search,
        plans_evaluated=num_tried,
        seconds=of_blind.seconds + sum(each.search.seconds for each in known),
        lower_bound_s=bound_s,
        gap=None if bound_s is None else best.step_time_s / bound_s - 1,
        proof=of_blind.proof,
    )
    idle = (*best.idle, *_idle(request, best))
    answer = replace(best, search=report, idle=idle)
    return answer.add_rejected(*others).add_reason(_where(request, best))


def _where(request: Request, best: Answer) -> str:
    """Return the zones of a plan, with the price of data between them, as a phrase."""
    zones = zones_of(request.fleet, best.plan)
    where = f"in {', '.join(zones)} of {len(request.cost.zones)} zones"
    if best.prediction.transfers:
        where += f", {best.prediction.transfers_usd_per_hour:.2f} $/h for data between them"
    return where


def _idle(request: Request, best: Answer) -> Iterator[Idle]:
    """Yield the nodes in zones outside the plan that its own search has not reported as idle."""
    by_zone: dict[str, list[str]] = {}
    for worker in request.workers_beside(best.known_workers):
        zone = request.fleet.node_of(worker).node_type.zone
        by_zone.setdefault(zone, []).append(worker)

    for zone in request.cost.zones:
        if zone in by_zone:
            why = f"a plan that lies in {zone} too is slower, or dearer for data between zones"
            yield Idle(tuple(by_zone[zone]), why)
