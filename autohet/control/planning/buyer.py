"""Adapts the request to the autoscaler: other types where one is refused, spares, no idle nodes.

Pure but for the planner's answers. Returns as actions what to request and what to give back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from autohet.control.planning.buying import (
    IdleNodes,
    Market,
    Refusals,
    Shortage,
    Wanted,
    fallback,
    releasable,
    with_spares,
)
from autohet.control.planning.starts import on_their_way, overdue_causes
from autohet.control.values.actions import Action, AskForNodes, GiveBack

if TYPE_CHECKING:
    from autohet.control.planning.proposals import Pending, Planner
    from autohet.control.values.observation import Launches, Observation
    from autohet.runtime.job import Job

LOOK_S = 5.0
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
        self._refusals = Refusals()
        self._idle = IdleNodes(self._idle_s)
        self._refused: frozenset[str] = frozenset()
        self.knows_prices = False
        """True once spot prices have been seen: a search for them comes only once."""
        self.released: set[str] = set()
        """Living nodes that were given back."""
        self._base = dict(market.counts)
        """Nodes by type that the plans use."""
        self.asked = dict(market.counts)
        """Nodes by type that were requested last."""
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
        self.released &= seen.nodes.keys()
        market = self._market.at(seen.prices)
        sentences = self._answer_refusals(seen, market)
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
        if wanted != self.asked:
            actions.append(AskForNodes(wanted))
            self.asked = wanted
        # The request is lowered first: else the autoscaler would replace what is given back.
        actions += [GiveBack(name) for name in returned]
        return actions, sentences

    def _answer_refusals(self, seen: Observation, market: Market) -> list[str]:
        """Search for other nodes when the refused types have changed, or spot prices become known.

        Spot prices count the first time, where the job bounds its price: they show what the bound
        allows. Returns sentences for the log.
        """
        before = self._refused
        alive = self._count_kept(seen)
        overdue = overdue_causes(seen, self._patience)
        if seen.launches is not None:
            failed = seen.launches.failed
            self._refused = self._refusals.look(failed, alive, seen.now, overdue)
        new = self._refused - before
        prices_are_new = bool(seen.prices) and not self.knows_prices
        self.knows_prices |= prices_are_new

        if self._refused != before:
            words = refusal_words(self._refused, seen.launches, overdue)
            self._why = words or "all types are tried again"
            if self._fixed:
                if not self._refused:
                    return []
                return [f"{STILL}, since {self._why}, and elastic.request_nodes names them"]
            has_only_grown = self._refused > before
            if self._search is None and has_only_grown and not self._asks_for(new):
                return [f"{STILL}, since {self._why}, and the plan uses none of them"]
        elif prices_are_new and self._bound is not None and not self._fixed:
            self._why = "spot prices are known"
        else:
            return self._take_answer()

        if self._search is not None:
            self._search.drop()
        # Nodes on their way are paid for: a plan without them would buy the same GPUs twice.
        alive.update(node.node_type for node in on_their_way(seen, self._patience))
        shortage = Shortage(market, self._refused, dict(alive))
        self._search = self._planning.consider(fallback, shortage)
        return self._take_answer()

    def _asks_for(self, kinds: Collection[str]) -> bool:
        """Return True if nodes of one of these types are wanted."""
        return any(self._base.get(kind, 0) for kind in kinds)

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
        nodes = []
        for name, count in sorted(self._base.items()):
            if count:
                nodes.append(f"{count} {name}")
        return [f"Deciding to ask for {', '.join(nodes)}, since {self._why}"]

    def _count_kept(self, seen: Observation) -> Counter[str]:
        """Return the number of living nodes of each type, without those that are released."""
        kept: Counter[str] = Counter()
        for name, view in seen.nodes.items():
            if name not in self.released:
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
