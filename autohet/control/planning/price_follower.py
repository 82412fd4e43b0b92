"""Chooses anew which fleet to pay for when prices or refusals change.

Pure but for the step times of fleets, which the planner computes once in the background.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autohet.control.fleet import is_repriced
from autohet.control.planning.buying import Counts, Market, Wanted, usd_per_hour
from autohet.control.planning.fleet_choice import SpeedsAsked, Terms, choose_fleet, measure_fleets
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.control.planning.proposals import Pending, Planner
    from autohet.runtime.job import Job
    from planner.strategies.speeds import FleetSpeeds


def decides_by_price(job: Job) -> bool:
    """Return True if prices change which fleet the job wants."""
    wishes = job.parallelism
    return wishes.objective == "cost" or wishes.max_usd_per_hour is not None


def _had(base: Counts, most: Counts) -> dict[str, int]:
    """Return the wanted nodes as far as they can be had."""
    found = {}
    for name, number in base.items():
        found[name] = min(number, most.get(name, number))
    return found


class PriceFollower:
    """Chooses the fleet to pay for. Owned by the buyer of a job that decides by price."""

    def __init__(self, job: Job, planning: Planner, market: Market) -> None:
        self._planning = planning
        self._terms = Terms.of(job, market)
        self._search: Pending[FleetSpeeds] | None = None
        self._speeds: FleetSpeeds | None = None
        self._has_chosen = False
        self._measured: list[Counts] = []
        """Fleets, by nodes by type, that were asked for by name."""

    def reason_to_choose(self, market: Market, base: Counts, most: Counts, refusal: str) -> str:
        """Return why a fleet is to be chosen now; empty if nothing has changed, or not yet known.

        base: nodes by type that are wanted so far. most: nodes that may be had of refused types.
        refusal: phrase on these types and why they are refused.
        """
        why = self._change(market, base, most, refusal)
        present = _had(base, most)
        if not why or (self._speeds is not None and present in self._measured):
            return why
        if self._search is None:
            # Without its step time, what trains now would seem to have no plan.
            self._measured.append(present)
            asked = SpeedsAsked(market.cluster, present)
            self._search = self._planning.consider(measure_fleets, asked)
        found = self._search.result()
        if found is None:
            return ""
        self._search = None
        self._speeds = found if self._speeds is None else self._speeds.joined(found)
        return why

    def _change(self, market: Market, base: Counts, most: Counts, refusal: str) -> str:
        """Return what has changed since the last choice; empty if nothing has."""
        repriced = []
        for before, kind in zip(
            self._terms.market.cluster.node_types, market.cluster.node_types, strict=True
        ):
            if is_repriced(before.usd_per_hour, kind.usd_per_hour):
                repriced.append(kind.name)
        if repriced:
            return f"the price of {', '.join(repriced)} has changed"
        if most.keys() != self._terms.most.keys():
            return refusal or "all types are tried again"
        if not any(base.values()) and not self._has_chosen:
            return "no nodes are wanted yet"
        if not self._terms.is_within(usd_per_hour(market.all_that_stand(base), market.cluster)):
            return "its nodes cost more than the job allows"
        return ""

    def choose(self, market: Market, base: Counts, most: Counts, kept_usd: float) -> Wanted:
        """Return the nodes to pay for from now on; those of the cluster file alone if none fit.

        kept_usd: price of the living nodes, in USD per hour.
        """
        assert self._speeds is not None
        self._has_chosen = True
        planning = self._planning
        self._terms = replace(
            self._terms,
            market=market,
            most=most,
            doubtful=self._terms.doubtful | most.keys(),
            move_s=planning.move_s,
            horizon_s=planning.horizon_s,
        )
        present = self._terms.offer(self._speeds, _had(base, most))
        try:
            found = choose_fleet(self._speeds, self._terms, present, kept_usd)
        except ConfigError as error:
            return Wanted(dict(market.standing), str(error))
        return Wanted(found.counts, "")
