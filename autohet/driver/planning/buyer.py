"""Adapts the request to the autoscaler: other types where one is refused, spares, no idle nodes.

Pure but for the planner's answers. Returns as actions what to request and what to give back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from autohet.driver.control.actions import Action, AskForNodes, GiveBack
from autohet.driver.control.observation import Launches, Observation
from autohet.driver.planning.buying import (
    IdleNodes,
    Market,
    Refusals,
    Shortage,
    Wanted,
    fallback,
    releasable,
    with_spares,
)
from autohet.driver.planning.proposals import Pending, Planning
from autohet.runtime.job import Job

LOOK_S = 5.0
STILL = "Deciding to ask for the same nodes still"


class Buyer:
    """Adapts what is requested of the autoscaler. Owned by the controller, as part of its state."""

    def __init__(self, job: Job, planning: Planning, market: Market) -> None:
        self._planning = planning
        self._market = market
        self._fixed = job.elastic.request_nodes is not None
        """True if the job names its nodes: the request never changes, and refusals are only logged.
        """
        self._idle_s = job.elastic.patience * job.elastic.idle_release_s
        self._bound = job.parallelism.max_usd_per_hour
        self._refusals, self._idle = Refusals(), IdleNodes(self._idle_s)
        self._refused: frozenset[str] = frozenset()
        self._priced = False
        self.released: set[str] = set()
        """Living nodes that were given back."""
        self._base, self.asked = dict(market.counts), dict(market.counts)
        """Nodes by type that the plans use; and those that were requested last."""
        self._search: Pending[Wanted] | None = None
        self._why = ""
        self._looked_at = -LOOK_S

    def decide(
        self, seen: Observation, members: Collection[str], *, training: bool
    ) -> tuple[list[Action], list[str]]:
        """Run one round, at most every LOOK_S seconds.

        Returns the actions, and sentences that give their reasons.
        """
        if seen.now - self._looked_at < LOOK_S:
            return [], []
        self._looked_at = seen.now
        used = {seen.node_of(worker) for worker in members}
        self.released &= seen.nodes.keys()
        alive = self._count_kept(seen)
        market = self._market.at(seen.prices)
        said = self._heed_refusals(seen, alive, market)
        if self._fixed:
            return [], said
        gone = self._let_go(seen, used, training)
        minutes = self._idle_s / 60
        said += [
            f"Deciding to give {name} back, since no plan has used it for {minutes:.0f} minutes"
            for name in gone
        ]
        wanted = with_spares(self._base, seen, used, market, self._bound)
        actions: list[Action] = [] if wanted == self.asked else [AskForNodes(wanted)]
        self.asked = wanted
        return actions + [
            GiveBack(name) for name in gone
        ], said  # in this order, or they would be replaced

    def _heed_refusals(
        self, seen: Observation, alive: Mapping[str, int], market: Market
    ) -> list[str]:
        """Search for other nodes when the refused types have changed, or spot prices become known.

        Spot prices count the first time, where the job bounds its price: they show what the bound
        allows. Returns sentences for the log.
        """
        before = self._refused
        refused = self._refused
        if seen.launches is not None:
            refused = self._refusals.look(seen.launches.failed, alive, seen.now)
        self._refused = refused
        priced = bool(seen.prices) and not self._priced
        self._priced |= priced
        if refused != before:
            self._why = refusal_words(refused, seen.launches) or "all types are tried again"
            if self._fixed:
                return (
                    [f"{STILL}, since {self._why}, and elastic.request_nodes names them"]
                    if refused
                    else []
                )
            if self._search is None and refused > before and not self._asks_for(refused - before):
                return [f"{STILL}, since {self._why}, and the plan uses none of them"]
        elif priced and self._bound is not None and not self._fixed:
            self._why = "spot prices are known"
        else:
            return self._take_answer()
        if self._search is not None:
            self._search.drop()
        self._search = self._planning.consider(fallback, Shortage(market, refused, dict(alive)))
        return self._take_answer()

    def _asks_for(self, kinds: Collection[str]) -> bool:
        """Return True if nodes of one of these types are wanted."""
        return any(self._base.get(kind, 0) for kind in kinds)

    def _take_answer(self) -> list[str]:
        """Adopt the nodes that the search found, once it is done. Returns sentences for the log."""
        found = None if self._search is None else self._search.result()
        if found is None:
            return []
        self._search = None
        if found.counts is None or (found.counts == self._base and self._refused):
            reason = found.reason or "no plan without them uses others"
            return [f"{STILL}, since {self._why}, and {reason}"]
        if found.counts == self._base:
            return []
        self._base = dict(found.counts)
        what = ", ".join(f"{count} {name}" for name, count in sorted(self._base.items()) if count)
        return [f"Deciding to ask for {what}, since {self._why}"]

    def _count_kept(self, seen: Observation) -> Counter[str]:
        """Return the number of living nodes of each type, without those that are released."""
        kept = [view.node for name, view in seen.nodes.items() if name not in self.released]
        return Counter(node.node_type.name for node in kept)

    def _let_go(self, seen: Observation, used: Collection[str], training: bool) -> list[str]:
        """Release idle nodes and stop requesting them. Returns their names."""
        unused = self._idle.look(seen, used, training=training)
        idle = [name for name in unused if name not in self.released]
        gone = list(releasable(idle, seen, self._market.standing))
        self.released |= {*gone}
        kept = self._count_kept(seen)
        for kind in sorted({seen.nodes[name].node.node_type.name for name in gone}):
            self._base[kind] = min(self._base.get(kind, 0), kept[kind])
        return gone


def refusal_words(refused: Collection[str], launches: Launches | None) -> str:
    """Describe the types that are refused and why; types of one cause are named together."""
    types_by_cause: dict[str, list[str]] = {}
    for name in sorted(refused):
        cause = "" if launches is None else launches.causes.get(name, launches.cause)
        types_by_cause.setdefault(cause, []).append(name)
    said = [
        f"no {', '.join(names)} can be had{': ' if cause else ''}{cause}"
        for cause, names in types_by_cause.items()
    ]
    return "; ".join(said)
