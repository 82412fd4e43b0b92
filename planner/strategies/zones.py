"""Plans of a fleet whose nodes are in several zones.

Three searches are compared: the fleet as if it were in one zone, each zone by itself, and zones
together at the true cost of the data between them. The best of their plans is the answer. So a plan
is never dearer than the one that a planner without zones would have chosen.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from planner.cluster import Fleet
from planner.errors import InfeasibleError
from planner.search import limits
from planner.search.judge import describe, unacceptable, zones_of
from planner.search.problem import Answer, Idle, Rejected, Request, narrowed
from planner.strategies.pareto import undominated, usd_per_token

Search = Callable[[Request], Answer]


def search_zones(search: Search, request: Request) -> Answer:
    """The search's answer; over several zones the best of its answers for parts of them.

    InfeasibleError where no part of the fleet may have a plan.
    """
    if not spans_zones(request):
        return search(request)
    return _over_zones(search, request, _blind(search, request))


def _over_zones(search: Search, request: Request, blind: "_Blind") -> Answer:
    found = _answers(search, request)
    known = [*found, *_as_it_is(request, blind)]
    if not known and request.max_transfer_share is not None:
        return _beyond_share(search, request, blind)
    if not known:
        raise InfeasibleError(_why_none(request, blind))
    if request.objective == "pareto":
        return _front_of(request, known, blind)
    return _reported(request, _best(request, known, blind), known, blind)


def spans_zones(request: Request) -> bool:
    """Return True if the fleet has several zones, so that they matter to the request."""
    return len(request.cost.zones) > 1


def zone_sets(request: Request) -> Iterator[tuple[str, ...]]:
    """Sets of the fleet's zones that one plan may lie in: each zone, then the largest sets between
    all of which data may go.
    """
    zones = request.cost.zones
    table = request.cost.links.zones
    yield from ((zone,) for zone in zones)
    most = min(len(zones), request.max_zones or len(zones))
    kept: list[set[str]] = []
    for size in range(most, 1, -1):
        for some in _largest(request, size):
            inside = any(set(some) <= larger for larger in kept)
            if not inside and table.connects_all(some):
                kept.append(set(some))
                yield some
                if len(kept) == limits.ZONE_SETS:
                    return


def _largest(request: Request, size: int) -> list[tuple[str, ...]]:
    """Sets of so many zones, those with the most GPUs first."""
    gpus = dict.fromkeys(request.cost.zones, 0)
    for node in request.fleet.nodes:
        if node.node_type.zone in gpus:
            gpus[node.node_type.zone] += node.node_type.num_gpus
    every = itertools.islice(itertools.combinations(gpus, size), limits.COUNTED_FLEETS)
    return sorted(every, key=lambda some: -sum(gpus[zone] for zone in some))


def in_zones(fleet: Fleet, zones: Iterable[str]) -> Fleet:
    """Return the part of a fleet in these zones, and the nodes whose zone is unknown."""
    wanted = {*zones, ""}
    return Fleet(fleet.generation, tuple(n for n in fleet.nodes if n.node_type.zone in wanted))


@dataclass(frozen=True)
class _Blind:
    """The answer of a planner without zones; with `plans` the whole front."""

    answer: Answer
    plans: tuple[Answer, ...]


def _blind(search: Search, request: Request) -> _Blind:
    """InfeasibleError where not even zones that are one would help."""
    cost = request.cost.ignoring_zones()
    answer = search(replace(request, cost=cost, max_transfer_share=None, max_zones=None))
    return _Blind(answer, tuple(answer.front) or (answer,))


def _as_it_is(request: Request, blind: _Blind) -> list[Answer]:
    """The blind plans that may be chosen, at their true price."""
    found = []
    for answer in blind.plans:
        prediction = request.cost.predict(answer.plan)
        if unacceptable(request, answer.plan, prediction) is None:
            uncounted = replace(answer.search, seconds=0.0, plans_evaluated=0)  # `_reported` does
            found.append(replace(answer, prediction=prediction, search=uncounted, front=()))
    return found


def _answers(search: Search, request: Request) -> list[Answer]:
    """Return the answers found in each set of zones."""
    found: list[Answer] = []
    for zones in zone_sets(request):
        if found and request.is_late:
            break
        part = in_zones(request.fleet, zones)
        try:
            answer = search(narrowed(request, part))
        except InfeasibleError:
            continue
        found += [replace(each, front=()) for each in answer.front] or [answer]
    return found


def _beyond_share(search: Search, request: Request, blind: _Blind) -> Answer:
    """Return the best plan at any price, if every plan exceeds the allowed share of transfers."""
    answer = _over_zones(search, replace(request, max_transfer_share=None), blind)
    usd = answer.prediction.transfers_usd_per_hour
    why = (
        f"no plan fits into fewer zones, so {usd:.2f} $/h for data between zones exceed"
        f" {request.max_transfer_share:.0%} of the nodes' price"
    )
    return replace(answer, choice=f"{answer.choice}; {why}" if answer.choice else why)


def _best(request: Request, known: list[Answer], blind: _Blind) -> Answer:
    """Return the cheapest plan per token, or the fastest within the price of the blind plan.

    The price is per token; the blind plan counts at its true price.
    """
    if request.objective == "cost":
        return min(known, key=lambda a: (usd_per_token(a), a.prediction.step_time_s))
    true = request.cost.predict(blind.answer.plan).usd_per_million_tokens
    cheap = [a for a in known if true is None or usd_per_token(a) <= true * (1 + 1e-9)]
    return min(cheap or known, key=lambda a: (a.prediction.step_time_s, usd_per_token(a)))


def _front_of(request: Request, known: list[Answer], blind: _Blind) -> Answer:
    front = [_reported(request, each, (), blind) for each in undominated(known)]
    return replace(front[0], front=tuple(front))


def _reported(request: Request, best: Answer, known: Iterable[Answer], blind: _Blind) -> Answer:
    """Complete an answer: the bound for any zones, rejected plans of other zones, idle nodes."""
    bound = blind.answer.search.lower_bound_s
    tried = blind.answer.search.plans_evaluated
    every = [each for each in known if each.plan != best.plan]
    report = replace(
        best.search,
        plans_evaluated=tried + sum(each.search.plans_evaluated for each in known),
        seconds=blind.answer.search.seconds + sum(each.search.seconds for each in known),
        lower_bound_s=bound,
        gap=None if bound is None else best.prediction.step_time_s / bound - 1,
        proof=blind.answer.search.proof,
    )
    rejected = (*best.rejected, *(_rejected(request, each) for each in every))
    return replace(
        best,
        search=report,
        rejected=rejected,
        idle=(*best.idle, *_idle(request, best)),
        choice=_with_zones(request, best),
    )


def _with_zones(request: Request, best: Answer) -> str:
    zones = zones_of(request.fleet, best.plan)
    where = f"in {', '.join(zones)} of {len(request.cost.zones)} zones"
    if best.prediction.transfers:
        where += f", {best.prediction.transfers_usd_per_hour:.2f} $/h for data between them"
    return f"{best.choice}; {where}" if best.choice else where


def _rejected(request: Request, other: Answer) -> Rejected:
    zones = zones_of(request.fleet, other.plan)
    said = other.prediction
    price = said.usd_per_million_tokens
    why = f"{said.step_time_s:.4g} s a step" + (f", {price:.3f} $/M tokens" if price else "")
    return Rejected(f"in {', '.join(zones)}: {describe(other.plan)}", why)


def _idle(request: Request, best: Answer) -> Iterator[Idle]:
    """Yield the nodes in zones outside the plan that its own search has not reported as idle."""
    told = {worker for idle in best.idle for worker in idle.workers} | set(best.plan.workers)
    for zone in request.cost.zones:
        nodes = [node for node in request.fleet.nodes if node.node_type.zone == zone]
        workers = tuple(w for node in nodes for w in node.workers if w not in told)
        if workers:
            why = f"a plan that lies in {zone} too is slower, or dearer for data between zones"
            yield Idle(workers, why)


def _why_none(request: Request, blind: _Blind) -> str:
    plan = blind.answer.plan
    why = unacceptable(request, plan, request.cost.predict(plan)) or "no zone has enough nodes"
    return f"no plan fits into zones that one plan may lie in; over all zones: {why}"
