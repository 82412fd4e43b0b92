"""Garbage collection and handover of agents, and the end of leaving nodes.

Decides what agents may remove, what they must hand over, and which leaving nodes are not needed any
more. Pure: computed from orders and reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autohet.control.values.actions import Action, AskHoldings, EndAgent, HandOver, ReleaseNode
from autohet.control.values.observation import Age, HeldPart, Observation, Prune
from autohet.runtime.messages import GenerationOrder, Phase, WorkerReport
from recovery.state.holdings import Holding, Source, restorable_step

if TYPE_CHECKING:
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
    order = any_order(orders)
    if order is None:
        return None
    ages = []
    for worker in order.plan.workers:
        report = reports.get(worker)
        if report is None:
            return None
        if report.generation != order.generation or report.live_generation != order.generation:
            return None
        step = report.replicated_step if order.replicates else report.snapshot_step
        if step is None:
            return None
        ages.append((order.generation, step))
    # Nothing counts that one worker still lacks.
    return min(ages)


def all_live(orders: Mapping[str, GenerationOrder], reports: Mapping[str, WorkerReport]) -> bool:
    """Return True if every worker of the plan has the state of the present generation."""
    order = any_order(orders)
    if order is None:
        return False
    for worker in order.plan.workers:
        report = reports.get(worker)
        if report is None or report.live_generation != order.generation:
            return False
    return True


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
        """Present generation; 0 before the first one."""
        order = any_order(self.orders)
        return 0 if order is None else order.generation

    def release(self, node: str, seen: Observation, patience_s: float) -> ReleaseNode:
        """Release a node: it goes once nothing on it is needed.

        It goes at its deadline at the latest, or `patience_s` from now if it has none.
        """
        until = seen.now + patience_s
        notice = seen.notices.get(node)
        if notice is not None and notice.deadline is not None:
            until = notice.deadline
        self.leaving[node] = DepartingNode(self.generation, until)
        return ReleaseNode(node)

    def decide(self, seen: Observation) -> list[Action]:
        """Return what agents are to do now."""
        for name in self.leaving.keys() - seen.nodes.keys():
            del self.leaving[name]
        for name in self.leaving.keys() & seen.newest_copies.keys():
            departing = self.leaving[name]
            departing.newest_copy = seen.newest_copies[name]
            departing.refuses_copies = True

        durable = None
        manifest = seen.checkpoint.manifest
        if manifest is not None:
            durable = (manifest.generation, manifest.step)

        actions: list[Action] = []
        prune = self.prune(seen.reports, durable)
        if prune is not None:
            actions.append(prune)
        unneeded = self.find_unneeded(seen.reports, durable, seen.now)
        for name in unneeded:
            del self.leaving[name]
        actions += self._hand_over(seen)
        actions += [EndAgent(name) for name in unneeded]
        return actions

    def _hand_over(self, seen: Observation) -> list[Action]:
        """Have agents copy what only leaving nodes, or nodes at risk, hold.

        While no worker trains, no round and no restore copies what a leaving node alone keeps, so
        its agent must. What nodes at risk alone keep is copied once, when the risk is new, while
        all train. The next generation's rounds copy it from then on.
        """
        actions: list[Action] = []
        if self._asked_for and seen.holdings is not None:
            actions.append(self._hand_over_from(self._asked_for, seen.holdings, seen))
            self._asked_for = frozenset()

        leaving = frozenset(seen.notices) & seen.nodes.keys()
        at_risk = frozenset(seen.risks) & seen.nodes.keys()
        self._copied_risks &= at_risk
        has_new_risk = bool(at_risk - self._copied_risks)
        case = (self.generation, leaving)
        is_new = bool(leaving) and case != self._handed
        is_stranded = is_new and self.is_stranded(seen.reports)
        if self._asked_for or not (is_stranded or has_new_risk):
            return actions

        if is_stranded:
            self._handed = case
        self._copied_risks = at_risk
        self._asked_for = leaving | at_risk
        actions.append(AskHoldings())
        return actions

    def _hand_over_from(
        self,
        nodes: Collection[str],
        holdings: Mapping[str, Sequence[Holding]],
        seen: Observation,
    ) -> HandOver:
        """Have the agents of `nodes` copy what these alone hold to all other agents.

        holdings: what each node's agent holds.
        """
        held: list[Holding] = []
        for found in holdings.values():
            held += found
        parts = self.only_copies(held, nodes)

        agents = seen.agents()
        receivers = tuple(agents[name] for name in sorted(agents.keys() - nodes))
        if not receivers:
            return HandOver({}, ())
        alive = {name: found for name, found in parts.items() if name in seen.nodes}
        return HandOver(alive, receivers)

    def prune(self, reports: Mapping[str, WorkerReport], durable: Age | None) -> Prune | None:
        """Return what every agent may remove now, or None if that is not new.

        A restore never goes back behind the newest `durable` state.
        """
        order = any_order(self.orders)
        settled = settled_age(self.orders, reports)
        known = [age for age in (settled, durable) if age is not None]
        if order is None or not known:
            return None
        settled_generation = None if settled is None else order.generation
        if self._pruned == (settled_generation, durable):
            return None
        self._pruned = (settled_generation, durable)

        # Until all live in it, some may still write files of an older generation.
        present = None
        if all_live(self.orders, reports):
            present = order.generation
        disk_before = 0 if durable is None else durable[1]
        return Prune(
            memory_before=max(known),
            disk_before=disk_before,
            living=frozenset(order.plan.workers),
            generation=present,
        )

    def is_stranded(self, reports: Mapping[str, WorkerReport]) -> bool:
        """Return True if no worker trains or rebuilds, and some member's live state is gone.

        The state is then only where agents keep it.
        """
        order = any_order(self.orders)
        if order is None:
            return False
        for worker in order.plan.workers:
            if worker in reports and reports[worker].phase in MOVING:
                return False
        return not all_live(self.orders, reports)

    def only_copies(
        self, holdings: Iterable[Holding], leaving: Collection[str]
    ) -> dict[str, tuple[HeldPart, ...]]:
        """Return by leaving node the shards of the newest whole step that only leaving nodes keep.

        Each shard is listed once, from one source.
        """
        order = any_order(self.orders)
        if order is None:
            return {}
        known = []
        for holding in holdings:
            generation = holding.source.generation
            if order.ancestry.contains(order.generation, generation, holding.step):
                known.append(holding)
        shards = order.layout.shards
        step = restorable_step(shards, known)

        holders: dict[ShardId, list[Source]] = {}
        for holding in known:
            if holding.step == step:
                for shard in holding.shards:
                    holders.setdefault(shard, []).append(holding.source)

        parts: dict[Source, list[ShardId]] = {}
        for shard in sorted(shards & holders.keys()):
            sources = holders[shard]
            if all(source.node in leaving for source in sources):
                first = min(sources, key=_memory_first)
                parts.setdefault(first, []).append(shard)

        found: dict[str, tuple[HeldPart, ...]] = {}
        for source, held in sorted(parts.items()):
            before = found.get(source.node, ())
            found[source.node] = (*before, (source, tuple(held)))
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
        order = any_order(self.orders)
        if not departing.refuses_copies or order is None:
            return False
        newest = departing.newest_copy
        # All that this node holds is older than what the workers have settled since.
        is_newer = age is not None and (newest is None or age > newest)
        if age is not None and is_newer and age[0] >= departing.generation:
            return True
        if durable is None:
            return False

        # A restore goes back no further than to what this generation began with.
        step = order.start_step
        if newest is not None:
            step = max(step, newest[1])
        return durable[1] >= step


def _memory_first(source: Source) -> tuple[bool, Source]:
    """Return a key that sorts copies in memory before all others."""
    return source.kind != "memory", source
