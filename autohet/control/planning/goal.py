"""Deadline and budget of a run: what is left of them, and the fleet that keeps both (pure).

While there is slack the cheapest fleet that is in time trains, and nothing does where what can be
had is much dearer than usual. A secure fleet (no spot nodes) is taken at the last moment at which
it still keeps the deadline: the safety net of Wu et al., "Can't Be Late" (NSDI 24), section 4, with
fleets of several sizes in the place of one machine. SkyNomad (arXiv 2601.06520) weighs deadlines in
dollars in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autohet.control import fleet
from autohet.control.planning.fleet_choice import START_S, Offer, Terms, by_price, choose_among
from autohet.control.values.observation import StartState

if TYPE_CHECKING:
    from autohet.control.values.observation import Observation
    from planner.strategies.speeds import FleetSpeeds

PRIOR_S = 7200.0
"""Weight of the prior of what fleets deliver, in seconds of a run."""
DELIVERED_PRIOR = {False: 0.5, True: 0.95}
"""Prior share of the predicted steps that a fleet makes, by whether it is secure.

Nodes boot, are reclaimed and are not to be had, and predictions err.
"""
DEAR = 1.5
"""Ratio to the usual price of a step from which waiting is considered."""
PAID = 1.05
"""Ratio of the time that is paid for to that of the predicted steps."""
CLOSE_S = 60.0
"""Seconds paid for after the last checkpoint until the nodes have ended."""
SLACK_S = 120.0
"""Least reserve before the last moment to take a secure fleet."""


@dataclass(frozen=True)
class GoalTerms:
    """Deadline and budget, as a driver finds them at its start.

    deadline_at: on the controller's clock. budget_usd: of the whole run, of which earlier drivers
    have spent `spent_usd`. None: there is none.
    """

    deadline_at: float | None = None
    budget_usd: float | None = None
    spent_usd: float = 0.0


@dataclass(frozen=True)
class Left:
    """What is left at `now` of the steps, of the time and of the budget.

    delivered: share of the predicted steps that fleets make, by whether they are secure. redo_s:
    seconds of training that a loss of the whole fleet costs. usual_prices: of node types (USD per
    hour), where they are known.
    """

    now: float
    steps: float
    seconds: float
    usd: float
    delivered: Mapping[bool, float]
    redo_s: float = 0.0
    usual_prices: Mapping[str, float] = field(default_factory=dict)

    def needed_s(self, step_s: float, *, secure: bool) -> float:
        """Return the seconds until the last step on a fleet that trains already."""
        return self.steps * step_s / self.delivered[secure]


class Goal:
    """Progress toward a deadline and within a budget. Owned by the controller's memory."""

    def __init__(self, terms: GoalTerms) -> None:
        self.terms = terms
        self.spent_usd = terms.spent_usd
        self.usd_per_hour = 0.0
        """Price of all nodes that are paid for now, those that start included."""
        self.stop_reason: str | None = None
        """Reason to stop; None while the budget lasts."""
        self.is_late = False
        """True once the deadline has passed."""
        self._seen_at: float | None = None
        self._usual_prices: Mapping[str, float] = {}
        self._steps = 0
        self._seconds = {secure: PRIOR_S for secure in DELIVERED_PRIOR}
        self._made_s = {secure: PRIOR_S * share for secure, share in DELIVERED_PRIOR.items()}

    def count(
        self, seen: Observation, steps: int, wanted: Wish | None, prices: Mapping[str, float]
    ) -> None:
        """Count the dollars, and the steps made of those predicted, since the last observation.

        wanted: fleet that was requested then; None: none. prices: of node types (USD per hour).
        """
        if self._seen_at is not None:
            passed_s = seen.now - self._seen_at
            self.spent_usd += self.usd_per_hour * passed_s / 3600.0
            if wanted is not None:
                self._seconds[wanted.is_secure] += passed_s
                self._made_s[wanted.is_secure] += (steps - self._steps) * wanted.step_s
        self._seen_at = seen.now
        self._usual_prices = seen.usual_prices
        self._steps = steps
        self.usd_per_hour = fleet.total_usd_per_hour(fleet.prices_of(seen, seen.nodes), seen.nodes)
        for node in () if seen.launches is None else seen.launches.starting:
            if node.state is StartState.STARTING and node.name not in seen.nodes:
                known = seen.prices.get(node.node_type, prices.get(node.node_type, 0.0))
                self.usd_per_hour += known

    def left(self, now: float, steps: float, redo_s: float) -> Left:
        seconds = usd = math.inf
        if self.terms.deadline_at is not None and not self.is_late:
            seconds = self.terms.deadline_at - now
        if self.terms.budget_usd is not None:
            usd = self.terms.budget_usd - self.spent_usd
        delivered = {
            secure: min(1.0, max(0.05, self._made_s[secure] / whole_s))
            for secure, whole_s in self._seconds.items()
        }
        return Left(now, steps, seconds, usd, delivered, redo_s, self._usual_prices)

    def document(self) -> dict[str, Any]:
        """Return the entry in a job's status and summary."""
        in_time = None if self.terms.deadline_at is None else not self.is_late
        return {
            "spent_usd": round(self.spent_usd, 4),
            "budget_usd": self.terms.budget_usd,
            "in_time": in_time,
        }

    def lasts_s(self, closing_s: float) -> float:
        """Return the seconds until the rest of the budget only pays for an end of `closing_s`."""
        left_usd = (self.terms.budget_usd or math.inf) - self.spent_usd
        if left_usd <= 0.0:
            return 0.0
        if not self.usd_per_hour:
            return math.inf
        return left_usd / self.usd_per_hour * 3600.0 - closing_s - CLOSE_S


@dataclass(frozen=True)
class Wish:
    """Fleet that is wanted: predicted seconds of its step, and whether no spot node is needed."""

    step_s: float
    is_secure: bool


@dataclass(frozen=True)
class GoalChoice:
    """Fleet to pay for. reason: what the user must know of it; empty: nothing.

    waits: True if the fleet cannot be had now, and is only hoped for; None: nothing is. look_in_s:
    seconds after which to choose again, whatever happens. sure: part of the fleet that trains
    whether or not the rest of it comes; None: all of it is needed.
    """

    offer: Offer | None
    reason: str = ""
    waits: bool = False
    look_in_s: float = math.inf
    sure: Offer | None = None


@dataclass(frozen=True)
class GoalChooser:
    """One choice of a fleet by deadline and budget.

    present: fleet that is paid for now; None: none. kept_usd: USD per hour of the living nodes.
    """

    speeds: FleetSpeeds
    terms: Terms
    left: Left
    present: Offer | None
    kept_usd: float

    def choose(self) -> GoalChoice:
        """Return the fleet to pay for from now on.

        Raises:
            InfeasibleError: no fleet can be had.
        """
        offers = self._offers(self.terms)
        within = [offer for offer in offers if self._usd(offer) <= self.left.usd]
        if not within:
            # The budget does not last for any fleet that can be had.
            everything = self._all_offers()
            if any(self._usd(offer) <= self.left.usd for offer in everything):
                return self._wait("what can be had costs more than the budget allows")
            why = "the budget ends before the last step"
            cheapest = min(offers, key=by_price, default=None)
            least_usd = min((offer.usd_a_step for offer in everything), default=math.inf)
            if cheapest is None or cheapest.usd_a_step > DEAR * least_usd:
                return self._wait(why)
            return GoalChoice(cheapest, why)
        if math.isinf(self.left.seconds):
            found = choose_among(within, self.terms, self._kept(within), self.kept_usd)
            return GoalChoice(found)
        return self._in_time(within)

    @cached_property
    def usual_usd(self) -> float:
        """Least price of a step at usual prices if all types can be had, and nothing fails."""
        market = self.terms.market.at(self.left.usual_prices)
        prices = []
        for offer in self._offers(replace(self.terms, market=market, most={})):
            if self.left.steps * offer.step_s <= self.left.seconds:
                prices.append(offer.usd_a_step)
        return min(prices, default=math.inf)

    def is_secure(self, offer: Offer) -> bool:
        """Return True if no node of the fleet is spot."""
        return len(self._steady(offer)) == len(offer.counts)

    def _in_time(self, within: list[Offer]) -> GoalChoice:
        """Choose among fleets within the budget by the deadline."""
        seconds = self.left.seconds
        reserve_s = SLACK_S + START_S + self.left.redo_s
        net_s = {id(offer): self._net_s(offer) for offer in within}
        slack_s = seconds - min(net_s.values())
        has_net = math.isfinite(slack_s)
        is_secure = self.present is not None and self._net_s(self.present) <= seconds
        if has_net and slack_s < reserve_s * (2 if is_secure else 1):
            secure = [offer for offer in within if net_s[id(offer)] <= seconds]
            safest = min(within, key=lambda each: net_s[id(each)])
            return self._with_hope(self._pick(secure or [safest]))

        patience_s = self._patience_s(within) - reserve_s
        look_in_s = max(patience_s, 0.0) or (slack_s - reserve_s if has_net else math.inf)
        possible = within
        if patience_s > 0.0:
            possible = [each for each in within if each.usd_a_step <= DEAR * self.usual_usd]
            if not possible:
                why = "what can be had is much dearer than usual, and there is time to wait"
                return replace(self._wait(why), look_in_s=look_in_s)
        in_time = [offer for offer in possible if self._needed_s(offer) <= seconds]
        picked = self._pick(in_time or [min(possible, key=self._needed_s)])
        if not in_time and patience_s <= 0.0:
            picked = replace(picked, reason="no fleet that can be had is sure to keep the deadline")
        return self._with_hope(replace(picked, look_in_s=look_in_s))

    def _patience_s(self, within: list[Offer]) -> float:
        """Return the seconds without a step after which the deadline still costs no more.

        That is until the cheapest secure fleet would be too slow. Without one, half of the time
        beyond what the fastest fleet of all types needs.
        """
        secure = [offer for offer in within if self.is_secure(offer)]
        if secure:
            cheapest = min(secure, key=by_price)
            return self.left.seconds - self._net_s(cheapest)
        needed_s = min((self._needed_s(offer) for offer in self._all_offers()), default=math.inf)
        return (self.left.seconds - needed_s) / 2

    def _pick(self, possible: list[Offer]) -> GoalChoice:
        """Choose the cheapest of these fleets: the present one, unless another earns the move."""
        by_dollars = replace(self.terms, objective="cost")
        found = choose_among(possible, by_dollars, self._kept(possible), self.kept_usd)
        return GoalChoice(found)

    def _with_hope(self, choice: GoalChoice) -> GoalChoice:
        """Return a choice of a secure fleet with the spot nodes that would make its steps cheaper.

        They may come at any time, and those that are asked for and do not come cost nothing.
        """
        sure = choice.offer
        if sure is None or not self.is_secure(sure):
            return choice
        hoped = []
        for offer in self._all_offers():
            is_more = self._steady(offer) == sure.counts
            if is_more and offer.usd_a_step < sure.usd_a_step and self._usd(offer) <= self.left.usd:
                hoped.append(offer)
        return replace(choice, offer=min(hoped, key=by_price, default=sure), sure=sure)

    def _wait(self, why: str) -> GoalChoice:
        """Wait for the cheapest fleet that may come, if there is one at the usual price."""
        hoped = []
        for offer in self._all_offers():
            is_in_time = self.left.steps * offer.step_s <= self.left.seconds
            if is_in_time and offer.usd_a_step <= DEAR * self.usual_usd:
                hoped.append(offer)
        in_time = [offer for offer in hoped if self._needed_s(offer) <= self.left.seconds]
        cheapest = min(in_time, key=by_price, default=None)
        fastest = min(hoped, key=self._needed_s, default=None)
        return GoalChoice(cheapest or fastest, why, waits=True)

    def _all_offers(self) -> list[Offer]:
        """Return the fleets that may be had once no type is refused any more."""
        return self._offers(replace(self.terms, most={}))

    def _offers(self, terms: Terms) -> list[Offer]:
        """Return the fleets that may be had, and those without spot nodes.

        Of nodes of one machine an offer has the cheapest, which are spot.
        """
        offers = terms.offers(self.speeds)
        known = [offer.counts for offer in offers]
        none = dict.fromkeys(self._spot, 0)
        secure = replace(terms, most={**terms.most, **none}).offers(self.speeds)
        return offers + [offer for offer in secure if offer.counts not in known]

    def _steady(self, offer: Offer) -> dict[str, int]:
        """Return the nodes by type of a fleet that are not spot."""
        spot = self._spot
        return {name: number for name, number in offer.counts.items() if name not in spot}

    @property
    def _spot(self) -> set[str]:
        return {kind.name for kind in self.terms.market.cluster.node_types if kind.spot}

    def _is_present(self, offer: Offer) -> bool:
        return self.present is not None and offer.counts == self.present.counts

    def _kept(self, possible: list[Offer]) -> Offer | None:
        """Return the present fleet if it is still among those to choose from."""
        return self.present if any(self._is_present(offer) for offer in possible) else None

    def _needed_s(self, offer: Offer) -> float:
        """Return the seconds until the last step on a fleet, whose spot nodes are away at times."""
        left = self.left
        steady = self._steady(offer)
        share = 0.0 if self.is_secure(offer) else left.delivered[False]
        steps_a_second = share / offer.step_s
        if steady:
            alone_s = self.speeds.step_s(steady)
            steps_a_second += (1.0 - share) * left.delivered[True] / alone_s
        return self._move_s(offer) + left.steps / steps_a_second

    def _net_s(self, offer: Offer) -> float:
        """Return the same for a fleet that loses all its spot nodes at once."""
        steady = self._steady(offer)
        step_s = self.speeds.step_s(steady) if steady else math.inf
        move_s = self._move_s(offer)
        if self.present is not None and steady == self._steady(self.present):
            # They train on while spot nodes start.
            move_s = min(move_s, self.terms.move_s)
        return move_s + self.left.needed_s(step_s, secure=True)

    def _move_s(self, offer: Offer) -> float:
        """Return the seconds until a fleet trains."""
        return 0.0 if self._is_present(offer) else START_S + self.terms.move_s

    def _usd(self, offer: Offer) -> float:
        """Return the dollars of a fleet until the last step."""
        paid_s = self.left.steps * offer.step_s * PAID
        if not self._is_present(offer):
            paid_s += START_S
        return offer.usd_per_hour * paid_s / 3600.0
