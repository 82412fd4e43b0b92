"""Fleet to pay for at the prices of the moment (pure): arithmetic on known step times."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autohet.control.planning.buying import Counts, Market, may_exist, usd_per_hour
from planner.errors import InfeasibleError

if TYPE_CHECKING:
    from autohet.control.planning.proposals import Planner
    from autohet.runtime.job import Job
    from planner.inputs.cluster import Cluster
    from planner.strategies.speeds import FleetSpeeds

START_S = 150.0
"""Seconds from the request of a node until it trains, paid for: boot, processes, data."""
GAIN = 1.01
"""Ratio by which a fleet must be better than the present one: predictions have errors."""
GAIN_STANDING = 1.2
"""The same, if the job stands meanwhile: the nodes of the new fleet may not be had."""


@dataclass(frozen=True)
class Offer:
    """Fleet that may be had: its nodes by type, seconds of a step, and its price in all."""

    counts: Counts
    step_s: float
    usd_per_hour: float

    @property
    def usd_a_step(self) -> float:
        return self.usd_per_hour * self.step_s / 3600.0


@dataclass(frozen=True)
class Terms:
    """Circumstances of a choice.

    market: with the prices of the moment. bound: USD per hour of all nodes, None: none. most: nodes
    that may be had of types that have fewer than the cluster file allows. doubtful: types that were
    refused before. move_s: seconds of a move. horizon_s: seconds until the fleet is expected to
    change.
    """

    market: Market
    objective: str = "time"
    bound: float | None = None
    min_workers: int = 1
    most: Counts = field(default_factory=dict)
    doubtful: frozenset[str] = frozenset()
    move_s: float = 5.0
    horizon_s: float = 3600.0

    @classmethod
    def of(cls, job: Job, market: Market) -> Terms:
        """Return the wishes of a job on a market."""
        wishes = job.parallelism
        least = job.elastic.min_workers
        return cls(market, wishes.objective, wishes.max_usd_per_hour, least)

    def offer(self, speeds: FleetSpeeds, counts: Counts) -> Offer | None:
        """Return a fleet as it is offered; None where it may not exist or has no plan."""
        cluster = self.market.cluster
        standing = self.market.all_that_stand(counts)
        step_s = speeds.step_s(counts)
        workers = 0
        is_possible = may_exist(standing, cluster)
        for kind in cluster.node_types:
            number = counts.get(kind.name, 0)
            workers += number * kind.num_gpus
            is_possible &= number <= self.most.get(kind.name, kind.max_nodes)
        is_possible &= workers >= self.min_workers
        if not is_possible or math.isinf(step_s):
            return None
        return Offer(counts, step_s, usd_per_hour(standing, cluster))

    def offers(self, speeds: FleetSpeeds) -> list[Offer]:
        """Return the fleets that may be had within the bound on the price."""
        found = []
        for speed in speeds.speeds:
            counts = self._nodes(speeds, speed.counts)
            offer = None if counts is None else self.offer(speeds, counts)
            if offer is not None and self.is_within(offer.usd_per_hour):
                found.append(offer)
        return found

    def is_within(self, usd: float) -> bool:
        return self.bound is None or usd <= self.bound * (1 + 1e-9)

    def value(self, offer: Offer) -> tuple[float, float]:
        """Return what the objective asks to be least, and what decides between equals."""
        if self.objective == "cost":
            return by_price(offer)
        return offer.step_s, offer.usd_per_hour

    def _nodes(self, speeds: FleetSpeeds, counts: Collection[int]) -> dict[str, int] | None:
        """Return the cheapest nodes by type for numbers of nodes by machine; None: too few exist.

        Nodes that stand are paid for anyway, so they come first.
        """
        kinds = {kind.name: kind for kind in self.market.cluster.node_types}
        found = {}
        for names, number in zip(speeds.machines, counts, strict=True):
            priced = [name for name in names if kinds[name].usd_per_hour is not None]
            order = sorted(priced, key=lambda name: kinds[name].usd_per_hour or 0.0)
            left = number
            for name in order:
                found[name] = min(left, self.market.standing.get(name, 0))
                left -= found[name]
            for name in order:
                most = min(kinds[name].max_nodes, self.most.get(name, kinds[name].max_nodes))
                more = max(0, min(left, most - found[name]))
                found[name] += more
                left -= more
            if left:
                return None
        return {name: number for name, number in found.items() if number}


def by_price(offer: Offer) -> tuple[float, float]:
    """Sort key of fleets: price of a step, then its seconds."""
    return offer.usd_a_step, offer.step_s


def choose_fleet(
    speeds: FleetSpeeds, terms: Terms, present: Offer | None, kept_usd: float
) -> Offer:
    """Return the best fleet on these terms; see `choose_among`."""
    return choose_among(terms.offers(speeds), terms, present, kept_usd)


def choose_among(
    offers: Sequence[Offer], terms: Terms, present: Offer | None, kept_usd: float
) -> Offer:
    """Return the best of these fleets: `present`, unless another earns the move to it.

    kept_usd: USD per hour of the living nodes, which are paid for while new ones start.

    Raises:
        InfeasibleError: there is none.
    """
    if present is None or not terms.is_within(present.usd_per_hour):
        if not offers:
            limit = "at any price" if terms.bound is None else f"for at most {terms.bound:.2f} $/h"
            raise InfeasibleError(f"no nodes that can be had train the model {limit}")
        return min(offers, key=terms.value)

    better = []
    for offer in offers:
        added = {}
        for name, number in offer.counts.items():
            if number > present.counts.get(name, 0):
                added[name] = number - present.counts.get(name, 0)
        stands = not terms.is_within(kept_usd + usd_per_hour(added, terms.market.cluster))
        # What trains is not given up for nodes that may not be had.
        is_risky = stands and not terms.doubtful.isdisjoint(added)
        if not is_risky and _is_worth_a_move(offer, present, terms, stands=stands):
            better.append(offer)
    return min(better, key=terms.value, default=present)


def _is_worth_a_move(new: Offer, old: Offer, terms: Terms, *, stands: bool) -> bool:
    """Return True if `new` is better than `old` by more than the move between them costs.

    stands: True if the job stands while the new nodes start, since both fleets together cost more
    than the bound. Else both are paid for meanwhile.
    """
    horizon_s = terms.horizon_s
    gain = GAIN_STANDING if stands else GAIN
    lost_s = terms.move_s + (START_S if stands else 0.0)
    if lost_s >= horizon_s:
        return False
    step_s = new.step_s * horizon_s / (horizon_s - lost_s)
    is_faster = step_s * gain < old.step_s
    if terms.objective != "cost":
        return is_faster
    paid_s = horizon_s + (0.0 if stands else START_S)
    usd_a_step = new.usd_per_hour * step_s / 3600.0 * paid_s / horizon_s
    if usd_a_step == old.usd_a_step == 0.0:
        return is_faster
    return usd_a_step * gain < old.usd_a_step


@dataclass(frozen=True)
class SpeedsAsked:
    """Question for the step times of a cluster's fleets; `counts` is one of them in any case."""

    cluster: Cluster
    counts: Counts


def measure_fleets(planning: Planner, asked: SpeedsAsked) -> FleetSpeeds:
    """Return the step times of the fleets of a cluster."""
    return planning.fleet_speeds(asked.cluster, [asked.counts])
