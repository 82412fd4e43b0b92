"""Simulation of a spot trace through the real controller, on a fake clock.

It shows what a job would have done, lost and cost. SIMULATED time, real decisions.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from autohet.control.job_memory import JobMemory
from autohet.control.job_state import Training
from autohet.control.planning.buyer import LOOK_S, Buyer
from autohet.control.planning.buying import Market, best_counts, completed
from autohet.control.planning.fleet_choice import Terms
from autohet.control.planning.goal import Goal, GoalTerms
from autohet.control.planning.orders import OrderBuilder
from autohet.control.planning.outlook import MOST_S
from autohet.control.planning.price_follower import decides_by_price
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop.controller import Controller
from autohet.runtime.facts.planning import PlanningInputs, planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.step.precision import without_incapable_nodes
from autohet.simulate.baselines import (
    Choose,
    RestartingTrainer,
    RestartPolicy,
    departures,
    paid_usd,
)
from autohet.simulate.costs import Costs
from autohet.simulate.dollars.hindsight import best_usd_per_step, longest_beyond_s
from autohet.simulate.dollars.price_file import RecordedPrices
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.dollars.spending import usd_document, zone_bill
from autohet.simulate.fleet.autoscaler import CALM_LOOK_S
from autohet.simulate.fleet.coarse_layout import CoarseLayouts
from autohet.simulate.fleet.generation import SimulatedJob
from autohet.simulate.fleet.workforce import SimulatedWorkforce
from autohet.simulate.regions import RegionWalk, only, regions_of, stay_seconds
from autohet.simulate.remembered_planning import RememberedPlanning, SearchCache
from autohet.simulate.setups import MixedSetups, SymmetricSetups, grid
from autohet.simulate.spot_trace import TraceEvent
from autohet.simulate.trained_span import TrainedSpan
from planner.errors import ConfigError
from planner.inputs.catalogue import instance_types
from planner.inputs.cluster import Cluster
from planner.inputs.documents import Document, Json
from planner.inputs.fleet import NodeType
from planner.plans.plan import Plan

ENDLESS = 10**9
POLICIES = ("local_first", "s3_only", "sky", "one_region")
"""`sky` and `one_region` need a trace of several regions."""
BASELINES = ("checkpoint_restart", "homogeneous_elastic", "homogeneous_fixed", "on_demand")
REGION_FIELDS = ("region", "tokens", "usd_in_all", "useful_share")
"""Fields of each region alone in the document of `one_region`."""
MOST_FIXED = 8
"""Number of sizes of a fixed subset that are tried for each type; the best is reported."""
WHAT = {
    "s3_only": (
        "all GPUs under AutoHet's plans, a checkpoint at checkpoint.every (auto: the best interval)"
        " and none on a notice, restarts from storage"
    ),
    "checkpoint_restart": (
        "all GPUs under AutoHet's plans, a checkpoint on notice and at the best interval, restarts"
        " from storage"
    ),
    "homogeneous_elastic": (
        "one GPU type, symmetric plans, resized with the fleet; checkpoints and restarts as"
        " checkpoint_restart"
    ),
    "homogeneous_fixed": (
        "a fixed number of nodes of one type, the best type and number in hindsight; waits while"
        " there are fewer"
    ),
    "on_demand": (
        "as many on-demand nodes of one type as the trace's spot bill buys, the best type in"
        " hindsight; never interrupted"
    ),
}


@dataclass(frozen=True)
class Scenario:
    """Inputs of a simulation: a job on a cluster along a trace, until `end_s`."""

    job: Job
    cluster: Cluster
    trace: Sequence[TraceEvent]
    end_s: float
    costs: Costs = field(default_factory=Costs)
    prices: RecordedPrices = field(default_factory=RecordedPrices)

    @property
    def kinds(self) -> dict[str, NodeType]:
        return {kind.name: kind for kind in self.cluster.node_types}

    def able(self) -> Scenario:
        """Return the scenario without nodes whose GPUs cannot compute the job's precision.

        A real job leaves them out too, and does not buy them.

        Raises:
            ConfigError: no other type is left, or the job asks for nodes of one of them.
        """
        cluster = without_incapable_nodes(self.cluster, self.job)
        kinds = {kind.name for kind in cluster.node_types}
        trace = [event for event in self.trace if event.node_type in kinds]
        return replace(self, cluster=cluster, trace=trace)


@dataclass(frozen=True)
class _BaselineOptions:
    """Options of a baseline.

    cap: nodes that are paid for at the most. trace: spot trace; None: the scenario's. facts: fields
    added to its document.
    """

    on_notice: bool = True
    every_steps: int | None = None
    cap: float = float("inf")
    trace: Sequence[TraceEvent] | None = None
    facts: Json = field(default_factory=dict)


@dataclass(frozen=True)
class _PolicyRun:
    """Result of a simulated policy, for its document."""

    policy: str
    seconds: float
    spans: Sequence[TrainedSpan]
    changes: list[Document]
    usd: float
    steps_lost: int
    decisions: list[str] = field(default_factory=list)
    ended: str | None = None


@dataclass
class TraceSimulation:
    """Policies of one scenario, with the nodes that can compute its job.

    The policies share the results of their searches.
    """

    scenario: Scenario
    memory: SearchCache = field(default_factory=SearchCache)
    goal: GoalTerms | None = None
    """Goal of a job that ends with its last step; None: it trains until the trace ends."""

    def __post_init__(self) -> None:
        self.scenario = self.scenario.able()
        self.job = _endless(self.scenario.job, self.goal)
        self.inputs: PlanningInputs = planning_inputs(self.job, zones=self.scenario.cluster.zones)
        self.prices = PriceHistory(self.scenario.kinds, self.scenario.prices.rows)

    def along(self, trace: Sequence[TraceEvent], prices: RecordedPrices) -> TraceSimulation:
        """Return the simulation of the same job along another history; searches are shared."""
        other = copy.copy(self)
        other.scenario = replace(self.scenario, trace=trace, prices=prices)
        other.prices = PriceHistory(self.scenario.kinds, prices.rows)
        return other

    def run(self, policy: str, progress: Callable[[float], None] | None = None) -> Document:
        """Return the document of one policy or baseline (`autohet simulate --json`).

        `progress` is called with the share of the trace that is done.

        Raises:
            ConfigError: the job cannot be planned at all on the cluster.
        """
        if policy == "local_first":
            return self._local_first(self.scenario.trace, progress)
        if policy == "sky":
            return self._sky(progress)
        if policy == "one_region":
            return self._one_region()
        return self._baseline(policy)

    # AutoHet
    # ------------------------------------------------------------------------------

    def _sky(self, progress: Callable[[float], None] | None) -> Document:
        """Simulate `autohet sky`: one region at a time, with copies between them."""
        scenario = self.scenario
        elastic = self.job.elastic
        walk = RegionWalk(
            scenario.trace,
            scenario.kinds,
            scenario.cluster.zones,
            gpus_needed=elastic.min_workers,
            patience_s=elastic.region_patience_s,
            checkpoint_bytes=CoarseLayouts(
                load_config(self.job.model, self.job.training)
            ).num_bytes,
            end_s=scenario.end_s,
        )
        stays, moves = walk.stays()
        found = self._local_first(walk.events(stays), progress)
        found["policy"] = "sky"

        copies_usd = sum(move.usd for move in moves)
        found["usd_by_use"] = {**found["usd_by_use"], "between_regions": copies_usd}
        found["usd_in_all"] += copies_usd
        found["moves"] = [asdict(move) for move in moves]
        found["seconds_by_region"] = stay_seconds(stays)
        return found

    def _one_region(self) -> Document:
        """Simulate each region alone; return the one with most tokens, chosen in hindsight."""
        region_by_type = regions_of(self.scenario.kinds)
        found = []
        regions = []
        for region in dict.fromkeys(region_by_type.values()):
            mine = only(self.scenario.trace, region_by_type, region)
            alone = self._local_first(mine, None)
            alone["policy"] = "one_region"
            alone["region"] = region
            found.append(alone)
            regions.append({name: alone[name] for name in REGION_FIELDS})
        return _most_tokens(found) | {"regions": regions}

    def _local_first(
        self, trace: Sequence[TraceEvent], progress: Callable[[float], None] | None
    ) -> Document:
        self.require_plan()
        controller, workforce, planning = self.replay(trace, progress)
        document = self._autohet_document(controller, workforce)
        if decides_by_price(self.job):
            document |= self._price_document(planning, trace, document)
        return document

    def require_plan(self) -> None:
        """Raise ConfigError if the whole cluster cannot train the job, at the lowest prices.

        A limit of dollars an hour may be met only for some time.
        """
        kinds = self.prices.cheapest(self.scenario.kinds, self.scenario.end_s)
        whole = replace(self.scenario.cluster, node_types=tuple(kinds.values()))
        RememberedPlanning(self.inputs, self.memory, self.scenario.costs).answer(
            whole.fleet(), None
        )

    def replay(
        self, trace: Sequence[TraceEvent], progress: Callable[[float], None] | None = None
    ) -> tuple[Controller, SimulatedWorkforce, RememberedPlanning]:
        """Let the controller follow a trace to its end or the job's; its machines are billed."""
        scenario = self.scenario
        job = self.job
        # Planning and workforce need each other: planning gets the workforce once it exists.
        holder: list[SimulatedWorkforce] = []
        planning = RememberedPlanning(
            self.inputs,
            self.memory,
            scenario.costs,
            now=lambda: holder[0].now,
            busy=lambda seconds: holder[0].busy(seconds),
            wake=lambda moment: holder[0].wake_at(moment),
        )
        simulated_job = SimulatedJob(
            every_steps=job.checkpoint.fixed_steps,
            settle_s=job.elastic.arrivals_debounce_s + 0.05,
            replication_share=job.checkpoint.replicate_bandwidth_share,
            end_s=scenario.end_s,
            last_step=job.training.steps or math.inf,
            on_cpu=job.computes_on_cpu,
        )
        pace = _pace(planning)
        workforce = SimulatedWorkforce(
            scenario.kinds, trace, pace, scenario.costs, self.prices, simulated_job
        )
        holder.append(workforce)

        config = load_config(job.model, job.training)
        layouts = CoarseLayouts(config)
        orders = OrderBuilder(job, layouts, zones=scenario.cluster.zones)
        controller = Controller(job, workforce, planning, orders, EventLog(None))
        memory = controller.memory
        memory.prepares = True
        memory.cuts_over = job.computes_on_cpu
        workforce.workers.checkpoint_pace = memory.checkpoint_pace
        if self.goal is not None:
            controller.memory.goal = Goal(self.goal)
        if decides_by_price(job) and job.elastic.request_nodes is None:
            market = self.market(trace)
            workforce.machines.request(market.counts)
            controller.memory.buyer = Buyer(job, planning, market)
        self._run_controller(controller, workforce, progress)
        workforce.machines.bill.settle(workforce.now)
        return controller, workforce, planning

    def _price_document(
        self,
        planning: RememberedPlanning,
        trace: Sequence[TraceEvent],
        document: Json,
    ) -> Document:
        """Return how a run kept the job's bound, and its dollars beside the best in hindsight."""
        end_s = self.scenario.end_s
        bound = self.job.parallelism.max_usd_per_hour
        beyond_s = None
        if bound is not None:
            beyond_s = longest_beyond_s(document["machines"], self.prices, bound, end_s)
        market = self.market(trace)
        speeds = planning.fleet_speeds(market.cluster, [market.counts])
        terms = Terms.of(self.job, market)
        best = best_usd_per_step(terms, speeds, trace, self.prices, end_s)
        ratio = None
        if best and document["steps"]:
            ratio = document["usd"] / document["steps"] / best
        return {"longest_beyond_bound_s": beyond_s, "usd_per_token_over_hindsight": ratio}

    def market(self, trace: Sequence[TraceEvent]) -> Market:
        """Return the market of the trace's node types at the first prices, and the first request.

        Nothing is requested while no fleet is within the job's bound on its price.
        """
        kinds = self.prices.at(self.scenario.kinds, 0.0)
        traded = {event.node_type for event in trace}
        if self.goal is not None:
            # A type that is not there for the whole time is still hoped for.
            traded |= kinds.keys()
        node_types = tuple(kind for kind in kinds.values() if kind.name in traded)
        cluster = replace(self.scenario.cluster, node_types=node_types)
        # It is asked before the clock runs.
        planning = RememberedPlanning(self.inputs, self.memory, self.scenario.costs)
        best = {}
        if not self.job.elastic.has_goal:
            try:
                best = best_counts(planning, cluster, {})
            except ConfigError:
                return Market(cluster, {}, {})
        counts = completed(best, cluster, {}, self.job.elastic.min_workers)
        return Market(cluster, {}, counts)

    def _run_controller(
        self,
        controller: Controller,
        workforce: SimulatedWorkforce,
        progress: Callable[[float], None] | None,
    ) -> None:
        """Let the controller tick until the trace or the job ends."""
        end_s = self.scenario.end_s
        reported_at = 0.0
        while workforce.now < end_s and controller.ended is None:
            controller.tick()
            state = controller.state
            if isinstance(state, Training) and state.leaving is not None:
                workforce.wake_at(state.leaving.until)
            if isinstance(state, Training) and state.look_at is not None:
                workforce.wake_at(state.look_at)
            if isinstance(state, Training) and state.preparing is not None:
                workforce.wake_at(state.preparing.deadline)
            self._wake_for_goal(controller.memory, workforce)
            if progress is not None and workforce.now - reported_at > end_s / 200:
                reported_at = workforce.now
                progress(min(1.0, reported_at / end_s))

    def _wake_for_goal(self, memory: JobMemory, workforce: SimulatedWorkforce) -> None:
        """Make the controller look when a deadline or a budget wants it.

        A driver looks all the time, a simulated one when something happens.
        """
        if memory.goal is None or memory.buyer is None:
            return
        workforce.wake_at(max(memory.buyer.look_at, workforce.now + LOOK_S))
        lasts_s = memory.goal.lasts_s(memory.closing_s)
        if 0.0 < lasts_s < CALM_LOOK_S:
            workforce.wake_at(workforce.now + lasts_s)

    def _autohet_document(self, controller: Controller, workforce: SimulatedWorkforce) -> Document:
        ledger = controller.memory.ledger
        changes = [each.to_document() for each in ledger.changes if each.cause != "start"]
        records = controller.events.records
        decisions = [each["reason"] for each in records if each["kind"] == "decision"]
        bill = workforce.machines.bill
        spans = workforce.workers.spans
        run = _PolicyRun(
            "local_first",
            workforce.now,
            spans,
            changes,
            bill.usd,
            steps_lost=sum(change["steps_lost"] for change in changes),
            decisions=decisions,
            ended=None if controller.ended is None else controller.ended.reason,
        )
        document = self._document(run)
        zones = zone_bill(records, spans)
        requests = workforce.workers.s3_requests
        document |= usd_document(bill.usd, zones, requests, self.scenario.costs)
        document["machines"] = bill.lives
        document["gpu_hours_after_ten_minutes"] = round(bill.paid_gpu_s / 3600, 3)
        document["idle_gpu_hours_after_ten_minutes"] = round(bill.idle_gpu_s / 3600, 3)
        return document

    # baselines
    # ------------------------------------------------------------------------------

    def _baseline(self, name: str) -> Document:
        planning = RememberedPlanning(self.inputs, self.memory, self.scenario.costs)
        with_gpus = [kind for kind in self.scenario.cluster.node_types if kind.num_gpus]
        if name in ("s3_only", "checkpoint_restart"):
            options = _BaselineOptions()
            if name == "s3_only":
                every_steps = self.job.checkpoint.fixed_steps
                options = _BaselineOptions(on_notice=False, every_steps=every_steps)
            choose = MixedSetups(planning, self.scenario.costs).setup
            names = [kind.name for kind in with_gpus]
            return self._train(name, choose, names, options)

        found: list[Document] = []
        for kind in with_gpus:
            if name == "homogeneous_elastic":
                choose = SymmetricSetups(planning, self.scenario.costs, kind).setup
                options = _BaselineOptions(facts={"type": kind.name})
                found.append(self._train(name, choose, [kind.name], options))
            elif name == "homogeneous_fixed":
                for number in _sizes(self.scenario.trace, kind.name):
                    found.append(self._run_fixed(planning, kind, number))
            else:
                result = self._on_demand(planning, kind)
                if result is not None:
                    found.append(result)
        if not found:
            return {
                "policy": name,
                "simulated": True,
                "ended": "no on-demand price of these GPU types is known",
                "steps": 0,
                "tokens": 0,
            }
        return _most_tokens(found)

    def _run_fixed(self, planning: RememberedPlanning, kind: NodeType, number: int) -> Document:
        choose = SymmetricSetups(planning, self.scenario.costs, kind, number).setup
        facts = {"type": kind.name, "nodes": number}
        options = _BaselineOptions(cap=float(number), facts=facts)
        return self._train("homogeneous_fixed", choose, [kind.name], options)

    def _on_demand(self, planning: RememberedPlanning, kind: NodeType) -> Document | None:
        """Simulate on-demand nodes of one type, as many as the trace's spot bill buys.

        The number is at least one, and rises to the first that has a symmetric plan. Returns None
        without a price or a plan.
        """
        usd_per_hour = on_demand_usd_per_hour(kind)
        if usd_per_hour is None:
            return None
        end_s = self.scenario.end_s
        caps = dict.fromkeys(self.scenario.kinds, float("inf"))
        budget_usd = paid_usd(self.scenario.trace, caps, self.prices, end_s)
        number = max(1, int(budget_usd / usd_per_hour / (end_s / 3600)))
        while grid(planning, kind, number) is None and number < 1024:
            number += 1

        trace = [
            TraceEvent(0.0, "arrival", f"{kind.name}-{index}", kind.name) for index in range(number)
        ]
        facts = {"type": kind.name, "nodes": number, "usd_per_hour": usd_per_hour}
        options = _BaselineOptions(trace=trace, facts=facts)
        choose = SymmetricSetups(planning, self.scenario.costs, kind, number).setup
        found = self._train("on_demand", choose, [kind.name], options)

        # The document has the spot prices of these nodes: replace them.
        usd = number * usd_per_hour * end_s / 3600
        found["usd"] = usd
        found["usd_per_million_tokens"] = _usd_per_million(usd, found["tokens"])
        return found

    def _train(
        self,
        name: str,
        choose: Choose,
        types: Sequence[str],
        options: _BaselineOptions | None = None,
    ) -> Document:
        options = options or _BaselineOptions()
        scenario = self.scenario
        trace = scenario.trace if options.trace is None else options.trace
        mine = [event for event in trace if event.node_type in types]
        horizon_s = self.job.parallelism.horizon_s or MOST_S
        policy = RestartPolicy(options.on_notice, options.every_steps, horizon_s)
        between_s = scenario.end_s / max(1, departures(mine, types, scenario.end_s))
        trainer = RestartingTrainer(
            choose, policy, scenario.costs, scenario.kinds, between_s, self.prices
        )
        trainer.run(mine, scenario.end_s)

        caps = dict.fromkeys(types, options.cap)
        usd = paid_usd(mine, caps, self.prices, scenario.end_s)
        spans = trainer.spans
        run = _PolicyRun(name, scenario.end_s, spans, trainer.changes, usd, trainer.steps_lost)
        document = self._document(run)
        document["what"] = WHAT[name]
        document["waited_s"] = round(trainer.waited_s, 1)
        return document | dict(options.facts)

    # documents
    # ------------------------------------------------------------------------------

    def _document(self, run: _PolicyRun) -> Document:
        training = self.job.training
        steps = sum(span.num_steps for span in run.spans)
        useful_s = sum(span.seconds for span in run.spans)
        tokens = steps * training.global_batch_sequences * training.sequence_length
        tiers: Counter[str] = Counter(memory=0, disk=0, peer=0, s3=0)
        parts: Counter[str] = Counter()
        for change in run.changes:
            tiers.update(change["bytes_by_tier"])
            parts.update(change["seconds"])
        return {
            "policy": run.policy,
            "simulated": True,
            "ended": run.ended,
            "seconds": run.seconds,
            "steps": steps,
            "tokens": tokens,
            "tokens_per_s": tokens / run.seconds if run.seconds else 0.0,
            "useful_share": useful_s / run.seconds if run.seconds else 0.0,
            "tokens_per_useful_s": tokens / useful_s if useful_s else 0.0,
            "steps_lost": run.steps_lost,
            "changes_by_cause": dict(Counter(change["cause"] for change in run.changes)),
            "seconds_by_part": {name: round(value, 3) for name, value in parts.items()},
            "bytes_by_tier": dict(tiers),
            "usd": run.usd,
            "usd_per_million_tokens": _usd_per_million(run.usd, tokens),
            "stated": asdict(self.scenario.costs),
            "reconfigurations": run.changes,
            "stretches": [asdict(span) for span in run.spans if span.num_steps],
            "decisions": run.decisions,
        }


def _most_tokens(results: Sequence[Document]) -> Document:
    """Return the result with most tokens, the first one of equals."""
    return max(results, key=lambda result: float(result["tokens"]))


def _usd_per_million(usd: float, tokens: int) -> float | None:
    if not tokens:
        return None
    return usd / tokens * 1e6


def _endless(job: Job, goal: GoalTerms | None) -> Job:
    """Return the job without a limit of waiting, a rehearsal, and, without a goal, an end."""
    elastic = replace(job.elastic, script=(), wait_for_fleet_s=float(ENDLESS))
    if goal is not None:
        return replace(job, elastic=elastic)
    elastic = replace(elastic, deadline=None, budget_usd=None)
    return replace(job, training=replace(job.training, steps=ENDLESS), elastic=elastic)


def _pace(planning: RememberedPlanning) -> Callable[[Plan], tuple[float, float]]:
    def pace(plan: Plan) -> tuple[float, float]:
        prediction = planning.predictions[plan]
        return prediction.step_time_s, prediction.breakdown_s.get("grad_sync", 0.0)

    return pace


def _sizes(trace: Sequence[TraceEvent], node_type: str) -> list[int]:
    """Return numbers of nodes for a fixed subset, spread over those of the trace at one time."""
    alive = 0
    seen = set()
    for event in trace:
        if event.node_type == node_type and event.kind != "notice":
            alive += 1 if event.kind == "arrival" else -1
            seen.add(alive)
    sizes = sorted(seen - {0})
    if len(sizes) <= MOST_FIXED:
        return sizes

    spread = set()
    for index in range(MOST_FIXED):
        position = round(index * (len(sizes) - 1) / (MOST_FIXED - 1))
        spread.add(sizes[position])
    return sorted(spread)


def on_demand_usd_per_hour(kind: NodeType) -> float | None:
    """Return the catalogue's cheapest price of the GPU type, for as many GPUs as the node has.

    None if the catalogue has no price.
    """
    prices = []
    for instance in instance_types().values():
        if instance.gpu_type == kind.gpu_type and instance.usd_per_hour:
            prices.append(instance.usd_per_hour / instance.num_gpus)
    if not prices:
        return None
    return min(prices) * kind.num_gpus


def horizon(trace: Sequence[TraceEvent], hours: float | None) -> float:
    """Return the second at which the simulation ends.

    It is `hours`, or, if that is None, one hour after the trace's last event.

    Raises:
        ConfigError: the trace is empty, or the hours are not positive.
    """
    if not trace:
        raise ConfigError("the trace has no event")
    if hours is None:
        return trace[-1].time_s + 3600.0
    if not 0 < hours < float("inf"):
        raise ConfigError(f"--hours is {hours:g}; it must be a number above 0")
    return hours * 3600.0
