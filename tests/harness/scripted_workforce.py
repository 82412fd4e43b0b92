"""A workforce without Ray: workers are values that do what orders say, one step a tick, and die
when a test says so.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from autohet.control.values.observation import (
    CheckpointState,
    Launches,
    Loss,
    NodeView,
    Notice,
    Observation,
)
from autohet.runtime.messages import AgentEndpoint, Phase, StepRecord, WorkerReport
from planner.inputs.fleet import Node, NodeType
from tests.harness.one_object import OneObject

TICK_S = 0.1


@dataclass
class Process:
    """One worker's process: what it would report."""

    report: WorkerReport
    order: Any = None
    ticks_to_build: int = 0
    stop: bool = False
    saves: bool = False
    saves_next: bool = False


@dataclass
class ScriptedWorkforce(OneObject):
    """Implements `Workforce`; `now` advances by one tick with each observation.

    `builds` is how many ticks a build takes.
    """

    kind: NodeType
    now: float = 0.0
    builds: int = 2
    nodes: dict[str, NodeView] = field(default_factory=dict)
    notices: dict[str, Notice] = field(default_factory=dict)
    risks: dict[str, Notice] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)
    checkpoint: CheckpointState = field(default_factory=CheckpointState)
    stop_reason: str | None = None
    released: list[str] = field(default_factory=list)
    rehearsed: list[Any] = field(default_factory=list)
    asked: list[dict[str, int]] = field(default_factory=list)
    launches: Launches | None = None
    waits: dict[str, str] = field(default_factory=dict)
    """Nodes on which no process starts, since somebody else uses the GPUs."""
    prices: dict[str, float] = field(default_factory=dict)
    commits: list[int] = field(default_factory=list)
    inventories: Any = None

    def join(self, name: str) -> None:
        self.nodes[name] = NodeView(
            Node(name, self.kind), self.now, AgentEndpoint(name, "here", 1, "token")
        )

    def kill(self, name: str) -> None:
        """The node is gone with its workers; those that train with it are cut off."""
        del self.nodes[name]
        for worker in [w for w in self.processes if w.startswith(name + "/")]:
            del self.processes[worker]
            self.losses[worker] = Loss(worker, "killed", self.now, self.now - TICK_S)
        for process in self.processes.values():
            if process.report.phase in (Phase.TRAINING, Phase.BUILDING):
                process.report = replace(process.report, phase=Phase.HALTED, error="PeerLost")

    def lose(self, worker: str) -> None:
        """Its process is gone, and its node lives."""
        del self.processes[worker]
        self.losses[worker] = Loss(worker, "killed", self.now, self.now - TICK_S)
        for process in self.processes.values():
            if process.report.phase in (Phase.TRAINING, Phase.BUILDING):
                process.report = replace(process.report, phase=Phase.HALTED, error="PeerLost")

    def warn(self, name: str, deadline_s: float) -> None:
        self.notices[name] = Notice(name, "script", self.now, self.now + deadline_s)

    def observe(self) -> Observation:
        self.now += TICK_S
        reports = {worker: self._live(process) for worker, process in self.processes.items()}
        for process in self.processes.values():
            process.saves_next = False
        return Observation(
            self.now,
            dict(self.nodes),
            dict(self.notices),
            reports,
            dict(self.losses),
            self.inventories,
            self.checkpoint,
            self.stop_reason,
            dict(self.risks),
            ("here", 1),
            launches=self.launches,
            prices=dict(self.prices),
            busy=dict(self.waits),
        )

    def _live(self, process: Process) -> WorkerReport:
        """Let one tick pass for a worker."""
        report = process.report
        order = process.order
        if report.phase is Phase.BUILDING:
            process.ticks_to_build -= 1
            if process.ticks_to_build <= 0:
                part = report.worker in order.plan.workers
                phase = Phase.TRAINING if part else Phase.RELEASED
                live = order.generation if part else None
                process.report = replace(
                    report, phase=phase, live_generation=live, step=order.start_step
                )
        elif report.phase is Phase.TRAINING:
            return self._step(process)
        return process.report

    def _step(self, process: Process) -> WorkerReport:
        report = process.report
        order = process.order
        done = report.step + 1
        phase = (
            Phase.FINISHED
            if done >= order.end_step
            else Phase.STOPPED
            if process.stop
            else Phase.TRAINING
        )
        process.report = replace(report, step=done, phase=phase)
        record = StepRecord(report.step, 1.0 / done, 1.0, 64, TICK_S, order.generation, self.now)
        saved = phase is Phase.FINISHED or (phase is Phase.STOPPED and process.saves)
        saved = saved or self._is_saved(order)
        receipts = ((order.generation, done, ("written",)),) if saved else ()
        return replace(process.report, steps=(record,), receipts=receipts)

    def _is_saved(self, order: Any) -> bool:
        """Whether the step in flight is made durable, since some worker was asked to."""
        members = [self.processes[w] for w in order.plan.workers if w in self.processes]
        return any(process.saves_next for process in members)

    def hire(self, workers: Any) -> None:
        for worker in workers:
            if worker not in self.processes and worker.split("/")[0] not in self.waits:
                self.losses.pop(worker, None)
                self.processes[worker] = Process(WorkerReport(worker, 1, 0, Phase.IDLE, 0, None))

    def dismiss(self, workers: Any) -> None:
        for worker in workers:
            self.processes.pop(worker, None)

    def claim_generation(self, entry: Any) -> None:
        self.checkpoint = replace(self.checkpoint, claimed=entry.generation)

    def begin(self, orders: Any) -> None:
        for worker, order in orders.items():
            process = self.processes[worker]
            process.order = order
            process.ticks_to_build = self.builds
            process.stop = False
            process.report = replace(
                process.report, generation=order.generation, phase=Phase.BUILDING, error=None
            )

    def request_stop(self, workers: Any, *, checkpoint: bool) -> None:
        for worker in workers:
            self.processes[worker].stop = True
            self.processes[worker].saves = checkpoint

    def request_checkpoint(self, worker: str) -> None:
        self.processes[worker].saves_next = True

    def interrupt(self, workers: Any, generation: int, *, keep: bool = False) -> None:
        for worker in workers:
            process = self.processes[worker]
            if (
                process.report.phase in (Phase.TRAINING, Phase.BUILDING)
                and process.report.generation <= generation
            ):
                process.report = replace(process.report, phase=Phase.HALTED)

    def roll_forward(self, workers: Any, generation: int, vote: Any) -> None:
        for worker in workers:
            process = self.processes[worker]
            process.report = replace(process.report, step=vote[0] + 1, prepared_step=None)

    def request_inventories(self) -> None:
        self.inventories = {}

    def commit_checkpoint(self, step: int, generation: int, layout: Any, receipts: Any) -> None:
        self.commits.append(step)
        self.checkpoint = self.checkpoint.followed_by(step, f"here/{step}", self.manifest(step))

    def manifest(self, step: int) -> Any:
        """What a committed checkpoint holds; None: the storage's content is of no interest."""
        return None

    def release_node(self, node: str) -> None:
        self.released.append(node)

    def wait(self) -> None:
        pass

    def ask_for_nodes(self, counts: Any) -> None:
        self.asked.append(dict(counts))

    def give_back(self, node: str) -> None:
        self.notices[node] = Notice(node, "Ray is draining it", self.now)

    def rehearse(self, what: Any) -> None:
        self.rehearsed.append(what)
