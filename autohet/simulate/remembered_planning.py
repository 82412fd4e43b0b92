"""Planner of a simulation: the real one, with remembered answers.

A fleet is remembered by its multiset of node types (and slowdowns), a replanning by that and the
present plan, both in names that count the nodes of a type: it makes no difference which of two
equal nodes left. If the job decides by price (objective, bound), equal nodes cost the same; else
the current price changes no answer. No search is made if the best repair of the present plan is as
fast as a searched fleet of nearly as many GPUs lets expect. The cost of an answer in simulated time
is stated (`Costs.search_seconds`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autohet.control.planning.proposals import (
    Pending,
    PendingCall,
    PendingSearch,
    Planner,
    PlanProposal,
    Q,
    T,
)
from autohet.driver.loop.planning import Planning
from autohet.runtime.facts.planning import PlanningInputs
from autohet.simulate.costs import SMALL_FLEET_GPUS, Costs
from planner.answers.replan import MigrationCost, align, holders_of, replan
from planner.cost.model import CostModel
from planner.cost.prediction import Prediction
from planner.errors import ConfigError, InfeasibleError
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import Fleet, Node, node_of
from planner.plans.plan import Plan, Stage
from planner.search.problem.request import Request
from planner.strategies import plan_with
from planner.strategies.speeds import FleetSpeeds

PricedKind = tuple[str, float, float | None]
"""Node type's name, slowdown, and, for a job that decides by price, dollars an hour."""
KindCounts = tuple[tuple[PricedKind, int], ...]
AS_FAST = 1.05
"""Ratio to the expected step time up to which a repair ends the search.

A searched fleet gives the expected time. Not to search further is to AutoHet's disadvantage.
"""
NEAR = 0.2
"""Share of a fleet's GPUs by which a searched fleet may differ to be compared with it."""


@dataclass(frozen=True)
class Remembered:
    """Answer of the planner, in counted names."""

    plan: Plan
    prediction: Prediction
    stay: bool
    reason: str
    searched: bool


@dataclass
class SearchCache:
    """Results of all searches so far, shared by all policies of one simulation."""

    plans: dict[KindCounts, tuple[float, Plan]] = field(default_factory=dict)
    """Fastest known plan of each fleet, with its step time."""
    searched: dict[KindCounts, float] = field(default_factory=dict)
    """Step time of each fleet for which a whole search was made."""
    answers: dict[tuple[object, ...], Remembered | str] = field(default_factory=dict)
    kinds: dict[str, PricedKind] = field(default_factory=dict)
    """Kind of each counted name, so that one policy can place a plan that another found."""
    grids: dict[tuple[PricedKind, int], tuple[Plan, Prediction, int] | None] = field(
        default_factory=dict
    )
    """Symmetric plan of each (node type, number of nodes)."""
    speed: dict[PricedKind, float] = field(default_factory=dict)
    """Blocks a second of one node of each type alone."""
    speeds: dict[tuple[object, ...], FleetSpeeds] = field(default_factory=dict)
    """Step times of the fleets of a cluster, by its node types and the fleets asked for by name."""
    cost: CostModel | None = None
    """Cost model of the fleet with the most node types so far."""
    num_searches: int = 0
    search_cpu_s: float = 0.0

    def keep(
        self, counts: KindCounts, prediction: Prediction, plan: Plan, *, searched: bool
    ) -> None:
        step_s = prediction.step_time_s
        if counts not in self.plans or step_s < self.plans[counts][0]:
            self.plans[counts] = (step_s, plan)
        if searched:
            self.searched[counts] = min(step_s, self.searched.get(counts, step_s))

    def expected_s(self, counts: KindCounts) -> float | None:
        """Return the step time that the nearest searched fleet lets expect.

        It is scaled by the sum of the nodes' speeds.
        """
        here = self._total_speed(counts)
        candidates = []
        for searched, step_s in self.searched.items():
            there = self._total_speed(searched)
            candidates.append((abs(there - here), step_s * there / here))
        if not candidates:
            return None

        # Of two fleets that are equally near, the lower expectation counts: it demands more.
        distance, expected_s = min(candidates)
        if distance > NEAR * here:
            return None
        return expected_s

    def _total_speed(self, counts: KindCounts) -> float:
        """Return the sum of the nodes' speeds, in blocks a second."""
        return sum(self.speed[kind] * number for kind, number in counts)


def rename_nodes(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the same plan on nodes of other names."""
    return plan.map_stages(partial(_rename_stage, names))


def _rename_stage(names: Mapping[str, str], stage: Stage) -> Stage:
    workers = []
    for worker in stage.workers:
        node, _, gpu = worker.rpartition("/")
        workers.append(f"{names[node]}/{gpu}")
    return replace(stage, workers=tuple(workers))


class RememberedPlanning(Planning):
    """Planning of a simulated driver, with remembered answers.

    `busy`: called with the seconds for which the driver is busy. `now`: the simulated time. `wake`:
    called with the time at which the driver looks again.
    """

    def __init__(
        self,
        inputs: PlanningInputs,
        memory: SearchCache,
        costs: Costs,
        *,
        now: Callable[[], float] = lambda: 0.0,
        busy: Callable[[float], None] = lambda seconds: None,
        wake: Callable[[float], None] = lambda moment: None,
    ) -> None:
        super().__init__(inputs, now)
        self.memory = memory
        self.costs = costs
        self._busy = busy
        self._wake = wake
        self.predictions: dict[Plan, Prediction] = {}
        wishes = self.job.parallelism
        self._by_price = wishes.objective == "cost" or wishes.max_usd_per_hour is not None
        self._kinds: dict[str, PricedKind] = {}
        """Kind of every node that was ever in a fleet, under its own and its counted name."""

    def kind_of(self, node: Node) -> PricedKind:
        kind = node.node_type
        price = kind.usd_per_hour if self._by_price else None
        return kind.name, kind.slowdown, price

    def counts_of(self, fleet: Fleet) -> KindCounts:
        numbers = Counter(self.kind_of(node) for node in fleet.nodes)
        return tuple(sorted(numbers.items()))

    def make_cost(self, fleet: Fleet, *, one_format: bool = False) -> CostModel:
        """Same as `Planning.make_cost`, but computes nothing again for known node types."""
        if one_format:
            return super().make_cost(fleet, one_format=True)
        planned = self.inputs.fleet(fleet)
        try:
            if self.memory.cost is not None:
                return self.memory.cost.with_fleet(planned)
        except ConfigError:
            pass  # The fleet has a node type that the remembered model was not made for.
        self.memory.cost = super().make_cost(fleet)
        return self.memory.cost

    def propose(
        self,
        fleet: Fleet,
        current: PlanProposal | None,
        *,
        redundant: bool = True,
        thorough: bool | None = None,
    ) -> PlanProposal:
        """Same as `Planning.propose`, with remembered answers.

        The driver is busy for the stated search time.
        """
        self._busy(self.costs.search_seconds(len(fleet.workers), waiting=True))
        plan = None if current is None else current.plan
        return self.answer(fleet, plan, redundant=redundant, thorough=thorough)

    def keep_pipelines(self, fleet: Fleet, current: PlanProposal) -> PlanProposal | None:
        """Same as `Planning.keep_pipelines`; the driver is busy for the stated time of a repair."""
        found = super().keep_pipelines(fleet, current)
        if found is not None:
            self._busy(self.costs.repair_s)
            self.predictions[found.plan] = found.prediction
        return found

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        """Same as `Planning.search`; its result is available after the stated search time."""
        seconds = self.costs.search_seconds(len(fleet.workers), waiting=False)
        plan = None if current is None else current.plan
        return self._after(seconds, partial(self.answer, fleet, plan, thorough=True))

    def consider(self, work: Callable[[Planner, Q], T], question: Q) -> Pending[T]:
        """Same as `Planning.consider`; its result is available after a whole search's time."""
        return self._after(self.costs.whole_search_s, partial(work, self, question))

    def _after(self, seconds: float, answer: Callable[[], T]) -> Pending[T]:
        """Return an answer that is available after simulated seconds."""
        ready_at = self.clock() + seconds
        self._wake(ready_at)
        return PendingCall(lambda: answer() if self.clock() >= ready_at else None)

    def fleet_speeds(self, cluster: Cluster, also: Sequence[Mapping[str, int]]) -> FleetSpeeds:
        """Same as `Planning.fleet_speeds`, asked for once."""
        names = tuple(kind.name for kind in cluster.node_types)
        key = (names, tuple(tuple(sorted(counts.items())) for counts in also))
        if key not in self.memory.speeds:
            self.memory.speeds[key] = super().fleet_speeds(cluster, also)
        return self.memory.speeds[key]

    def answer(
        self,
        fleet: Fleet,
        current: Plan | None,
        *,
        redundant: bool = True,
        thorough: bool | None = None,
    ) -> PlanProposal:
        """Return the planner's answer, in no simulated time.

        Raises:
            ConfigError: no plan exists for this fleet.
        """
        if redundant:
            self.require_nodes(fleet)
        for node in fleet.nodes:
            self._kinds[node.name] = self.kind_of(node)
        names = self._counted_names(fleet, current)
        found = self._recall(fleet, current, names, redundant, thorough)

        own_names = {counted_name: name for name, counted_name in names.items()}
        plan = rename_nodes(found.plan, own_names)
        self.predictions[plan] = found.prediction
        cost = self.make_cost(fleet)
        return PlanProposal(
            plan, found.prediction, cost, (), found.stay, found.reason, found.searched
        )

    def _recall(
        self,
        fleet: Fleet,
        current: Plan | None,
        names: Mapping[str, str],
        redundant: bool,
        thorough: bool | None,
    ) -> Remembered:
        """Return the planner's answer in counted names, which is asked for once only.

        Raises:
            InfeasibleError: no plan exists for this fleet.
        """
        nodes = [Node(names[node.name], node.node_type) for node in fleet.nodes]
        counted = Fleet(0, tuple(sorted(nodes, key=lambda node: node.name)))
        plan = None if current is None else rename_nodes(current, names)

        # The nodes' types differ with every change of price; their kinds only where it matters.
        kinds = tuple((node.name, self.kind_of(node)) for node in counted.nodes)
        # The bound differs where a part of the job's own pays for nodes that stand anyway.
        bound = self.job.parallelism.max_usd_per_hour
        key = (kinds, plan, redundant, thorough, bound)
        if key not in self.memory.answers:
            begun = time.process_time()
            try:
                self.memory.answers[key] = self._ask(counted, plan, redundant, thorough)
            except ConfigError as error:
                # A search that finds nothing takes as long: remember the refusal, too.
                self.memory.answers[key] = str(error)
            self.memory.search_cpu_s += time.process_time() - begun

        found = self.memory.answers[key]
        if isinstance(found, str):
            raise InfeasibleError(found)
        return found

    def _ask(
        self, fleet: Fleet, current: Plan | None, redundant: bool, thorough: bool | None
    ) -> Remembered:
        # A search's time limit counts the CPU's seconds: its result must not depend on what else
        # the machine does.
        request = replace(self.request(fleet, self.make_cost(fleet)), clock=time.process_time)
        if not redundant:
            request = replace(request, min_node_disjoint_holders=1)
        counts = self.counts_of(fleet)
        self._note_speeds(request)
        if current is None:
            return self._first(request, counts)

        is_small = len(fleet.workers) <= SMALL_FLEET_GPUS
        whole = thorough or (thorough is None and is_small)
        if not whole or self._may_repair(counts):
            try:
                found = self._replan(current, request, counts, thorough=False)
            except InfeasibleError:
                # No repair fits: a whole search may find another plan.
                if thorough is False:
                    raise
            else:
                if not whole or self._is_fast(counts, found.prediction.step_time_s):
                    return replace(found, searched=whole)
        self.memory.num_searches += 1
        return self._replan(current, request, counts, thorough=True)

    def _may_repair(self, counts: KindCounts) -> bool:
        """Return true unless the fleet's fastest known plan is slow compared with near fleets."""
        if counts not in self.memory.plans:
            return True
        step_s, _ = self.memory.plans[counts]
        return self._is_fast(counts, step_s)

    def _is_fast(self, counts: KindCounts, step_s: float) -> bool:
        """Return true if a fleet was searched, or has a plan as fast as a near one lets expect."""
        if counts in self.memory.searched:
            return True
        # A job that decides by price may want a slower plan: near fleets' step times say nothing.
        if self._by_price:
            return False
        expected_s = self.memory.expected_s(counts)
        return expected_s is not None and step_s <= AS_FAST * expected_s

    def _first(self, request: Request, counts: KindCounts) -> Remembered:
        """Return the plan if nothing runs yet: a remembered plan of this fleet, or a whole search.

        A remembered plan is the fastest one, so it is not used for a job that asks for the cheapest
        tokens.
        """
        if counts in self.memory.plans and self.job.parallelism.objective == "time":
            _, fastest = self.memory.plans[counts]
            plan = self._place(fastest, request)
            return Remembered(plan, request.cost.predict(plan), False, "", True)
        self.memory.num_searches += 1
        answer = plan_with(self.job.parallelism.strategy, request)
        self.memory.keep(counts, answer.prediction, answer.plan, searched=True)
        return Remembered(answer.plan, answer.prediction, False, "", True)

    def _replan(
        self, current: Plan, request: Request, counts: KindCounts, *, thorough: bool
    ) -> Remembered:
        known = []
        if counts in self.memory.plans:
            alive = set(request.fleet.workers)
            holders = holders_of(current)
            held = {worker: part for worker, part in holders.items() if worker in alive}
            _, fastest = self.memory.plans[counts]
            known.append(align(self._place(fastest, request), request, held))

        decision = replan(
            current,
            request,
            migration=MigrationCost(fixed_s=self.move_s, horizon_s=self.horizon_s),
            thorough=thorough,
            known=known,
        )
        answer = decision.answer
        self.memory.keep(counts, answer.prediction, answer.plan, searched=thorough)
        return Remembered(
            answer.plan,
            answer.prediction,
            decision.kind == "stay",
            decision.reason,
            decision.searched,
        )

    def _counted_names(self, fleet: Fleet, current: Plan | None) -> dict[str, str]:
        """Return the counted name of each node by its own name.

        The present plan's nodes come first, in its order and also those that are gone, then the
        others.
        """
        own_names = []
        if current is not None:
            own_names += [node_of(worker) for worker in current.workers]
        own_names += sorted(node.name for node in fleet.nodes)

        names: dict[str, str] = {}
        used: Counter[PricedKind] = Counter()
        for own_name in dict.fromkeys(own_names):
            kind = self._kinds[own_name]
            counted_name = f"{_text_of(kind)}-{used[kind]:05d}"
            used[kind] += 1
            names[own_name] = counted_name
            self._kinds[counted_name] = kind
            self.memory.kinds[counted_name] = kind
        return names

    def _place(self, plan: Plan, request: Request) -> Plan:
        """Place a remembered plan on this fleet's nodes, the n-th of a type for the n-th."""
        of_kind: dict[PricedKind, list[str]] = {}
        for node in request.fleet.nodes:
            of_kind.setdefault(self.kind_of(node), []).append(node.name)

        names: dict[str, str] = {}
        used: Counter[PricedKind] = Counter()
        for name in sorted({node_of(worker) for worker in plan.workers}):
            kind = self.memory.kinds[name]
            names[name] = of_kind[kind][used[kind]]
            used[kind] += 1
        return rename_nodes(plan, names)

    def _note_speeds(self, request: Request) -> None:
        """Record each node's blocks a second, its GPUs alone, one sequence at a time."""
        for node in request.fleet.nodes:
            kind = self.kind_of(node)
            if kind not in self.memory.speed:
                costs = request.cost.layers.costs(node.node_type, 1, 1)
                seconds = float((costs.forward_s + costs.backward_s).sum())
                # The floor avoids a division by zero where a profile says that layers take no time.
                self.memory.speed[kind] = node.node_type.num_gpus / max(seconds, 1e-30)


def _text_of(kind: PricedKind) -> str:
    """Return a text that differs for kinds that are not equal."""
    name, slowdown, usd_per_hour = kind
    if usd_per_hour is None:
        return f"{name}@{slowdown:g}"
    return f"{name}@{slowdown:g}@{usd_per_hour!r}"
