"""Nodes to request from the autoscaler while a job runs (pure).

Another plan's nodes where a type is refused, a spare for a node at risk, fewer nodes where some are
idle.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.control.planning.proposals import Planner
    from autohet.control.values.observation import Observation
    from planner.inputs.cluster import Cluster
    from planner.inputs.fleet import Fleet, NodeType
    from planner.plans.plan import Plan

FAILURES = 3
"""Failed attempts of a type, with none that succeeds between, before another type is requested."""
NARROWED = 3
"""Maximum times that a plan's own nodes are planned on again.

Each time they become fewer, or it ends.
"""
REFUSED_S = 600.0
"""Seconds after which a refused type is requested again."""
Counts = Mapping[str, int]


def nodes_of(plan: Plan, fleet: Fleet) -> dict[str, int]:
    """Return the number of nodes by type that a plan of `fleet` uses."""
    type_by_node = {}
    for worker in plan.workers:
        node = fleet.node_of(worker)
        type_by_node[node.name] = node.node_type.name
    return dict(Counter(type_by_node.values()))


def usd_per_hour(counts: Counts, cluster: Cluster) -> float:
    """Return the price of these nodes in USD per hour; a type without a price counts as free."""
    prices = []
    for kind in cluster.node_types:
        number = counts.get(kind.name, 0)
        prices.append((kind.usd_per_hour or 0.0) * number)
    return sum(prices)


def capped(cluster: Cluster, most: Counts) -> Cluster:
    """Return the cluster with at most this number of nodes of these types."""
    kinds = []
    for kind in cluster.node_types:
        max_nodes = kind.max_nodes
        if kind.name in most:
            max_nodes = min(max_nodes, most[kind.name])
        if max_nodes > 0:
            kinds.append(replace(kind, max_nodes=max_nodes))
    return replace(cluster, node_types=tuple(kinds))


@dataclass(frozen=True)
class Market:
    """Node types that the autoscaler offers.

    standing: nodes by type that exist whatever is requested. counts: nodes by type of the first
    request.
    """

    cluster: Cluster
    standing: Counts
    counts: Counts

    def all_that_stand(self, counts: Counts) -> dict[str, int]:
        """Return the nodes by type that exist when `counts` is requested."""
        return largest(counts, self.standing)

    def at(self, prices: Mapping[str, float]) -> Market:
        """Return this market at these prices of node types (USD per hour).

        A type that `prices` lacks keeps the cluster's own price.
        """
        if not prices:
            return self
        kinds = []
        for kind in self.cluster.node_types:
            price = prices.get(kind.name, kind.usd_per_hour)
            kinds.append(replace(kind, usd_per_hour=price))
        priced = replace(self.cluster, node_types=tuple(kinds))
        return replace(self, cluster=priced)


def largest(counts: Counts, others: Counts) -> dict[str, int]:
    """Return the larger of two numbers of nodes, for each type that either names."""
    found = {}
    for name in {*counts, *others}:
        number = counts.get(name, 0)
        found[name] = max(number, others.get(name, 0))
    return found


def _with_one_more(counts: Counts, kind: NodeType) -> dict[str, int]:
    """Return the counts with another node of this type."""
    return {**counts, kind.name: counts.get(kind.name, 0) + 1}


def _usd_per_gpu(kind: NodeType) -> float:
    """Return the price of a GPU in USD per hour; a type without a price comes after all others."""
    return (kind.usd_per_hour or math.inf) / kind.num_gpus


def with_min_workers(counts: Counts, cluster: Cluster, min_workers: int) -> dict[str, int]:
    """Add nodes, cheapest per GPU first, up to `min_workers` GPUs or as many as may exist."""
    found = dict(counts)
    left = min_workers
    for kind in cluster.node_types:
        left -= kind.num_gpus * found.get(kind.name, 0)

    for kind in sorted(cluster.node_types, key=_usd_per_gpu):
        while left > 0 and found.get(kind.name, 0) < kind.max_nodes:
            more = _with_one_more(found, kind)
            if not may_exist(more, cluster):
                break
            found = more
            left -= kind.num_gpus
    return found


def may_exist(counts: Counts, cluster: Cluster) -> bool:
    """Return True if the cluster file's bound on all nodes allows these counts."""
    return cluster.bound is None or cluster.bound.allows(counts)


def standing_first(counts: Counts, cluster: Cluster, standing: Counts) -> dict[str, int]:
    """Exchange nodes for equal machines that stand anyway, which cost nothing more.

    The number of machines stays the same.
    """
    found = dict(counts)
    for kind in cluster.node_types:
        existing = found.get(kind.name, 0)
        missing = standing.get(kind.name, 0) - existing
        for other in cluster.node_types:
            is_same_machine = kind.gpu_type == other.gpu_type and kind.num_gpus == other.num_gpus
            if other is kind or not is_same_machine:
                continue
            moved = min(missing, found.get(other.name, 0))
            if moved > 0:
                found[other.name] -= moved
                found[kind.name] = found.get(kind.name, 0) + moved
                missing -= moved
    return found


def completed(
    counts: Counts, cluster: Cluster, standing: Counts, min_workers: int
) -> dict[str, int]:
    """Return the plan's nodes and those that `min_workers` needs, standing ones first."""
    enough = with_min_workers(counts, cluster, min_workers)
    return standing_first(enough, cluster, standing)


def best_counts(planning: Planner, cluster: Cluster, standing: Counts) -> dict[str, int]:
    """Return the nodes of the best plan of the largest fleet, within the job's bound on its price.

    The bound covers all nodes that would stand, used or not.

    standing: nodes by type that are paid for whatever the plan is. Raises ConfigError where no plan
    exists.
    """
    bound = planning.job.parallelism.max_usd_per_hour
    counts = _counts_within(planning, cluster, standing, bound)
    if bound is None:
        return counts

    unused = {name: max(0, number - counts.get(name, 0)) for name, number in standing.items()}
    idle_usd = usd_per_hour(unused, cluster)
    if not idle_usd:
        return counts
    # A bound must be positive. No plan is within this one, as none is within zero.
    left_usd = max(bound - idle_usd, 1e-9)
    return _counts_within(planning, cluster, standing, left_usd)


def _counts_within(
    planning: Planner, cluster: Cluster, standing: Counts, bound: float | None
) -> dict[str, int]:
    """Return the nodes that the job's plan will use once they have been requested.

    The job makes its first plan for the requested and the standing nodes. That search has fewer
    nodes to look through and may find a plan of fewer still, so the nodes are planned on again
    here.
    """
    wishes = replace(planning.job.parallelism, max_usd_per_hour=bound)
    bounded = copy.copy(planning)
    bounded.bound = cluster.bound
    bounded.job = replace(planning.job, parallelism=wishes)

    among = cluster
    for _ in range(1 + NARROWED):
        fleet = among.fleet()
        proposal = bounded.propose(fleet, None)
        counts = nodes_of(proposal.plan, fleet)
        # A type that neither has is named, too: `capped` leaves types alone that it is not given.
        names = [kind.name for kind in cluster.node_types]
        none = dict.fromkeys(names, 0)
        narrower = capped(cluster, largest(none | counts, standing))
        if narrower == among:
            break
        among = narrower
    return counts


@dataclass(frozen=True)
class Wanted:
    """Nodes by type to request from now on, and why. `counts` None: the same as before."""

    counts: Mapping[str, int] | None
    reason: str


@dataclass
class Refusals:
    """Node types that the cloud refuses now.

    Fed with the number of failed attempts by type since the autoscaler began, which retries for
    ever, and with the types that have an overdue start.
    """

    _failed: dict[str, int] | None = None
    _alive: dict[str, int] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def look(
        self, failed: Counts, alive: Counts, now: float, overdue: Collection[str] = ()
    ) -> frozenset[str]:
        """Return the types that are refused now.

        A node that has come resets its type's count.
        """
        if self._failed is None:
            self._failed = dict(failed)  # of before this job
        for name, count in failed.items():
            alive_before = self._alive.get(name, 0)
            if alive.get(name, 0) > alive_before:
                self._failed[name] = count
            num_failures = count - self._failed.setdefault(name, 0)
            if num_failures >= FAILURES:
                self._failed[name] = count
                self._until[name] = now + REFUSED_S
        self._alive = dict(alive)

        refused = [name for name, until in self._until.items() if now < until]
        return frozenset(refused).union(overdue)


@dataclass
class IdleNodes:
    """Nodes that no plan has used for `patience_s` of training.

    Time in which the job does not train neither counts nor resets.
    """

    patience_s: float
    _idle_s: dict[str, float] = field(default_factory=dict)
    _trained_at: float | None = None
    """Time of the last look, if the job trained then; else None."""

    def look(self, seen: Observation, used: Collection[str], *, training: bool) -> tuple[str, ...]:
        """Return the nodes that have been idle for long enough, sorted; none while not training."""
        passed = 0.0
        if training and self._trained_at is not None:
            passed = seen.now - self._trained_at
        self._trained_at = seen.now if training else None

        before = self._idle_s
        self._idle_s = {}
        for name in seen.nodes:
            if name in used or name in seen.notices:
                continue
            if name in before:
                self._idle_s[name] = before[name] + passed
            else:
                # It may have become idle just now, whatever time has passed.
                self._idle_s[name] = 0.0

        if not training:
            return ()
        long_idle = [n for n, idle_s in self._idle_s.items() if idle_s >= self.patience_s]
        return tuple(sorted(long_idle))


def releasable(idle: Collection[str], seen: Observation, standing: Counts) -> tuple[str, ...]:
    """Return the idle nodes that may go; `standing` nodes of each type stay (its `min_workers`)."""
    left = Counter(view.node_type.name for view in seen.nodes.values())
    found = []
    for name in sorted(idle):
        kind = seen.nodes[name].node_type.name
        if left[kind] > standing.get(kind, 0):
            left[kind] -= 1
            found.append(name)
    return tuple(found)


def with_spares(
    counts: Counts, seen: Observation, used: Collection[str], market: Market, bound: float | None
) -> dict[str, int]:
    """Add a node of the same type for each training node at risk, as its successor.

    The cluster file's limits must allow it, and so must `bound` on the price of all nodes that
    would stand (USD per hour).
    """
    found = dict(counts)
    kinds = {kind.name: kind for kind in market.cluster.node_types}
    at_risk = seen.risks.keys() & set(used) & seen.nodes.keys()
    for name in sorted(at_risk):
        type_name = seen.nodes[name].node_type.name
        if type_name not in kinds:
            continue
        kind = kinds[type_name]
        more = _with_one_more(found, kind)
        is_within_limits = more[type_name] <= kind.max_nodes
        if not is_within_limits or not may_exist(more, market.cluster):
            continue
        price = usd_per_hour(market.all_that_stand(more), market.cluster)
        # Another node at risk may be of a cheaper type: the others are looked at all the same.
        if price <= (bound or math.inf):
            found = more
    return found


@dataclass(frozen=True)
class Shortage:
    """Node types that are refused now.

    alive: nodes by type that live or are on their way.
    """

    market: Market
    refused: frozenset[str]
    alive: Counts


def fallback(planning: Planner, short: Shortage) -> Wanted:
    """Return the nodes of the best plan in which refused types get no more nodes than they have."""
    cluster = short.market.cluster
    standing = short.market.standing
    alive = {name: short.alive.get(name, 0) for name in short.refused}
    left = capped(cluster, alive)
    try:
        if not left.node_types:
            return Wanted(None, "there is no other type")
        counts = best_counts(planning, left, standing)
    except ConfigError as error:
        return Wanted(None, f"the other types have no plan: {error}")
    min_workers = planning.job.elastic.min_workers
    wanted = completed(counts, cluster, standing, min_workers)
    return Wanted(wanted, "")
