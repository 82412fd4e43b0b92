"""Chooses anew which fleet to pay for when prices or refusals change.

Pure but for the step times of fleets, which the planner computes once in the background.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from autohet.control.fleet import is_repriced
from autohet.control.planning.buying import Counts, Market, Wanted, usd_per_hour
from autohet.control.planning.fleet_choice import SpeedsAsked, Terms, choose_fleet, measure_fleets
from autohet.control.planning.goal import GoalChooser, Left, Wish
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.control.planning.proposals import Pending, Planner
    from autohet.runtime.job import Job
    from planner.strategies.speeds import FleetSpeeds


REVIEW_S = 600.0
"""Seconds after which a job with a deadline or a budget chooses again in any case."""
LEAST_REVIEW_S = 15.0


def decides_by_price(job: Job) -> bool:
    """Return True if prices change which fleet the job wants."""
    wishes = job.parallelism
    by_price = wishes.objective == "cost" or wishes.max_usd_per_hour is not None
    return by_price or job.elastic.has_goal


def _had(base: Counts, most: Counts) -> dict[str, int]:
    """Return the wanted nodes as far as they can be had, without types of which there is none."""
    had = {name: min(number, most.get(name, number)) for name, number in base.items()}
    return {name: number for name, number in had.items() if number}


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
        self.wish: Wish | None = None
        """Fleet that is wanted; None: none, or no goal is followed."""
        self.waits = False
        """True if what is wanted cannot be had now, or nothing is wanted."""
        self.look_at = -math.inf
        """Time at which a goal wants another choice."""

    def reason_to_choose(
        self,
        market: Market,
        base: Counts,
        most: Counts,
        refusal: str,
        left: Left | None = None,
    ) -> str:
        """Return why a fleet is to be chosen now; empty if nothing has changed, or not yet known.

        base: nodes by type that are wanted so far. most: nodes that may be had of refused types.
        refusal: phrase on these types and why they are refused. left: of the job's goal.
        """
        why = self._change(market, base, most, refusal)
        if not why and left is not None and left.now >= self.look_at:
            why = "its deadline and budget want it"
        present = _had(base, most)
        if not why or (self._speeds is not None and self._is_measured(present)):
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

    def _is_measured(self, present: Counts) -> bool:
        """Return True if the step time of these very nodes is known."""
        assert self._speeds is not None
        counts = self._speeds.counts_of(present)
        known = any(speed.counts == counts for speed in self._speeds.speeds)
        return known or present in self._measured

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

    def choose(
        self,
        market: Market,
        base: Counts,
        most: Counts,
        kept_usd: float,
        left: Left | None = None,
    ) -> Wanted:
        """Return the nodes to pay for from now on; those of the cluster file alone if none fit.

        kept_usd: price of the living nodes, in USD per hour. left: of the job's goal.
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
            if left is not None:
                return self._choose_for_goal(
                    GoalChooser(self._speeds, self._terms, left, present, kept_usd)
                )
            found = choose_fleet(self._speeds, self._terms, present, kept_usd)
        except ConfigError as error:
            self.wish = None
            return Wanted(dict(market.standing), str(error))
        return Wanted(found.counts, "")

    def _choose_for_goal(self, chooser: GoalChooser) -> Wanted:
        """Choose by deadline and budget, and note when to choose again."""
        now = chooser.left.now
        self.look_at = now + REVIEW_S
        choice = chooser.choose()
        self.look_at = now + min(REVIEW_S, max(LEAST_REVIEW_S, choice.look_in_s))
        self.waits = choice.waits
        self.wish = None
        if choice.offer is None:
            return Wanted(dict(self._terms.market.standing), choice.reason)
        sure = choice.sure or choice.offer
        self.wish = Wish(sure.step_s, chooser.is_secure(sure))
        return Wanted(choice.offer.counts, choice.reason)
