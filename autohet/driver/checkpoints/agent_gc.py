"""Garbage collection and handover of agents, and the end of leaving nodes.

Decides what agents may remove, what they must hand over, and which leaving nodes are not needed any
more. Pure: computed from orders and reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from autohet.driver.control.actions import Action, AskHoldings, EndAgent, HandOver, ReleaseNode
from autohet.driver.control.observation import Age, HeldPart, Observation, Prune
from autohet.runtime.messages import GenerationOrder, Phase, WorkerReport
from recovery.state.holdings import Holding, Source, restorable_step
from recovery.state.layout import ShardId

MOVING = frozenset({Phase.BUILDING, Phase.RESTORING, Phase.TRAINING})


def any_order(orders: Mapping[str, GenerationOrder]) -> GenerationOrder | None:
    """Return one order of a generation, for what they share; None if there is no generation."""
    for order in orders.values():
        return order
    return None


def settled_age(
    orders: Mapping[str, GenerationOrder], reports: Mapping[str, WorkerReport]
) -> Age | None:
    """Return the age at which every worker keeps the present generation's state.

    What one node alone holds must have a copy on another node. Nothing older in host memory is
    needed. None until that is so for the first time.
    """
    ages = []
    for worker in next(iter(orders.values())).plan.workers if orders else ():
        report = reports.get(worker)
        order = orders[worker]
        if (
            report is None
            or report.generation != order.generation
            or report.live_generation != order.generation
        ):
            return None
        step = report.replicated_step if order.replicates else report.snapshot_step
        if step is None:
            return None
        ages.append((order.generation, step))
    return min(ages, default=None)


def all_live(orders: Mapping[str, GenerationOrder], reports: Mapping[str, WorkerReport]) -> bool:
    """Return True if every worker of the plan has the state of the present generation."""
    return bool(orders) and all(
        worker in reports and reports[worker].live_generation == orders[worker].generation
        for worker in next(iter(orders.values())).plan.workers
    )


@dataclass
class DepartingNode:
    """Departure of a node that may go once nothing on it is needed.

    newest_copy: age of the newest copy that its agent took in from others before it refused more.
    refuses_copies: the agent has confirmed that it takes no more copies.
    """

    generation: int
    until: float
    newest_copy: Age | None = None
    refuses_copies: bool = False


@dataclass
class AgentGc:
    """Decides which copies agents remove or hand over, and which leaving nodes may go.

    Follows one job's generations.

    Asks for a pruning when a generation is settled for the first time, and when a durable step is
    new. Ages of durable steps are those of their manifests.
    """

    orders: Mapping[str, GenerationOrder] = field(default_factory=dict)
    leaving: dict[str, DepartingNode] = field(default_factory=dict)
    _pruned: tuple[int | None, Age | None] | None = None
    _asked_for: frozenset[str] = frozenset()
    """Nodes, leaving or at risk, because of which agents were asked for what they hold.

    It is empty once they have answered.
    """
    _handed: tuple[int, frozenset[str]] | None = None
    """Generation and leaving nodes for which agents were last asked."""
    _copied_risks: frozenset[str] = frozenset()
    """Nodes at risk whose only copies were handed over."""

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        self.orders = dict(orders)

    @property
    def generation(self) -> int:
        return next((order.generation for order in self.orders.values()), 0)

    def release(self, node: str, seen: Observation, patience_s: float) -> ReleaseNode:
        """Release a node: it goes once nothing on it is needed.

        It goes at its deadline at the latest, or `patience_s` from now if it has none.
        """
        deadline = seen.notices[node].deadline if node in seen.notices else None
        self.leaving[node] = DepartingNode(
            self.generation, seen.now + patience_s if deadline is None else deadline
        )
        return ReleaseNode(node)

    def decide(self, seen: Observation) -> list[Action]:
        """Return what agents are to do now."""
        self.leaving = {
            name: departing for name, departing in self.leaving.items() if name in seen.nodes
        }
        for name in self.leaving.keys() & seen.newest_copies.keys():
            self.leaving[name].newest_copy = seen.newest_copies[name]
            self.leaving[name].refuses_copies = True
        manifest = seen.checkpoint.manifest
        durable = None if manifest is None else (manifest.generation, manifest.step)
        prune = self.prune(seen.reports, durable)
        ended = self.find_unneeded(seen.reports, durable, seen.now)
        for name in ended:
            del self.leaving[name]
        return [*([] if prune is None else [prune]), *self._hand_over(seen), *map(EndAgent, ended)]

    def _hand_over(self, seen: Observation) -> list[Action]:
        """Have agents copy what only leaving nodes, or nodes at risk, hold.

        While no worker trains, no round and no restore copies what a leaving node alone keeps, so
        its agent must. What nodes at risk alone keep is copied once, when the risk is new, while
        all train. The next generation's rounds copy it from then on.
        """
        leaving, at_risk = (
            frozenset(names) & seen.nodes.keys() for names in (seen.notices, seen.risks)
        )
        actions: list[Action] = []
        if self._asked_for and seen.holdings is not None:
            parts = self.only_copies(
                [held for found in seen.holdings.values() for held in found], self._asked_for
            )
            remaining = sorted(seen.nodes.keys() - self._asked_for)
            ends = [seen.nodes[name].endpoint for name in remaining]
            stay = tuple(end for end in ends if end is not None)
            here = {name: found for name, found in parts.items() if name in seen.nodes}
            actions.append(HandOver(here if stay else {}, stay))
            self._asked_for = frozenset()
        case = (self.generation, leaving)
        stranded = leaving and case != self._handed and self.is_stranded(seen.reports)
        self._copied_risks &= at_risk
        if not self._asked_for and (stranded or at_risk - self._copied_risks):
            self._handed = case if stranded else self._handed
            self._copied_risks = at_risk
            self._asked_for = leaving | at_risk
            actions.append(AskHoldings())
        return actions

    def prune(self, reports: Mapping[str, WorkerReport], durable: Age | None) -> Prune | None:
        """Return what every agent may remove now, or None if that is not new.

        A restore never goes back behind the newest `durable` state.
        """
        settled = settled_age(self.orders, reports)
        known = [age for age in (settled, durable) if age is not None]
        state = (self.generation if settled is not None else None, durable)
        if not self.orders or not known or state == self._pruned:
            return None
        self._pruned = state
        living = frozenset(next(iter(self.orders.values())).plan.workers)
        disk_before = 0 if durable is None else durable[1]
        # Until all live in it, some may still write files of an older generation.
        present = self.generation if all_live(self.orders, reports) else None
        return Prune(max(known), disk_before, living, present)

    def is_stranded(self, reports: Mapping[str, WorkerReport]) -> bool:
        """Return True if no worker trains or rebuilds, and some member's live state is gone.

        The state is then only where agents keep it.
        """
        if not self.orders:
            return False
        order = next(iter(self.orders.values()))
        found = [reports.get(worker) for worker in order.plan.workers]
        if any(report is not None and report.phase in MOVING for report in found):
            return False
        return any(report is None or report.live_generation != order.generation for report in found)

    def only_copies(
        self, holdings: Iterable[Holding], leaving: Collection[str]
    ) -> dict[str, tuple[HeldPart, ...]]:
        """Return by leaving node the shards of the newest whole step that only leaving nodes keep.

        Each shard is listed once, from one source.
        """
        if not self.orders:
            return {}
        order = next(iter(self.orders.values()))
        shards = order.layout.shards
        ancestry = order.ancestry
        known = [
            h for h in holdings if ancestry.contains(order.generation, h.source.generation, h.step)
        ]
        step = restorable_step(shards, known)
        holders: dict[ShardId, list[Source]] = {}
        for holding in known:
            for shard in holding.shards if holding.step == step else ():
                holders.setdefault(shard, []).append(holding.source)
        parts: dict[Source, list[ShardId]] = {}
        for shard in sorted(shards & holders.keys()):
            if all(source.node in leaving for source in holders[shard]):
                first = min(holders[shard], key=lambda source: (source.kind != "memory", source))
                parts.setdefault(first, []).append(shard)
        found: dict[str, tuple[HeldPart, ...]] = {}
        for source, of_source in sorted(parts.items()):
            found[source.node] = (*found.get(source.node, ()), (source, tuple(of_source)))
        return found

    def find_unneeded(
        self, reports: Mapping[str, WorkerReport], durable: Age | None, now: float
    ) -> list[str]:
        """Return the leaving nodes that may go.

        What they hold is held elsewhere, or newer state is; or their time is over.
        """
        age = settled_age(self.orders, reports) if self.leaving else None
        leaving = self.leaving.items()
        return [name for name, node in leaving if self._may_go(node, age, durable, now)]

    def _may_go(
        self, departing: DepartingNode, age: Age | None, durable: Age | None, now: float
    ) -> bool:
        if now >= departing.until:
            return True
        if not departing.refuses_copies or not self.orders:
            return False
        newest = departing.newest_copy
        if age is not None and age[0] >= departing.generation and (newest is None or age > newest):
            return True
        start = next(iter(self.orders.values())).start_step
        return durable is not None and durable[1] >= max(start, 0 if newest is None else newest[1])
