"""A workforce without Ray that can fail in every way in which the real one can: what `RayWorkforce`
would say, on a fake clock.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autohet.control.values.observation import HeldPart, Loss, NodeView, Notice, Observation, Prune
from autohet.driver.ray.agents.agent_commands import AgentCommands
from autohet.runtime.job.elastic import ElasticSection
from autohet.runtime.messages import (
    WITHDRAWN,
    AgentEndpoint,
    GenerationOrder,
    Phase,
    PreparationOrder,
    Prepared,
    UploadRetried,
    WorkerReport,
)
from autohet.simulate.fleet.manifest import SimulatedManifest
from planner.inputs.fleet import Node, NodeType
from recovery.state.holdings import Holding, Source
from recovery.state.layout import Layout
from tests.harness.collective import MOVING, Collective, Life, node_of, on_nodes
from tests.harness.scripted_agents import ScriptedAgents
from tests.harness.scripted_workforce import TICK_S

AGENT_RESTARTS_S = 0.3


@dataclass
class FaultyWorkforce(Collective):
    """Implements `Workforce`. Faults take effect at once or, where they say so, at the next step or
    restore.

    `speed`: steps between two observations; `starts_s`, `agents_start_s`, `inventory_s`,
    `leaves_s`: how long these take; `prompt`: whether a direction shows in the very next
    observation, or in the one after that, as when its question was already asked.
    """

    speed: int = 1
    starts_s: float = 0.0
    agents_start_s: float = 0.0
    inventory_s: float = 0.0
    leaves_s: float = 0.0
    prompt: bool = True
    heartbeat_s: float = 1.0
    worker_start_s: float = 18.0
    stillborn: set[str] = field(default_factory=set)
    """Nodes on which processes that are started never answer."""
    storage: str = "works"
    """Or "no upload", "no manifest": what fails there, for good; "upload later", "manifest later":
    what fails and is tried again, until this is "works".
    """
    unsent: list[tuple[Life, Any]] = field(default_factory=list)
    """Uploads that are tried again, with whose they are."""
    uncommitted: tuple[Any, ...] | None = None
    seen: Observation | None = None
    reported: set[tuple[int, int]] = field(default_factory=set)
    """Generation and number of each step that the driver was told of."""
    calls: int = 0
    _asked_at: float | None = None
    _leave_at: dict[str, float] = field(default_factory=dict)
    _agent_up_at: dict[str, float] = field(default_factory=dict)
    _back_at: dict[str, tuple[float, NodeType]] = field(default_factory=dict)
    _released: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.agents = ScriptedAgents(
            self.copies,
            lambda: self.now,
            lambda: self._agents_up() - self.cut,
            lambda: self.nodes.keys(),
            self.inventory_s,
        )
        self.errands = AgentCommands(
            ElasticSection(step_timeout_s=self.step_timeout_s).timeouts(), self.agents
        )

    def _agents_up(self) -> set[str]:
        return {name for name in self.nodes if self._agent_up_at[name] <= self.now}

    # faults
    # ------------------------------------------------------------------------------

    def join(self, name: str, kind: NodeType | None = None) -> None:
        self._agent_up_at[name] = self.now + self.agents_start_s
        self.nodes[name] = NodeView(Node(name, kind or self.kind), self.now)

    def warn(self, name: str, deadline_s: float | None) -> None:
        deadline = None if deadline_s is None else self.now + deadline_s
        self.notices[name] = Notice(name, "script", self.now, deadline)
        if deadline is not None:
            self._leave_at[name] = min(deadline, self._leave_at.get(name, math.inf))

    def kill(self, name: str) -> None:
        """The node is gone, and everybody knows."""
        for worker in on_nodes(self.processes, [name]):
            self._end(worker)
        self._forget(name, "its node died")

    def cut_off(self, name: str) -> None:
        """The node is gone: peers notice at once, Ray after the heartbeat."""
        self.cut.add(name)
        self.copies.agents.pop(name, None)
        for worker in on_nodes(self.processes, [name]):
            self._end(worker)
        self._leave_at[name] = self.now + self.heartbeat_s

    def kill_worker(self, worker: str) -> None:
        self._end(worker)
        self._lose(worker, "ActorDiedError")

    def kill_agent(self, name: str) -> None:
        """Its node is given up and taken on anew, by the same name; its processes go on, and nobody
        asks them.
        """
        kind = self.nodes[name].node.node_type
        self._forget(name, "its node's agent died")
        self._back_at[name] = (self.now + AGENT_RESTARTS_S, kind)

    def freeze(self, worker: str, for_s: float) -> None:
        """Until then it neither hears nor says anything."""
        process = self.processes[worker]
        if process.silent_at is None:
            process.silent_at, process.wakes_at = self.now, self.now + for_s

    def deafen(self, worker: str) -> None:
        self.processes[worker].deaf = True

    def thaw(self) -> None:
        for process in self.processes.values():
            process.deaf = False
            process.wakes_at = process.wakes_at if process.gone else self.now

    def fail(self, worker: str) -> None:
        """An error of its own, in whatever it does for its generation."""
        process = self.processes[worker]
        if process.report.phase in MOVING and process.silent_at is None:
            process.report = replace(
                process.report, phase=Phase.FAILED, error="OutOfMemoryError: boom"
            )

    def _end(self, worker: str) -> None:
        process = self.processes[worker]
        process.gone = True
        process.wakes_at = math.inf
        process.silent_at = self.now if process.silent_at is None else process.silent_at

    def _forget(self, name: str, reason: str) -> None:
        self.cut.discard(name)
        for worker in on_nodes(self.processes, [name]):
            self._lose(worker, reason)
        for known in (
            self.nodes,
            self.notices,
            self.copies.agents,
            self._leave_at,
            self._agent_up_at,
        ):
            known.pop(name, None)
        self.errands.forget(name)
        self.copies.refusing.discard(name)
        self._released.discard(name)

    def _lose(self, worker: str, reason: str) -> None:
        heard = self.processes[worker].silent_at
        self.losses.setdefault(
            worker, Loss(worker, reason, self.now, self.now - TICK_S if heard is None else heard)
        )

    # time
    # ------------------------------------------------------------------------------

    def observe(self) -> Observation:
        self.now += TICK_S
        self._come_and_go()
        if self.prompt:
            self._deliver()
        for _ in range(self.speed):
            if self.advance():
                break
        self._find_losses()
        reports = {
            w: r
            for w, p in self.processes.items()
            if (r := self._said(p)) is not None and w not in self.losses
        }
        self.reported |= {
            (step.generation, step.step) for report in reports.values() for step in report.steps
        }
        if not self.prompt:
            self._deliver()
        holdings = self.errands.take(self.now)
        self.seen = Observation(
            self.now,
            {name: self._view(name) for name in self.nodes},
            dict(self.notices),
            reports,
            dict(self.losses),
            self._inventories(),
            self.checkpoint,
            self.stop_reason,
            store=("here", 1),
            newest_copies=dict(self.errands.newest_copies),
            holdings=holdings,
        )
        return self.seen

    def _come_and_go(self) -> None:
        for name in [name for name, at in self._leave_at.items() if at <= self.now]:
            self.kill(name)
        for name in [name for name, (at, _) in self._back_at.items() if at <= self.now]:
            self.join(name, self._back_at.pop(name)[1])
        for process in self.processes.values():
            if process.silent_at is not None and process.wakes_at <= self.now:
                process.silent_at = None

    def _deliver(self) -> None:
        for process in list(self.processes.values()):
            process.hear()

    def _find_losses(self) -> None:
        for worker, process in self.processes.items():
            heard = process.silent_at if process.said is not None else None
            if heard is not None and self.now - heard > self.heartbeat_s:
                self._lose(worker, "said nothing")
            elif process.said is None and self.now - process.hired_at > self.worker_start_s:
                self._lose(worker, "did not come up")

    def _said(self, process: Life) -> WorkerReport | None:
        """Its answer, or the last one that it gave: without what is handed over once."""
        if process.silent_at is not None or process.up_at > self.now:
            return process.said
        done = [upload for upload in process.uploads if upload[0] <= self.now]
        process.uploads = [upload for upload in process.uploads if upload[0] > self.now]
        steps, process.steps = tuple(process.steps), []
        if self.storage == "works":
            done += [upload for owner, upload in self.unsent if owner is process]
            self.unsent = [each for each in self.unsent if each[0] is not process]
        part: Any = "the storage is full" if self.storage == "no upload" else ("written",)
        if self.storage == "upload later":
            part = UploadRetried("the storage is full")
            self.unsent += [(process, upload) for upload in done]
        process.said = process.report
        return replace(
            process.report, steps=steps, receipts=tuple((g, s, part) for _, g, s in done)
        )

    def _view(self, name: str) -> NodeView:
        up = self._agent_up_at[name] <= self.now
        return replace(
            self.nodes[name], endpoint=AgentEndpoint(name, "here", 1, "token") if up else None
        )

    def _inventories(self) -> Mapping[str, Any] | None:
        """What the agents hold, once all have answered or those that do have been waited for."""
        if self._asked_at is None or self.now < self._asked_at + (
            self.heartbeat_s if self.cut else self.inventory_s
        ):
            return None
        return {name: [h for h, _ in store.values()] for name, store in self.copies.agents.items()}

    # directions
    # ------------------------------------------------------------------------------

    def hire(self, workers: Collection[str]) -> None:
        self.calls += 1
        for worker in workers:
            if worker in self.processes:
                if (
                    worker not in self.losses
                    or self.now - self.losses[worker].seen_at < self.heartbeat_s
                ):
                    continue
                self.dismiss([worker])
            self.losses.pop(worker, None)
            up_at = math.inf if node_of(worker) in self.stillborn else self.now + self.starts_s
            idle = WorkerReport(worker, 1, 0, Phase.IDLE, 0, None)
            self.processes[worker] = Life(idle, hired_at=self.now, up_at=up_at)

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        self.calls += 1
        self._check(orders)
        order = next(iter(orders.values()))
        if order.follows is not None:
            self.next = order
            self._cuts_over = False
            for worker in orders:
                self._tell([worker], lambda process, order=order: self._follow(process, order))
            return
        self.next = None
        self._cuts_over = False
        self.order = order
        self.copies.begin(self.order)
        self.torn = None
        self._moved_at = self.now
        self._asked_at = None
        for worker, order in orders.items():
            self._tell([worker], lambda process, order=order: self.enter(process, order))

    def _follow(self, process: Life, order: GenerationOrder) -> None:
        if process.report.live_generation == order.follows == process.report.generation:
            process.following = order
        else:
            self.enter(process, order)

    def _check(self, orders: Mapping[str, GenerationOrder]) -> None:
        """What must hold of all orders, whatever has happened."""
        order = next(iter(orders.values()))
        assert set(order.participants) == set(orders)
        assert set(order.plan.workers) <= set(orders)
        assert self.order is None or order.generation > self.order.generation
        newest = self.newest_whole_step()
        assert newest is None or order.start_step >= newest, (
            f"back to {order.start_step}, but {newest} was whole"
        )

    def prepare(self, orders: Mapping[str, PreparationOrder]) -> None:
        def prepare(process: Life, generation: int) -> None:
            process.report = replace(process.report, prepared=Prepared(generation))

        for worker, order in orders.items():
            number = order.generation
            self._tell([worker], lambda process, number=number: prepare(process, number))

    def withdraw(self, workers: Collection[str], generation: int) -> None:
        def withdraw(process: Life) -> None:
            order = process.following
            # Once all have voted, it is too late.
            has_voted = self._cuts_over or order is None or process.report.step >= order.start_step
            if not has_voted:
                process.following = None
                process.report = replace(process.report, prepared=Prepared(generation, WITHDRAWN))

        self._tell(workers, withdraw)

    def interrupt(self, workers: Collection[str], generation: int, *, keep: bool = False) -> None:
        def interrupt(process: Life) -> None:
            process.following = None
            if process.report.generation <= generation:
                process.halt()

        self._tell(workers, interrupt)

    def request_stop(self, workers: Collection[str], *, checkpoint: bool) -> None:
        def stop(process: Life) -> None:
            process.stop = True
            process.durable = checkpoint

        self._tell(workers, stop)

    def roll_forward(
        self, workers: Collection[str], generation: int, vote: tuple[int, Any]
    ) -> None:
        self._tell(workers, lambda process: process.roll_forward(vote[0]))

    def _tell(self, workers: Collection[str], what: Callable[[Life], None]) -> None:
        """Directions go to workers that answer, as far as anyone can know."""
        assert self.seen is not None
        self.calls += 1
        dead = [
            w for w in workers if w not in self.seen.reports or node_of(w) not in self.seen.nodes
        ]
        assert not dead, f"{dead} are told something, and are known to be gone"
        for worker in workers:
            process = self.processes[worker]
            process.mail.append(lambda process=process: what(process))

    def request_inventories(self) -> None:
        self.calls += 1
        self._asked_at = self.now

    def commit_checkpoint(self, step: int, generation: int, layout: Layout, receipts: Any) -> None:
        if self.storage in ("no manifest", "manifest later"):
            self.uncommitted = (step, generation, layout, receipts)
            self.checkpoint = replace(
                self.checkpoint,
                error="the storage is full",
                error_step=step,
                error_generation=generation,
                is_retried=self.storage == "manifest later",
            )
            return
        self.commits.append(step)
        self.make_durable(step, generation, layout, self.copies.uploaded[generation, step])

    def make_durable(
        self, step: int, generation: int, layout: Layout, history: tuple[int, ...]
    ) -> None:
        uri = f"here/{step}"
        self.copies.durable = {
            uri: (Holding(Source("s3", "", uri, step, generation), layout.shards), history)
        }
        self.checkpoint = self.checkpoint.followed_by(
            step, uri, SimulatedManifest(step, generation, layout.shards)
        )

    def release_node(self, node: str) -> None:
        """It goes once nothing on it is needed."""
        super().release_node(node)
        if node in self.nodes and node not in self._released:
            self._released.add(node)
            self.errands.refuse_copies(node, node)

    def prune(self, what: Prune) -> None:
        self.errands.prune({name: name for name in self.nodes}, what)

    def ask_holdings(self) -> None:
        self.errands.ask_holdings({name: name for name in self.nodes}, self.now)

    def hand_over(
        self, parts: Mapping[str, Sequence[HeldPart]], to: Sequence[AgentEndpoint]
    ) -> None:
        self.errands.hand_over({name: name for name in self.nodes}, parts, to)

    def end_agent(self, node: str) -> None:
        """A node that is not needed any more goes."""
        self._leave_at[node] = min(self.now + self.leaves_s, self._leave_at.get(node, math.inf))
