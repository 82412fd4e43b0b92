"""A spot trace through the real controller, on a fake clock: what a job would have done, lost and cost. SIMULATED time, real decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autohet.driver.control.controller import Controller
from autohet.driver.control.events import EventLog
from autohet.driver.control.observation import NodeView, Observation
from autohet.driver.control.orders import OrderBook
from autohet.driver.control.planning import Planning
from autohet.driver.simulate.spot_trace import TraceEvent
from autohet.driver.simulate.workforce import Costs, SimulatedWorkforce
from autohet.runtime.job import Job
from autohet.runtime.models import load_config
from autohet.runtime.planning import planning_inputs
from planner.cluster import Cluster, Fleet, node_of
from planner.errors import ConfigError
from planner.plan import Plan
from recovery.state.holdings import Holding

ENDLESS = 10**9
POLICIES = ("local_first", "s3_only")
DAY_S = 86400.0


class StorageOnlyOrders(OrderBook):
    """The baseline: nobody's memory or disk counts, all state comes from the newest checkpoint (each shard read once and handed on, which
    real trainers of this kind do not do); before the first checkpoint, all starts anew."""

    def live_holdings(self, seen: Observation, workers: Any) -> list[Holding]:
        return []

    def write(self, *arguments: Any) -> Any:
        seen: Observation = arguments[2]
        self._begun = self._begun and seen.checkpoint.manifest is not None
        return super().write(*arguments)

    def _kept(self, seen: Observation) -> list[Holding]:
        return [holding for holding in super()._kept(replace(seen, inventories=None))]


@dataclass(frozen=True)
class Scenario:
    """What is simulated: a job on a cluster along a trace, until `end_s`."""

    job: Job
    cluster: Cluster
    trace: Sequence[TraceEvent]
    end_s: float


def simulate(scenario: Scenario, policy: str, progress: Callable[[float], None] | None = None) -> dict[str, Any]:
    """The document of one policy (`autohet simulate --json`); `progress` is told the share of the trace that is done.

    Raises:
        ConfigError: the job cannot be planned at all on the cluster.
    """
    job = _endless(scenario.job)
    inputs = planning_inputs(job)
    holder: list[SimulatedWorkforce] = []
    planning = Planning(inputs, clock=lambda: holder[0].now)
    workforce = SimulatedWorkforce(
        {kind.name: kind for kind in scenario.cluster.node_types}, scenario.trace, _step_times(planning),
        Costs(restarts=policy == "s3_only"), every_steps=job.checkpoint.every_steps,
        settle_s=job.elastic.arrivals_debounce_s + 2.0,
        tokens_by_step=job.training.global_batch_sequences * job.training.sequence_length,
    )  # fmt: skip
    holder.append(workforce)
    planning.propose(scenario.cluster.fleet(), None)  # a job that the whole cluster cannot train is the user's to mend
    book = (StorageOnlyOrders if policy == "s3_only" else OrderBook)(job, load_config(job.model))
    controller = Controller(job, workforce, planning, book, EventLog(None))
    told = 0.0
    while workforce.now < scenario.end_s and controller.ended is None:
        controller.tick()
        if progress is not None and workforce.now - told > scenario.end_s / 200:
            told = workforce.now
            progress(min(1.0, told / scenario.end_s))
    return _document(policy, controller, workforce, scenario)


def _endless(job: Job) -> Job:
    """The job as it is, but that it neither ends nor gives up waiting, and takes no part in a rehearsal."""
    elastic = replace(job.elastic, script=(), wait_for_fleet_s=float(ENDLESS))
    return replace(job, training=replace(job.training, steps=ENDLESS), elastic=elastic)


def _step_times(planning: Planning) -> Callable[[Plan, Mapping[str, NodeView]], float]:
    def step_s(plan: Plan, nodes: Mapping[str, NodeView]) -> float:
        used = sorted({node_of(worker) for worker in plan.workers})
        fleet = Fleet(0, tuple(nodes[name].node for name in used))
        return planning.make_cost(fleet).predict(plan).step_time_s

    return step_s


def _document(policy: str, controller: Controller, workforce: SimulatedWorkforce, scenario: Scenario) -> dict[str, Any]:
    ledger = controller.ledger
    changes = [change.to_document() for change in ledger.changes if change.cause != "start"]
    useful_s = sum(record.seconds for record in ledger.records.values())
    tokens = sum(record.tokens for record in ledger.records.values())
    tiers: Counter[str] = Counter(memory=0, disk=0, peer=0, s3=0)
    parts: Counter[str] = Counter()
    for change in changes:
        tiers.update(change["bytes_by_tier"])
        parts.update(change["seconds"])
    return {
        "policy": policy,
        "simulated": True,
        "ended": None if controller.ended is None else controller.ended.reason,
        "seconds": workforce.now,
        "steps": ledger.committed_steps,
        "tokens": tokens,
        "tokens_per_s": tokens / workforce.now if workforce.now else 0.0,
        "useful_share": useful_s / workforce.now if workforce.now else 0.0,
        "steps_lost": sum(change["steps_lost"] for change in changes),
        "changes_by_cause": dict(Counter(change["cause"] for change in changes)),
        "seconds_by_part": {name: round(value, 3) for name, value in parts.items()},
        "bytes_by_tier": dict(tiers),
        "usd": workforce.usd,
        "usd_per_million_tokens": workforce.usd / tokens * 1e6 if tokens else None,
        "stated": asdict(workforce.costs),
        "reconfigurations": changes,
        "decisions": [event["reason"] for event in controller.events.records if event["kind"] == "decision"],
    }


def horizon(trace: Sequence[TraceEvent], hours: float | None) -> float:
    """When the simulation ends: after `hours`, else an hour after the trace's last event, at least.

    Raises:
        ConfigError: the trace is empty, or the hours are not positive.
    """
    if not trace:
        raise ConfigError("the trace has no event")
    if hours is not None and not hours > 0:
        raise ConfigError(f"--hours is {hours:g}; it must be above 0")
    return hours * 3600.0 if hours is not None else trace[-1].time_s + 3600.0
