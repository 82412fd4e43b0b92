"""Adapts the request to the autoscaler: other types where one is refused, spares, no idle nodes.

Pure but for the planner's answers. Returns as actions what to request and what to give back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.fleet import on_their_way, overdue_causes
from autohet.control.planning.buying import (
    Counts,
    IdleNodes,
    Market,
    Refusals,
    Shortage,
    Wanted,
    fallback,
    largest,
    releasable,
    usd_per_hour,
    with_spares,
)
from autohet.control.planning.price_follower import PriceFollower, decides_by_price
from autohet.control.values.actions import Action, AskForNodes, GiveBack

if TYPE_CHECKING:
    from autohet.control.planning.goal import Left, Wish
    from autohet.control.planning.proposals import Pending, Planner
    from autohet.control.values.observation import Launches, Observation
    from autohet.runtime.job import Job

LOOK_S = 5.0
SURPLUS_S = 300.0
"""Seconds after which a node that other nodes replace is given back although it trains."""
GOAL_SURPLUS_S = 60.0
"""The same for a job with a deadline or a budget, whose plans use all nodes that live."""
STILL = "Deciding to ask for the same nodes still"


class Buyer:
    """Adapts what is requested of the autoscaler. Owned by the controller, as part of its state."""

    def __init__(self, job: Job, planning: Planner, market: Market) -> None:
        self._planning = planning
        self._market = market
        self._fixed = job.elastic.request_nodes is not None
        """True if the job names its nodes: the request never changes, and refusals are only logged.
        """
        self._patience = job.elastic.patience
        self._idle_s = self._patience * job.elastic.idle_release_s
        self._bound = job.parallelism.max_usd_per_hour
        self._follower: PriceFollower | None = None
        if decides_by_price(job) and not self._fixed:
            self._follower = PriceFollower(job, planning, market)
        self._refusals = Refusals()
        self._idle = IdleNodes(self._idle_s)
        self._refused: frozenset[str] = frozenset()
        self.released: set[str] = set()
        """Living nodes that were given back."""
        self._base = dict(market.counts)
        """Nodes by type that the plans use."""
        self.asked = dict(market.counts)
        """Nodes by type that were requested last."""
        self._search: Pending[Wanted] | None = None
        self._why = ""
        self._looked_at = -LOOK_S
        self._switched_at = 0.0

    @property
    def wish(self) -> Wish | None:
        """Fleet that is wanted for a deadline or a budget."""
        return None if self._follower is None else self._follower.wish

    @property
    def look_at(self) -> float:
        """Time at which a deadline or a budget wants another choice."""
        return math.inf if self._follower is None else self._follower.look_at

    @property
    def prices(self) -> dict[str, float]:
        """Prices of node types in the cluster file or by its catalogue, in USD per hour."""
        kinds = self._market.cluster.node_types
        return {kind.name: kind.usd_per_hour or 0.0 for kind in kinds}

    @property
    def waits(self) -> bool:
        """True if a deadline or a budget is waiting for nodes at a usual price."""
        return self._follower is not None and self._follower.waits

    def decide(
        self,
        seen: Observation,
        members: Collection[str],
        *,
        training: bool,
        left: Left | None = None,
    ) -> tuple[list[Action], list[str]]:
        """Run one round, at most every LOOK_S seconds.

        left: of the job's deadline and budget; None: it has none. Returns the actions, and
        sentences that give their reasons.
        """
        if seen.now - self._looked_at < LOOK_S:
            return [], []
        self._looked_at = seen.now
        self.released &= seen.nodes.keys()
        market = self._market.at(seen.prices)
        if self._follower is None:
            sentences = self._answer_refusals(seen, market)
        else:
            sentences = self._follow_prices(self._follower, seen, market, left)
        if self._fixed:
            return [], sentences

        used = seen.nodes_with(members)
        returned = self._release_idle(seen, used, training)
        minutes = self._idle_s / 60
        for name in returned:
            sentences.append(
                f"Deciding to give {name} back, since no plan has used it for {minutes:.0f} minutes"
            )

        actions: list[Action] = []
        wanted = with_spares(self._base, seen, used, market, self._bound)
        if self._follower is not None:
            surplus = self._release_surplus(seen, used, wanted, market)
            names = ", ".join(surplus)
            if surplus:
                sentences.append(f"Deciding to give {names} back, since other nodes are wanted")
            returned += surplus
            # What still trains is not the autoscaler's to take away while other nodes start.
            wanted = largest(wanted, self._count_kept(seen, used))
        if wanted != self.asked:
            actions.append(AskForNodes(wanted))
            self.asked = wanted
        # The request is lowered first: else the autoscaler would replace what is given back.
        actions += [GiveBack(name) for name in returned]
        return actions, sentences

    def _answer_refusals(self, seen: Observation, market: Market) -> list[str]:
        """Search for other nodes when the refused types have changed.

        Returns sentences for the log.
        """
        before = self._refused
        alive = self._count_kept(seen)
        words = self._look_at_refusals(seen, alive)
        new = self._refused - before
        if self._refused == before:
            return self._take_answer()
        self._why = words or "all types are tried again"
        if self._fixed:
            if not self._refused:
                return []
            return [f"{STILL}, since {self._why}, and elastic.request_nodes names them"]
        has_only_grown = self._refused > before
        are_wanted = any(self._base.get(kind, 0) for kind in new)
        if self._search is None and has_only_grown and not are_wanted:
            return [f"{STILL}, since {self._why}, and the plan uses none of them"]

        if self._search is not None:
            self._search.drop()
        # Nodes on their way are paid for: a plan without them would buy the same GPUs twice.
        alive.update(node.node_type for node in on_their_way(seen, self._patience))
        shortage = Shortage(market, self._refused, dict(alive))
        self._search = self._planning.consider(fallback, shortage)
        return self._take_answer()

    def _look_at_refusals(self, seen: Observation, alive: Counts) -> str:
        """Note which types are refused now; return why, in words."""
        overdue = overdue_causes(seen, self._patience)
        if seen.launches is not None:
            failed = seen.launches.failed
            self._refused = self._refusals.look(failed, alive, seen.now, overdue)
        return refusal_words(self._refused, seen.launches, overdue)

    def _follow_prices(
        self, follower: PriceFollower, seen: Observation, market: Market, left: Left | None
    ) -> list[str]:
        """Choose anew which nodes to pay for, if prices, refusals or what is left have changed."""
        alive = self._count_kept(seen)
        refusal = self._look_at_refusals(seen, alive)
        most = {name: alive.get(name, 0) for name in self._refused}
        why = follower.reason_to_choose(market, self._base, most, refusal, left)
        if not why:
            return []
        found = follower.choose(market, self._base, most, self._kept_usd(seen), left)
        reason = f"{why}, and {found.reason}" if found.reason else why
        if found.counts is None or found.counts == self._base:
            is_news = reason != self._why and (found.reason or why == refusal)
            self._why = reason
            return [f"{STILL}, since {reason}"] if is_news else []
        self._base = dict(found.counts)
        self._switched_at = seen.now
        return [f"Deciding to ask for {_words(self._base)}, since {reason}"]

    def _kept_usd(self, seen: Observation) -> float:
        """Return the price of the living nodes that are not given back, in USD per hour."""
        kept = [name for name in seen.nodes if name not in self.released]
        return fleet.total_usd_per_hour(fleet.prices_of(seen, kept), kept)

    def _release_surplus(
        self, seen: Observation, used: Collection[str], wanted: Counts, market: Market
    ) -> tuple[str, ...]:
        """Give back nodes that are not wanted, once those that are have come.

        At once, whatever trains on them, if none are wanted, or as long as all nodes cost more than
        the bound together. Returns their names.
        """
        kept = self._count_kept(seen)
        missing = {name: max(0, number - kept[name]) for name, number in wanted.items()}
        usd = self._kept_usd(seen) + usd_per_hour(missing, market.cluster)
        is_any_wanted = any(wanted.values())
        have_come = is_any_wanted and not any(missing.values())
        late_s = SURPLUS_S if self.wish is None else GOAL_SURPLUS_S
        is_late = seen.now - self._switched_at > late_s
        prices = fleet.prices_of(seen, seen.nodes)
        # Nodes of other types were started by somebody else, who pays for them.
        bought = {kind.name for kind in market.cluster.node_types}
        # Idle and dear ones first.
        order = sorted(seen.nodes, key=lambda n: (n in used, -(prices[n] or 0.0), n))
        returned = []
        for name in order:
            kind = seen.nodes[name].node_type.name
            floor = max(wanted.get(kind, 0), market.standing.get(kind, 0))
            is_going = name in self.released or name in seen.notices
            if is_going or kind not in bought or kept[kind] <= floor:
                continue
            is_beyond = self._bound is not None and usd > self._bound * (1 + 1e-9)
            if is_beyond or not is_any_wanted or (have_come and (name not in used or is_late)):
                returned.append(name)
                kept[kind] -= 1
                usd -= prices[name] or 0.0
        self.released.update(returned)
        return tuple(returned)

    def _take_answer(self) -> list[str]:
        """Adopt the nodes that the search found, once it is done. Returns sentences for the log."""
        if self._search is None:
            return []
        found = self._search.result()
        if found is None:
            return []
        self._search = None

        is_same = found.counts == self._base
        if found.counts is None or (is_same and self._refused):
            reason = found.reason or "no plan without them uses others"
            return [f"{STILL}, since {self._why}, and {reason}"]
        if is_same:
            return []
        self._base = dict(found.counts)
        return [f"Deciding to ask for {_words(self._base)}, since {self._why}"]

    def _count_kept(self, seen: Observation, among: Collection[str] | None = None) -> Counter[str]:
        """Return the number of living nodes of each type, without those that are released."""
        kept: Counter[str] = Counter()
        for name, view in seen.nodes.items():
            if name not in self.released and (among is None or name in among):
                kept[view.node_type.name] += 1
        return kept

    def _release_idle(
        self, seen: Observation, used: Collection[str], training: bool
    ) -> tuple[str, ...]:
        """Release idle nodes and stop requesting them. Returns their names.

        While others are on their way nothing counts as idle: a plan may need all of them.
        """
        coming = {node.node_type for node in on_their_way(seen, self._patience)}
        is_complete = coming <= self._refused
        unused = self._idle.look(seen, used, training=training and is_complete)
        # Whoever uses the GPUs of a node would lose it.
        idle = [name for name in unused if name not in self.released and name not in seen.busy]
        returned = releasable(idle, seen, self._market.standing)
        self.released.update(returned)

        kept = self._count_kept(seen)
        kinds = {seen.nodes[name].node_type.name for name in returned}
        for kind in sorted(kinds):
            requested = self._base.get(kind, 0)
            # As many are requested as remain, or the autoscaler would start another one.
            self._base[kind] = min(requested, kept[kind])
        return returned


def _words(counts: Counts) -> str:
    nodes = [f"{count} {name}" for name, count in sorted(counts.items()) if count]
    return ", ".join(nodes) or "no node"


def refusal_words(
    refused: Collection[str], launches: Launches | None, overdue: Mapping[str, str] | None = None
) -> str:
    """Describe the types that are refused and why; types of one cause are named together.

    overdue: reasons of types with an overdue start, which come before those of failed launches.
    """
    types_by_cause: dict[str, list[str]] = {}
    for name in sorted(refused):
        cause = ""
        if launches is not None:
            cause = launches.causes.get(name, launches.cause)
        cause = (overdue or {}).get(name, cause)
        types_by_cause.setdefault(cause, []).append(name)

    phrases = []
    for cause, names in types_by_cause.items():
        phrase = f"no {', '.join(names)} can be had"
        if cause:
            phrase += f": {cause}"
        phrases.append(phrase)
    return "; ".join(phrases)
