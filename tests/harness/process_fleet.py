"""A fleet of plain processes on this machine: the real worker and the real node agent, directed
without Ray.

A node is an agent and its workers; it dies when they are all killed, and takes its directories
along. Whatever the fleet started it can kill, freeze and thaw, and knows by id.
"""

import itertools
import math
import secrets
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from autohet.control.values.observation import HeldPart, Loss, NodeView, Notice, Observation, Prune
from autohet.driver.checkpoints.durable import Durable, durable_suspects
from autohet.driver.ray.agents.agent_calls import Inventories
from autohet.driver.ray.agents.agent_commands import AgentCommands
from autohet.driver.ray.reports.merge_reports import merge_reports
from autohet.driver.ray.reports.silence import FreezeDetector, Heard
from autohet.driver.ray.store.rendezvous import Rendezvous
from autohet.runtime.job import Job
from autohet.runtime.messages import (
    AgentEndpoint,
    GenerationOrder,
    Phase,
    PreparationOrder,
    WorkerPlace,
    WorkerReport,
)
from planner.inputs.fleet import Node, NodeType
from recovery.state.ancestry import Descent
from tests.harness.fault_points import FaultPoint
from tests.harness.one_object import OneObject
from tests.harness.process_seats import Member, ProcessCalls, Seat
from tests.harness.remote_process import NEWS, RemoteProcess, await_answers
from tests.harness.served_objects import ServedWorker, served_agent
from tests.harness.waits import HANG_S

NODE_POLL_S = 0.25
CALM_TICK_S = 0.05
BUSY_TICK_S = 0.01


@dataclass
class ProcessFleet(OneObject):
    """Implements `Workforce`.

    `act(point)` is called, in the driver's thread, when a worker has come to a fault point.
    """

    job: Job
    run_id: str
    durable: Durable
    logs: Path
    points: tuple[FaultPoint, ...] = ()
    act: Callable[[FaultPoint], None] | None = None
    clock: Callable[[], float] = time.monotonic
    stop_reason: str | None = None
    complaints: list[str] = field(default_factory=list)
    process_ids: list[int] = field(default_factory=list)
    silent_node_s: float = 64.0
    """Seconds after which a node that does not answer is dead: Ray's health check, by default."""
    environment: dict[str, str] = field(default_factory=dict)
    """For the workers: where their storage is."""
    clock_offsets: dict[str, float] = field(default_factory=dict)
    """Seconds by which a node's clock is ahead."""
    starts: Counter[str] = field(default_factory=Counter)
    """How often each agent (`agent-NODE`) and worker (`worker-NODE/GPU`) was started."""

    def __post_init__(self) -> None:
        self.timeouts = self.job.elastic.timeouts()
        self.notices: dict[str, Notice] = {}
        self._token = secrets.token_hex(8)
        self._seats: dict[str, Seat] = {}
        self._workers: dict[str, Member] = {}
        self._losses: dict[str, Loss] = {}
        self._calls = ProcessCalls()
        self._inventories = Inventories(self._calls, self.timeouts)
        self._errands = AgentCommands(self.timeouts, self._calls)
        self._witnesses = FreezeDetector(self.timeouts, self._calls)
        self._ended: list[RemoteProcess] = []
        self._news: list[FaultPoint] = []
        self.rendezvous = Rendezvous(self.address_of(None))
        self._polled_at = self._waited_at = 0.0
        self._merged_at = -math.inf
        self._numbers = itertools.count()
        self.logs.mkdir(parents=True, exist_ok=True)

    def address_of(self, name: str | None) -> str:
        """Where others reach the node, or the driver (None)."""
        return "127.0.0.1"

    # nodes
    # ------------------------------------------------------------------------------

    def add(self, name: str, kind: NodeType) -> None:
        """A node joins: its agent starts; its workers are hired by the controller."""
        roots = (self.job.checkpoint.memory_directory, self.job.checkpoint.local_directory)
        memory, disk = (Path(root, self.run_id, name) for root in roots)
        address = self.address_of(name)
        agent = self._spawn(
            f"agent-{name}",
            served_agent,
            (name, address, self._token, str(memory), str(disk)),
            (),
            self.job,
            {},
        )
        agent.ask("report")
        self._seats[name] = Seat(NodeView(Node(name, kind), self.clock()), agent, (memory, disk))

    def await_agents(self) -> None:
        """Return when every node's agent is up: the first plan is then for all of them."""
        deadline = time.monotonic() + HANG_S
        while any(seat.view.endpoint is None for seat in self._seats.values()):
            assert time.monotonic() < deadline, "an agent did not start"
            wait(
                [
                    seat.agent.connection
                    for seat in self._seats.values()
                    if seat.view.endpoint is None
                ],
                0.1,
            )
            for name, seat in self._seats.items():
                self._listen_to_agent(name, seat)

    def _spawn(self, name: str, build: Callable[..., Any], *arguments: Any) -> RemoteProcess:
        log = self.logs / f"{name.replace('/', '-')}-{next(self._numbers)}.log"
        process = RemoteProcess(name, log, build, *arguments)
        self.process_ids.append(process.pid)
        self.starts[name] += 1
        with open(self.logs / "processes", "a") as file:
            file.write(f"{process.pid}\n")
        return process

    def processes_of(self, name: str) -> list[RemoteProcess]:
        """A node's agent and its workers."""
        workers = [
            member.process
            for worker, member in self._workers.items()
            if worker.rsplit("/", 1)[0] == name
        ]
        return [self._seats[name].agent, *workers]

    def kill_node(self, name: str) -> None:
        """Sudden death: every process of the node at once; its memory and its disk are gone."""
        seat = self._seats.get(name)
        if seat is None:
            return
        for process in self.processes_of(name):
            process.kill()
        for directory in seat.directories:
            shutil.rmtree(directory, ignore_errors=True)
        seat.dead = True

    def freeze_node(self, name: str) -> None:
        """Every process of the node stands still; nothing that is sent to it arrives until
        `thaw_node`.
        """
        for process in self.processes_of(name):
            process.send_signal(signal.SIGSTOP)
        self._seats[name].silent_since = self.clock()

    def thaw_node(self, name: str, processes: Sequence[RemoteProcess]) -> None:
        """The node comes back, with those of its processes that were not ended meanwhile."""
        for process in processes:
            process.send_signal(signal.SIGCONT)
        if name in self._seats:
            self._seats[name].silent_since = None

    def kill_worker(self, worker: str) -> None:
        self._workers[worker].process.kill()

    def freeze_worker(self, worker: str) -> RemoteProcess:
        """Stop a worker's process, and return it: SIGCONT lets it go on."""
        process = self._workers[worker].process
        process.send_signal(signal.SIGSTOP)
        return process

    def kill_agent(self, name: str) -> None:
        """Kill a node's agent alone: the fleet gives the node up, its files stay."""
        self._seats[name].agent.kill()

    def freeze_agent(self, name: str) -> RemoteProcess:
        """Stop a node's agent, and return it: SIGCONT lets it go on."""
        agent = self._seats[name].agent
        agent.send_signal(signal.SIGSTOP)
        return agent

    def has(self, name: str) -> bool:
        """Return whether a node of this name is in the fleet, as far as the fleet knows."""
        return name in self._seats

    def is_up(self, name: str) -> bool:
        """Return whether a node of this name lives and answers."""
        seat = self._seats.get(name)
        return seat is not None and not seat.dead and seat.silent_since is None

    def warn(self, name: str, deadline_s: float | None) -> None:
        """A notice: the node is killed at its deadline, if it has one and was not released
        before.
        """
        if name in self._seats:
            now = self.clock()
            deadline = None if deadline_s is None else now + deadline_s
            self.notices[name] = Notice(name, "the test", now, deadline)

    def withdraw_notice(self, name: str) -> None:
        """The node stays after all."""
        self.notices.pop(name, None)

    def _see_nodes(self, now: float) -> None:
        for name, notice in self.notices.items():
            if notice.deadline is not None and now >= notice.deadline:
                self.kill_node(name)
        for name, seat in list(self._seats.items()):
            if (
                not seat.dead
                and seat.silent_since is not None
                and now - seat.silent_since > self.silent_node_s
            ):
                self.kill_node(name)
            if seat.dead:
                self._forget(name, now)

    def _forget(self, name: str, now: float) -> None:
        seat = self._seats.pop(name)
        self._ended.append(seat.agent)
        self._errands.forget(name)
        self.notices.pop(name, None)
        for worker in seat.view.workers:
            if worker in self._workers:
                self._lose(worker, "its node died", now)

    # observing
    # ------------------------------------------------------------------------------

    def observe(self) -> Observation:
        now = self.clock()
        if now - self._polled_at >= NODE_POLL_S:
            self._polled_at = now
            self._see_nodes(now)
        fresh = self._listen()
        now = self.clock()
        for name, seat in self._seats.items():
            self._listen_to_agent(name, seat)
        self._find_losses(now)
        self._act()
        newest = {worker: member.report for worker, member in self._workers.items()}
        reports = merge_reports(newest, fresh, self._losses, self._merged_at)
        self._merged_at = now
        inventories = self._inventories.take(
            now, self._witnesses.silent_nodes, fresh=self.durable.fresh()
        )
        holdings = self._errands.take(now, self._witnesses.silent_nodes)
        return Observation(
            now=now,
            nodes={name: seat.view for name, seat in self._seats.items()},
            notices=dict(self.notices),
            reports=reports,
            losses=dict(self._losses),
            inventories=inventories,
            checkpoint=self.durable.state(),
            stop_reason=self.stop_reason,
            store=self.rendezvous.address,
            newest_copies=dict(self._errands.newest_copies),
            holdings=holdings,
        )

    def _act(self) -> None:
        """After all answers are taken: a driver that is struck here has no half-read round behind
        it.
        """
        arrived, self._news = self._news, []
        for point in arrived:
            assert self.act is not None
            self.act(point)

    def wait(self) -> None:
        reports = [member.report for member in self._workers.values()]
        calm = (
            all(r is not None and r.phase is Phase.TRAINING for r in reports) and not self._losses
        )
        left = self._waited_at + (CALM_TICK_S if calm else BUSY_TICK_S) - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._waited_at = time.monotonic()

    def _listen(self) -> list[WorkerReport]:
        """Take what workers have said, waiting shortly for a first one; returns the reports."""
        there = {m.process.connection: w for w, m in self._workers.items() if not m.process.gone}
        fresh: list[WorkerReport] = []
        for connection in wait(list(there), 0.05) if there else ():
            worker = there[connection]  # type: ignore[index]
            member = self._workers.get(worker)
            if member is not None:
                fresh += self._take(worker, member)
        return fresh

    def _take(self, worker: str, member: Member) -> list[WorkerReport]:
        new = []
        for answer in member.process.take():
            if answer.number == NEWS:
                self._news.append(answer.value)
            elif not answer.good:
                self.complaints.append(f"{worker}: {answer.value}")
                if answer.number == member.call:
                    member.error = "its report failed"
            elif answer.number == member.call:
                member.report, member.heard_at = answer.value.without_news(), self.clock()
                new.append(answer.value)
                member.call, member.asked_at = member.process.ask("report"), self.clock()
        if member.process.gone:
            member.error = "its process ended"
        return new

    def _listen_to_agent(self, name: str, seat: Seat) -> None:
        for answer in seat.agent.take():
            if not answer.good:
                self.complaints.append(f"agent of {name}: {answer.value}")
            elif hasattr(answer.value, "endpoint"):
                seat.view = replace(seat.view, endpoint=_checked(answer.value.endpoint))
            else:
                self._calls.arrived[seat.agent, answer.number] = answer.value
        if seat.agent.gone:
            seat.dead = True

    def _find_losses(self, now: float) -> None:
        for worker, member in self._workers.items():
            if worker in self._losses:
                continue
            silent = (
                member.heard_at is not None and now - member.heard_at > self.timeouts.heartbeat_s
            )
            late = member.heard_at is None and now - member.asked_at > self.timeouts.worker_start_s
            if member.error is not None:
                self._lose(worker, member.error, now)
            elif silent or late:
                self._lose(
                    worker,
                    f"said nothing for {now - (member.heard_at or member.asked_at):.1f} s",
                    now,
                )
        heard = [
            Heard(worker, member.report.process_id, member.heard_at)
            for worker, member in self._workers.items()
            if member.heard_at is not None and worker not in self._losses
        ]
        agents = {name: seat.agent for name, seat in self._seats.items()}
        for worker, reason in self._witnesses.frozen(heard, agents, now).items():
            self._lose(worker, reason, now)

    def _lose(self, worker: str, reason: str, now: float) -> None:
        member = self._workers.get(worker)
        heard = now if member is None or member.heard_at is None else member.heard_at
        self._losses.setdefault(worker, Loss(worker, reason, now, heard))

    def request_inventories(self) -> None:
        self._inventories.request(self._agents, self.clock())
        self.durable.refresh(durable_suspects(each.report for each in self._workers.values()))

    @property
    def _agents(self) -> dict[str, RemoteProcess]:
        return {name: seat.agent for name, seat in self._seats.items()}

    def prune(self, what: Prune) -> None:
        self._errands.prune(self._agents, what)

    def ask_holdings(self) -> None:
        self._errands.ask_holdings(self._agents, self.clock())

    def hand_over(
        self, parts: Mapping[str, Sequence[HeldPart]], to: Sequence[AgentEndpoint]
    ) -> None:
        self._errands.hand_over(self._agents, parts, to)

    def end_agent(self, node: str) -> None:
        """A node that is not needed any more is gone."""
        self.kill_node(node)

    @property
    def handing_over(self) -> bool:
        return self._errands.handing_over

    # acting
    # ------------------------------------------------------------------------------

    def hire(self, workers: Sequence[str]) -> None:
        now = self.clock()
        for worker in workers:
            name = worker.rsplit("/", 1)[0]
            if (
                name not in self._seats
                or self._seats[name].dead
                or self._seats[name].silent_since is not None
            ):
                continue
            if worker in self._workers:
                if (
                    worker not in self._losses
                    or now - self._losses[worker].seen_at < self.timeouts.heartbeat_s
                ):
                    continue
                self.dismiss([worker])
            self._start(worker, self._seats[name])

    def _start(self, worker: str, seat: Seat) -> None:
        self._losses.pop(worker, None)
        node = seat.view.node
        (memory, disk) = seat.directories
        place = WorkerPlace(worker, node.name, node.node_type.gpu_type, str(memory), str(disk))
        offset_s = self.clock_offsets.get(node.name, 0.0)
        process = self._spawn(
            f"worker-{worker}",
            ServedWorker,
            place,
            self.job,
            self.points,
            offset_s,
            self.environment,
        )
        self._workers[worker] = Member(process, self.clock(), process.ask("report"))

    def dismiss(self, workers: Sequence[str]) -> None:
        """On a node that is cut off the order does not arrive; its process is remembered, to be
        ended at the close.
        """
        for worker in workers:
            member = self._workers.pop(worker, None)
            if member is not None:
                seat = self._seats.get(worker.rsplit("/", 1)[0])
                if seat is None or seat.silent_since is None:
                    member.process.kill()
                self._ended.append(member.process)

    def claim_generation(self, entry: Descent) -> None:
        self.durable.claim(entry)

    def prepare(self, orders: Mapping[str, PreparationOrder]) -> None:
        for worker, order in orders.items():
            if worker in self._workers:
                process = self._workers[worker].process
                process.ask("prepare", self.rendezvous.with_secret(order))

    def withdraw(self, workers: Sequence[str], generation: int) -> None:
        self.tell(workers, "withdraw", generation)

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        self._inventories.drop()
        for worker, order in orders.items():
            self._workers[worker].process.ask("begin", self.rendezvous.with_secret(order))

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        self.tell(workers, "request_stop", checkpoint)

    def fall_back(self, step: int, generation: int) -> None:
        self.durable.fall_back(step, generation)

    def request_checkpoint(self, worker: str) -> None:
        self.tell([worker], "request_checkpoint")

    def interrupt(self, workers: Sequence[str], generation: int, *, keep: bool = False) -> None:
        self.tell(workers, "interrupt", generation, keep)

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        self.tell(workers, "roll_forward", generation, vote)

    def open_gate(self, point: FaultPoint) -> None:
        self.tell([point.worker], "open_gate", point)

    def tell(self, workers: Sequence[str], method: str, *arguments: Any) -> None:
        for worker in workers:
            if worker in self._workers:
                self._workers[worker].process.ask(method, *arguments)

    def commit_checkpoint(
        self, step: int, generation: int, layout: Any, receipts: Sequence[Any]
    ) -> None:
        self.durable.commit(step, generation, layout, receipts)

    def release_node(self, node: str) -> None:
        """The node goes once nothing on it is needed."""
        seat = self._seats.get(node)
        if seat is not None and not seat.released:
            seat.released = True
            self._errands.refuse_copies(node, seat.agent)

    def call(self, worker: str, method: str) -> Any:
        """A worker's answer to one more question, once the run has ended."""
        process = self._workers[worker].process
        number = process.ask(method)
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline and not process.gone:
            process.connection.poll(0.2)
            for answer in process.take():
                if answer.number == number:
                    return answer.value
        raise AssertionError(f"{worker} did not answer {method}")

    def close(self, *, forget_snapshots: bool) -> None:
        """End all that was started, workers first, in good order where they answer; a node that is
        silent dies.
        """
        for name in [name for name, seat in self._seats.items() if seat.silent_since is not None]:
            self.kill_node(name)
        workers = [member.process for member in self._workers.values()]
        agents = [seat.agent for seat in self._seats.values()]
        await_answers({p: p.ask("close") for p in workers})
        for process in (
            *workers,
            *self._ended,
        ):  # what they write after their agents have gone would stay
            process.close()
        await_answers({p: p.ask("close", forget_snapshots) for p in agents})
        for process in agents:
            process.close()
        self._workers.clear()
        self._seats.clear()
        self._ended.clear()
        self.rendezvous.close()


def _checked(endpoint: AgentEndpoint) -> AgentEndpoint:
    assert endpoint.port > 0
    return endpoint
