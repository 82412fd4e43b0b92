"""SIMULATED workforce: a spot trace instead of machines, and a clock that jumps to the next event.

Controller, planner, order book, layouts, holdings and transfer schedules are real. Time is
simulated: a step takes its predicted time and its loss to uploads and copies, a restore the time of
its schedule, and everything else the stated `Costs`. Steps between two events are made at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autohet.driver.control.observation import CheckpointState, Loss, NodeView, Notice, Observation
from autohet.driver.control.policy import QUIET_S
from autohet.driver.simulate.bill import Bill
from autohet.driver.simulate.costs import Costs, PushedCopies
from autohet.driver.simulate.manifest import SimulatedManifest
from autohet.driver.simulate.no_agents import NoAgents
from autohet.driver.simulate.order_bytes import push_s, upload_s
from autohet.driver.simulate.prices import Prices
from autohet.driver.simulate.spending import S3Requests
from autohet.driver.simulate.spot_trace import TraceEvent
from autohet.driver.simulate.stretch import Stretch
from autohet.runtime.messages import (
    AgentEndpoint,
    GenerationOrder,
    Phase,
    RestoreRecord,
    StepRecord,
    WorkerReport,
)
from planner.cluster import Node, NodeType, node_of
from planner.plan import Plan
from recovery.state.ancestry import Descent
from recovery.state.holdings import Holding, Source

MOVING = (Phase.BUILDING, Phase.TRAINING)
CALM_TICK_S = 60.0
MOST_UPLOADS = 2
"""Maximum checkpoints that are in flight or newly done between two looks of the controller.

Older ones are of no interest.
"""
NOTICES_GATHER_S = QUIET_S + 1e-3
"""Seconds just longer than the controller waits for further notices."""
Pace = Callable[[Plan], tuple[float, float]]
"""Function from a plan to its predicted seconds: (step, exposed gradient sync of it)."""


@dataclass
class _Run:
    """Current generation; all its workers do the same, so one clock serves them."""

    orders: Mapping[str, GenerationOrder]
    order: GenerationOrder
    ready_at: float
    step_s: float
    upload_s: float
    push_s: float
    stretch: Stretch
    phase: Phase = Phase.BUILDING
    step: int = 0
    step_ends_at: float = math.inf
    stop: bool = False
    upload: bool = False
    members: frozenset[str] = frozenset()
    first_member: str = ""
    records: list[StepRecord] = field(default_factory=list)
    uploads: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class SimulatedJob:
    """Settings of the simulated job.

    every_steps: steps between two checkpoints. settle_s: seconds for which the controller gathers
    arrivals. replication_share: part of a node's network for copies to other nodes. end_s: nothing
    happens after it.
    """

    every_steps: int
    settle_s: float
    replication_share: float = 0.25
    tokens_by_step: int = 0
    end_s: float = math.inf


class SimulatedWorkforce(NoAgents):
    """Implements `Workforce` for a simulation."""

    def __init__(
        self,
        kinds: Mapping[str, NodeType],
        trace: Sequence[TraceEvent],
        pace: Pace,
        costs: Costs,
        prices: Prices,
        job: SimulatedJob,
    ) -> None:
        self.now = 0.0
        self.costs = costs
        self.bill = Bill(prices)
        self.s3_requests = S3Requests()
        self.stop_reason: str | None = None
        self.stretches: list[Stretch] = []
        self._kinds = prices.at(kinds, 0.0)
        self._trace = deque(trace)
        self._pace = pace
        self._prices = prices
        self._prices_change_at = prices.next_change_s(0.0)
        self._job = job
        self._looks_s = (1e-3, NOTICES_GATHER_S, job.settle_s, job.settle_s + 2.0)
        self._wake_at: list[float] = []
        self._booting: dict[str, float] = {}
        self._nodes: dict[str, NodeView] = {}
        self._notices: dict[str, Notice] = {}
        self._starts: dict[str, float] = {}
        self._live: dict[str, tuple[int | None, int]] = {}
        self._losses: dict[str, Loss] = {}
        self._dead: dict[str, float] = {}
        self._run: _Run | None = None
        self._copies: list[Holding] = []
        self._inventories: dict[str, Any] | None = None
        self._checkpoint = CheckpointState()
        self._restored: tuple[str, RestoreRecord] | None = None
        self._stirred_at = 0.0

    # time
    # ------------------------------------------------------------------------------

    def wait(self) -> None:
        """Let time pass until something happens that the controller may have to answer."""
        self._pass_to(min(self._next_moment(), self._job.end_s))

    def observe(self) -> Observation:
        reports = {worker: self._report(worker) for worker in self._live if self._answers(worker)}
        run = self._run
        if run is not None:
            run.records, run.uploads = [], [u for u in run.uploads if u[0] > self.now]
        return Observation(
            self.now,
            dict(self._nodes),
            {n: x for n, x in self._notices.items() if n in self._nodes},
            reports,
            dict(self._losses),
            self._inventories,
            self._checkpoint,
            self.stop_reason,
            store=("simulated", 1),
        )

    def wake_at(self, moment: float) -> None:
        """Make the controller look at `moment`."""
        self._wake_at.append(moment)

    def busy(self, seconds: float) -> None:
        """Pass the seconds for which the driver is busy, while all else continues."""
        end = min(self.now + seconds, self._job.end_s)
        while self.now < end:
            self._pass_to(min([end, *(moment for moment in self._due() if moment > self.now)]))

    def _due(self) -> list[float]:
        """Return the times of the events that are due without an action of the controller."""
        run = self._run
        moments = [self._trace[0].time_s] if self._trace else []
        moments += self._booting.values()
        moments += [at for at in self._starts.values() if at > self.now]
        moments += [died + self.costs.detect_s for died in self._dead.values()]
        if run is not None and run.phase is Phase.BUILDING:
            moments.append(run.ready_at)
        return moments

    def _next_moment(self) -> float:
        """Return the time at which the controller looks next.

        That is at the next event, and after it for as long as the controller itself waits for more
        of the kind.
        """
        run = self._run
        moments = self._due() + [at for at in self._wake_at if at > self.now]
        self._wake_at = [at for at in self._wake_at if at > self.now]
        if run is not None:
            # the step after which all stand, and the first of a change, which ends it
            awaited = run.stop or run.step == run.order.start_step
            moments += [run.step_ends_at] if run.phase is Phase.TRAINING and awaited else []
            moments += [at for at, _ in run.uploads if at > self.now]
        looks = [at for look in self._looks_s if (at := self._stirred_at + look) > self.now]
        training = run is not None and run.phase is Phase.TRAINING and not run.stop
        looks += [] if training and (moments or looks) else [self.now + CALM_TICK_S]
        return max(self.now + 1e-3, min([*moments, *looks]))

    def _pass_to(self, moment: float) -> None:
        """Advance the clock to `moment`: make the steps that end until then, and the events due."""
        self._make_steps(moment)
        run = self._run
        self.bill.count_gpus(self.now, moment, 0 if run is None else len(run.members))
        self.now = moment
        if moment >= self._prices_change_at:
            self._reprice()
        if run is not None and run.phase is Phase.BUILDING and run.ready_at <= moment:
            self._ready(run)
        while self._trace and self._trace[0].time_s <= moment:
            self._happen(self._trace.popleft())
        for name in [name for name, at in self._booting.items() if at <= moment]:
            self._join(name, self._booting.pop(name))
        for name in [
            name for name, died in self._dead.items() if died + self.costs.detect_s <= moment
        ]:
            self._forget(name, self._dead.pop(name))

    def _reprice(self) -> None:
        """Set the current prices of node types, also of living nodes.

        A live driver reads prices every five minutes.
        """
        self._kinds = self._prices.at(self._kinds, self.now)
        for name, view in self._nodes.items():
            kind = self._kinds[view.node.node_type.name]
            self._nodes[name] = replace(view, node=replace(view.node, node_type=kind))
        self._prices_change_at = self._prices.next_change_s(self.now)

    def _make_steps(self, moment: float) -> None:
        """Make the steps that end until `moment`, all at once.

        Only the records of the first and the last of these steps are kept.
        """
        run = self._run
        if run is None or run.phase is not Phase.TRAINING or run.step_ends_at > moment:
            return
        number = 1 if run.stop else 1 + int((moment - run.step_ends_at) / run.step_s)
        first, ended_at = run.step, run.step_ends_at
        run.step += number
        run.step_ends_at += number * run.step_s
        for step in sorted({first, run.step - 1}):
            at = ended_at + (step - first) * run.step_s
            run.records.append(
                StepRecord(
                    step, 0.0, 0.0, self._job.tokens_by_step, run.step_s, run.order.generation, at
                )
            )
        last = run.step // self._job.every_steps
        due = range(max(first // self._job.every_steps, last - MOST_UPLOADS) + 1, last + 1)
        run.uploads += [
            (
                ended_at + (n * self._job.every_steps - 1 - first) * run.step_s + run.upload_s,
                n * self._job.every_steps,
            )
            for n in due
        ]
        run.stretch.num_steps = run.step - run.order.start_step
        if run.stop:
            run.phase, self._stirred_at = Phase.STOPPED, ended_at
            run.uploads += (
                [(ended_at + run.upload_s, run.step)]
                if run.upload and run.step % self._job.every_steps
                else []
            )
        for worker in run.order.plan.workers:
            self._live[worker] = (run.order.generation, run.step)

    # what the trace does
    # ------------------------------------------------------------------------------

    def _happen(self, event: TraceEvent) -> None:
        self._stirred_at = self.now
        if event.kind == "arrival":
            self.bill.machines[event.node] = self._kinds[event.node_type], event.time_s
            self._booting[event.node] = event.time_s + self.costs.boot_s + self.costs.install_s
        elif event.kind == "notice":
            self._booting.pop(event.node, None)  # it goes before it was of use
            if event.node in self._nodes:
                self._notices[event.node] = Notice(event.node, "trace", self.now, event.gone_s)
        elif event.kind == "death":
            self._booting.pop(event.node, None)
            self.bill.pay(event.node, event.time_s)
            if event.node in self._nodes:
                self._die(event.node)

    def _join(self, name: str, at: float) -> None:
        self._stirred_at = self.now
        node = Node(name, self._kinds[self.bill.machines[name][0].name])
        self._nodes[name] = NodeView(node, at, AgentEndpoint(name, "simulated", 1, ""))

    def _die(self, name: str) -> None:
        """Remove a machine: workers that train with it halt at once, and Ray notices later."""
        self._dead[name] = self.now
        run = self._run
        if run is not None and run.phase in MOVING and any(node_of(w) == name for w in run.orders):
            run.phase = Phase.HALTED

    def _forget(self, name: str, died: float) -> None:
        self._stirred_at = self.now
        self._nodes.pop(name, None)
        self._notices.pop(name, None)
        for worker in [worker for worker in self._live if node_of(worker) == name]:
            del self._live[worker]
            self._starts.pop(worker, None)
            self._losses[worker] = Loss(worker, "its node died", self.now, died)
        self._copies = [copy for copy in self._copies if copy.source.node != name]

    # what is seen
    # ------------------------------------------------------------------------------

    def _answers(self, worker: str) -> bool:
        return self._starts.get(worker, 0.0) <= self.now

    def _report(self, worker: str) -> WorkerReport:
        generation, step = self._live[worker]
        run = self._run
        if run is None or worker not in run.orders:
            return WorkerReport(worker, 1, 0, Phase.IDLE, step, generation)
        member = worker in run.members
        phase = (
            run.phase if member or run.phase in (Phase.BUILDING, Phase.HALTED) else Phase.RELEASED
        )
        done = [s for at, s in run.uploads if at <= self.now] if member else []
        return WorkerReport(
            worker,
            1,
            run.order.generation,
            phase,
            step,
            generation,
            steps=tuple(run.records) if worker == run.first_member else (),
            receipts=tuple((run.order.generation, s, ("simulated",)) for s in done[-1:]),
            restore=(
                self._restored[1]
                if self._restored is not None and self._restored[0] == worker
                else None
            ),
        )

    # what the controller does
    # ------------------------------------------------------------------------------

    def hire(self, workers: Sequence[str]) -> None:
        for worker in workers:
            if worker not in self._live and node_of(worker) in self._nodes:
                self._losses.pop(worker, None)
                self._live[worker] = (None, 0)
                self._starts[worker] = self.now + self.costs.process_start_s + self.costs.data_s

    def dismiss(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self._live.pop(worker, None)
            self._starts.pop(worker, None)

    def claim_generation(self, entry: Descent) -> None:
        """Claim a generation: the journal of a simulated job takes every entry at once."""
        self._checkpoint = replace(self._checkpoint, claimed=entry.generation)
        self.wake_at(self.now + 1e-3)

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        self._keep_copies()
        order = next(iter(orders.values()))
        transfers = order.transfers
        restore_s = 0.0 if transfers is None else transfers.makespan_s
        ready_at = self.now + self.costs.rebuild_s + self.costs.nccl_s(len(orders)) + restore_s
        step_s, sync_s = self._pace(order.plan)
        uploading_s, pushing_s = upload_s(orders, self.costs.s3_bytes_per_s), push_s(orders)
        rounds_every = max(1, order.replicate_every_steps)
        network = min(
            self._nodes[node_of(w)].node.node_type.inter_node_bytes_per_s
            for w in order.plan.workers
            if node_of(w) in self._nodes
        )
        step_s = self.costs.disturbed_step_s(
            step_s,
            sync_s,
            network,
            uploading_s,
            self._job.every_steps,
            PushedCopies(pushing_s / rounds_every, self._job.replication_share),
        )
        self._cut_stretches(order.start_step)
        stretch = Stretch(
            order.generation,
            order.start_step,
            ready_at + self.costs.first_step_s,
            step_s,
            len(order.plan.workers),
        )
        self.stretches.append(stretch)
        members = order.plan.workers
        self._run = _Run(
            orders,
            order,
            ready_at,
            step_s,
            uploading_s,
            pushing_s,
            stretch,
            step=order.start_step,
            members=frozenset(members),
            first_member=members[0],
        )
        tiers = {} if transfers is None else dict(transfers.bytes_by_tier)
        self.s3_requests.count_restore(tiers.get("s3", 0))
        self._restored = (order.plan.workers[0], RestoreRecord(tiers, 0.0, restore_s))
        self._inventories, self._stirred_at = None, self.now
        if any(node_of(worker) in self._dead for worker in orders):
            self._run.phase = Phase.HALTED

    def _ready(self, run: _Run) -> None:
        run.phase, run.step_ends_at = (
            Phase.TRAINING,
            run.ready_at + self.costs.first_step_s + run.step_s,
        )
        self._stirred_at = self.now
        for worker in run.order.plan.workers:
            self._live[worker] = (run.order.generation, run.step)

    def _cut_stretches(self, step: int) -> None:
        """Remove the steps from this one on, which are lost."""
        for stretch in self.stretches:
            stretch.num_steps = max(0, min(stretch.num_steps, step - stretch.first_step))

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        if self._run is not None:
            self._run.stop, self._run.upload = True, checkpoint

    def interrupt(self, workers: Sequence[str], generation: int) -> None:
        if (
            self._run is not None
            and self._run.phase in MOVING
            and self._run.order.generation <= generation
        ):
            self._run.phase = Phase.HALTED
            self._stirred_at = self.now

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        """Roll workers forward: no-op, since steps end for all at once here."""

    def request_inventories(self) -> None:
        self._keep_copies()
        self._inventories = {}
        self.wake_at(self.now + 1e-3)
        for copy in self._copies:
            if copy.source.node in self._nodes and copy.source.node not in self._dead:
                self._inventories.setdefault(copy.source.node, []).append(copy)

    def _keep_copies(self) -> None:
        """Record the copies that other nodes' agents hold of this generation.

        They are those of the newest round of copies that had time to arrive.
        """
        run = self._run
        if run is None or run.phase is Phase.BUILDING:
            return
        every = max(1, run.order.replicate_every_steps)
        arrived = run.step - max(1, math.ceil(run.push_s / run.step_s)) + 1
        if arrived < run.order.start_step:
            return
        step = arrived - (arrived - run.order.start_step) % every
        found = []
        for worker, order in run.orders.items():
            targets = {target.peers[0]: target.shards for target in order.replication_targets}
            for peer, shards in targets.items():
                source = Source("memory", peer, worker, step, order.generation)
                found.append(Holding(source, frozenset(shards)))
            if targets:  # the nodes' own snapshots of that round complete it
                source = Source("memory", node_of(worker), worker, step, order.generation)
                found.append(
                    Holding(source, order.layout.shards_by_worker.get(worker, frozenset()))
                )
        self._copies = [copy for copy in self._copies if copy.source.kind == "disk"] + found

    def commit_checkpoint(
        self, step: int, generation: int, layout: Any, receipts: Sequence[Any]
    ) -> None:
        if self._run is not None:
            self.s3_requests.count_checkpoint(self._run.orders)
        self._checkpoint = self._checkpoint.followed_by(
            step, f"simulated/step-{step:08d}", SimulatedManifest(step, generation, layout.shards)
        )
        disks = [
            Holding(Source("disk", node_of(worker), worker, step, generation), shards)
            for worker, shards in layout.shards_by_worker.items()
        ]
        self._copies = [copy for copy in self._copies if copy.source.kind != "disk"] + disks

    def release_node(self, node: str) -> None:
        if node in self._nodes:
            self._forget(node, self.now)
