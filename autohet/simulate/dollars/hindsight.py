"""SIMULATED proof of what a job pays: its bound over time, and the best that prices allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from autohet.control.planning.fleet_choice import Terms, choose_fleet
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.spot_trace import TraceEvent
from planner.errors import InfeasibleError
from planner.strategies.speeds import FleetSpeeds


def longest_beyond_s(
    machines: Sequence[Mapping[str, Any]], prices: PriceHistory, bound: float, end_s: float
) -> float:
    """Return the longest time for which all machines together cost more than the bound."""
    moments = {end_s, *prices.changes(end_s)}
    for life in machines:
        moments |= {life["begin_s"], life["end_s"]}
    longest = beyond_s = 0.0
    for begin, end in pairwise(sorted(moments)):
        paid = []
        for life in machines:
            if life["begin_s"] <= begin < life["end_s"]:
                paid.append(prices.usd_per_hour(life["node_type"], begin))
        beyond_s = beyond_s + end - begin if sum(paid) > bound * (1 + 1e-9) else 0.0
        longest = max(longest, beyond_s)
    return longest


def best_usd_per_step(
    terms: Terms,
    speeds: FleetSpeeds,
    trace: Sequence[TraceEvent],
    prices: PriceHistory,
    end_s: float,
) -> float | None:
    """Return the dollars a step of a job that has the best fleet at each moment, at no cost.

    None if there never is a fleet.
    """
    kinds = {kind.name: kind for kind in terms.market.cluster.node_types}
    alive = Counter(dict.fromkeys(kinds, 0))
    events = [event for event in trace if event.kind != "notice" and event.node_type in kinds]
    moments = {0.0, end_s, *prices.changes(end_s), *(event.time_s for event in events)}
    usd = steps = 0.0
    for begin, end in pairwise(sorted(moment for moment in moments if moment <= end_s)):
        while events and events[0].time_s <= begin:
            event = events.pop(0)
            alive[event.node_type] += 1 if event.kind == "arrival" else -1
        node_types = tuple(prices.at(kinds, begin).values())
        cluster = replace(terms.market.cluster, node_types=node_types)
        market = replace(terms.market, cluster=cluster)
        try:
            best = choose_fleet(speeds, replace(terms, market=market, most=dict(alive)), None, 0.0)
        except InfeasibleError:
            continue
        usd += best.usd_per_hour * (end - begin) / 3600.0
        steps += (end - begin) / best.step_s
    return usd / steps if steps else None
