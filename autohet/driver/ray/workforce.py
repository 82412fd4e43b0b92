"""The workforce on a real Ray cluster: one agent actor per node, one worker actor per GPU, and what they report."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autohet.driver.control.data_watch import DataWatch
from autohet.driver.control.durable import Durable
from autohet.driver.control.observation import Loss, NodeView, Observation
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.agent_actor import AgentActor, AgentReport
from autohet.driver.ray.agent_calls import Inventories
from autohet.driver.ray.agent_errands import AgentErrands
from autohet.driver.ray.cluster import RayNode
from autohet.driver.ray.environment import forwarded_environment
from autohet.driver.ray.introductions import Introductions
from autohet.driver.ray.polling import Poller, RayCalls
from autohet.driver.ray.rendezvous import Rendezvous
from autohet.driver.ray.silence import Heard, Witnesses
from autohet.driver.ray.worker_actor import WorkerActor
from autohet.driver.sources.choose import make_sources
from autohet.driver.sources.merge import Board
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.simple import RayDrains, Scripted
from autohet.driver.sources.spot_prices import SpotPrices, live_node_type
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, Phase, WorkerPlace, WorkerReport
from autohet.runtime.process_log import RunRecord
from planner.cluster import Cluster, Node, node_of
from planner.errors import ConfigError
from recovery.state.ancestry import Descent

logger = logging.getLogger("autohet")

NODE_POLL_S = 0.25  # nodes, agents and drains
CALM_TICK_S = 0.05  # between two rounds of reports while all train; each costs every worker a little of its interpreter
BUSY_TICK_S = 0.01  # while anybody does something else, so that a reconfiguration does not wait for its driver
MAX_AGENT_STARTS = 3
MAX_WORKER_STARTS = 3  # of one that dies each time before its first word


@dataclass
class Seat:
    """A Ray node in use: its name in plans, its agent, and whether its facts are known."""

    ray_node: RayNode
    view: NodeView
    agent: Any
    directory: str
    released: bool = False


class RayWorkforce:
    """Implements `Workforce` over Ray. All calls come from the driver's one thread.

    `clock` measures silence and deadlines: never the wall clock, which is set while a job runs.
    """

    def __init__(
        self,
        job: Job,
        run_id: str,
        durable: Durable,
        cluster: Cluster | None,
        *,
        worker_threads: int,
        clock: Callable[[], float] = time.monotonic,
        record: RunRecord | None = None,
    ) -> None:
        self.job = job
        self.run_id = run_id
        self.durable = durable
        self.cluster = cluster
        self.clock = clock
        self.timeouts = job.elastic.timeouts()
        self.stop_reason: str | None = None
        self.scripted = Scripted()
        self._drains = RayDrains(ray_cluster.draining_nodes, NODE_POLL_S)
        self._board = Board(make_sources(job.elastic, self._drains, self.scripted))
        self._introductions, self._prices = Introductions(), SpotPrices()
        self._token = secrets.token_hex(16)
        self._worker_threads = worker_threads
        self._record = record
        self._seats: dict[str, Seat] = {}
        self._names: dict[str, str] = {}
        self._refused: set[str] = set()
        self._workers: dict[str, Any] = {}
        self._losses: dict[str, Loss] = {}
        self._agents = Poller(lambda handle: handle.report.remote())
        self._reports = Poller(lambda handle: handle.report.remote())
        self._rendezvous = Rendezvous(ray_cluster.head_address())
        self._nodes_read_at = self._observed_at = -math.inf
        self._agent_starts: Counter[str] = Counter()
        self._stillborn: Counter[str] = Counter()
        calls = RayCalls()
        self._inventories = Inventories(calls, self.timeouts)
        self._errands = AgentErrands(self.timeouts, calls)
        self._witnesses = Witnesses(self.timeouts, calls)
        self._data = DataWatch(job)

    # observing -------------------------------------------------------------------------------------------------------

    def observe(self) -> Observation:
        self._pause()
        now = self.clock()
        if now - self._nodes_read_at >= NODE_POLL_S:
            self._nodes_read_at = now
            self._read_nodes(now)
            self._agents.poll(0.0, self.clock)
            self._data.judge({name: a.value.data for name, a in self._agents.answers.items() if a.value}, now)
        fresh = self._reports.poll(0.05, self.clock)
        now = self.clock()
        self._find_losses(now)
        inventories = self._inventories.take(now, self._witnesses.silent_nodes) if self.durable.fresh() else None
        reports = {
            w: a.value for w, a in self._reports.answers.items() if a.value is not None and w not in self._losses
        }
        self._read_notices(now)
        self._run_errands(reports, now)
        new = {report.worker for report in fresh}
        reports = {w: r if w in new else replace(r, steps=(), receipts=()) for w, r in reports.items()}
        return Observation(
            now=now, nodes={name: self._view(seat) for name, seat in self._seats.items()}, notices=dict(self._board.departures),
            reports=reports, losses=dict(self._losses), inventories=inventories, checkpoint=self.durable.state(),
            stop_reason=self.stop_reason, risks=dict(self._board.risks), store=self._rendezvous.address,
        )  # fmt: skip

    def _pause(self) -> None:
        """Leave the workers alone between two rounds of reports: short while something changes, longer while all
        train.
        """
        values = [answer.value for answer in self._reports.answers.values()]
        calm = all(value is not None and value.phase is Phase.TRAINING for value in values) and not self._losses
        left = self._observed_at + (CALM_TICK_S if calm else BUSY_TICK_S) - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._observed_at = time.monotonic()

    def _view(self, seat: Seat) -> NodeView:
        answer = self._agents.answers.get(seat.view.node.name)
        report: AgentReport | None = None if answer is None else answer.value
        if report is None:
            return seat.view
        facts, node = report.facts, seat.view.node
        price = None if facts is None else self._prices.usd_per_hour(facts.instance_type, facts.zone)
        kind = live_node_type(node.node_type, facts, seat.ray_node.labels, price)
        data = self._data.states.get(node.name)
        return replace(seat.view, endpoint=report.endpoint, node=replace(node, node_type=kind), data=data)

    def _read_nodes(self, now: float) -> None:
        alive = {node.node_id: node for node in ray_cluster.living_nodes()}
        for name in [name for name, seat in self._seats.items() if seat.ray_node.node_id not in alive]:
            self._forget(name, "its node died", now)
        for node_id, node in alive.items():
            if node_id not in self._names and node_id not in self._refused:
                self._seat(node, now)

    def _seat(self, node: RayNode, now: float) -> None:
        """Give a new node its name and its agent; a node whose facts are missing is refused once, with a warning."""
        try:
            kind = self._introductions.node_type(node, self.cluster)
        except ConfigError as error:
            self._refused.add(node.node_id)
            logger.warning("A node at %s is not used: %s", node.address, error)
            return
        if kind is None:
            return  # it is asked
        name = node.labels.get(ray_cluster.NAME_LABEL) or self._free_name(node.group)
        self._names[node.node_id] = name
        directory = f"{self.run_id}/{ray_cluster.directory_name(node)}"
        agent = AgentActor.options(scheduling_strategy=affinity(node.node_id)).remote(  # type: ignore[attr-defined]
            name, node.address, self._token, self._memory(directory), self._disk(directory), self.job.elastic.notice_sources,
            self.job, forwarded_environment(), self._record,
        )  # fmt: skip
        self._seats[name] = Seat(node, NodeView(Node(name, kind), now), agent, directory)
        self._agents.add(name, agent, now)

    def _memory(self, directory: str) -> str:
        return f"{self.job.checkpoint.memory_directory}/{directory}"

    def _disk(self, directory: str) -> str:
        return f"{self.job.checkpoint.local_directory}/{directory}"

    def _free_name(self, group: str) -> str:
        taken = set(self._names.values())
        return next(name for index in range(len(taken) + 1) if (name := f"{group}-{index}") not in taken)

    def _forget(self, name: str, reason: str, now: float) -> None:
        """The node is gone: its workers are lost, its agent and its notices with it."""
        seat = self._seats.pop(name)
        self._agents.remove(name)
        self._errands.forget(name)
        for worker in seat.view.workers:
            self._stillborn.pop(worker, None)
            if worker in self._losses and self._losses[worker].for_good:
                del self._losses[worker]
            if worker in self._workers:
                self._lose(worker, reason, now)

    def _find_losses(self, now: float) -> None:
        for worker, answer in self._reports.answers.items():
            if worker in self._losses:
                continue
            silent = answer.heard_at is not None and now - answer.heard_at > self.timeouts.heartbeat_s
            late = answer.heard_at is None and now - answer.asked_at > self.timeouts.worker_start_s
            if answer.error is not None:
                self._stillborn[worker] += answer.heard_at is None
                self._lose(worker, answer.error, now)
            elif silent or late:
                self._lose(worker, f"said nothing for {now - (answer.heard_at or answer.asked_at):.1f} s", now)
        for worker, reason in self._frozen(now).items():
            self._lose(worker, reason, now)
        for name, answer in list(self._agents.answers.items()):
            if answer.error is not None and name in self._seats:
                self._lose_agent(name, answer.error, now)

    def _frozen(self, now: float) -> dict[str, str]:
        heard = [
            Heard(worker, answer.value.process_id, answer.heard_at)
            for worker, answer in self._reports.answers.items()
            if answer.heard_at is not None and worker not in self._losses
        ]
        return self._witnesses.frozen(heard, {name: seat.agent for name, seat in self._seats.items()}, now)

    def _lose_agent(self, name: str, error: str, now: float) -> None:
        """Without its agent a node cannot be used: it is given up, and taken on anew unless it was told to go or its
        agent keeps dying.
        """
        seat = self._seats[name]
        self._forget(name, f"its node's agent died ({error})", now)
        if seat.released:
            return
        self._agent_starts[seat.ray_node.node_id] += 1
        if self._agent_starts[seat.ray_node.node_id] < MAX_AGENT_STARTS:
            del self._names[seat.ray_node.node_id]
        else:
            logger.warning("The agent of %s died %d times; the node is not used any more", name, MAX_AGENT_STARTS)

    def _lose(self, worker: str, reason: str, now: float) -> None:
        answer = self._reports.answers.get(worker)
        heard = now if answer is None or answer.heard_at is None else answer.heard_at
        for_good = self._stillborn[worker] >= MAX_WORKER_STARTS
        if for_good:
            reason = f"it died in each of {MAX_WORKER_STARTS} starts: {reason}"
        self._losses.setdefault(worker, Loss(worker, reason, now, heard, for_good))

    def _read_notices(self, now: float) -> None:
        """A node that leaves and that Ray does not drain yet is drained, so that the autoscaler replaces it."""
        for notice in self._board.look([self._watched(name, seat) for name, seat in self._seats.items()], now):
            seat = self._seats[notice.node]
            if notice.node not in self.scripted.by_node and seat.ray_node.node_id not in self._drains.known:
                left = None if notice.deadline is None else notice.deadline - now
                ray_cluster.drain(seat.ray_node.node_id, notice.source, left)

    def _watched(self, name: str, seat: Seat) -> WatchedNode:
        answer = self._agents.answers.get(name)
        report: AgentReport | None = None if answer is None else answer.value
        if answer is None or report is None or answer.heard_at is None:
            return WatchedNode(name, seat.ray_node.node_id)
        instance = None if report.facts is None else report.facts.instance_id
        return WatchedNode(name, seat.ray_node.node_id, instance, report.signs, answer.heard_at)

    # inventories -----------------------------------------------------------------------------------------------------

    def request_inventories(self) -> None:
        self._inventories.request({name: seat.agent for name, seat in self._seats.items()}, self.clock())
        self.durable.refresh()

    def _run_errands(self, reports: Mapping[str, WorkerReport], now: float) -> None:
        agents = {name: seat.agent for name, seat in self._seats.items()}
        views = {name: self._view(seat) for name, seat in self._seats.items()}
        endpoints = {name: view.endpoint for name, view in views.items() if view.endpoint is not None}
        manifest = self.durable.state().manifest
        board = self._board
        durable = None if manifest is None else (manifest.generation, manifest.step)
        for name in self._errands.run(agents, endpoints, board.departures, reports, durable, now, board.risks):
            if name in self._seats:
                ray.kill(self._seats[name].agent)

    @property
    def handing_over(self) -> bool:
        """Whether a leaving node's agent is bringing away what it alone keeps."""
        return self._errands.handing_over

    # acting ----------------------------------------------------------------------------------------------------------

    def hire(self, workers: Sequence[str]) -> None:
        now = self.clock()
        for worker in workers:
            name = node_of(worker)
            if name not in self._seats:
                continue
            if worker in self._workers:
                if worker not in self._losses or now - self._losses[worker].seen_at < self.timeouts.heartbeat_s:
                    continue
                self.dismiss([worker])  # an idle one that died, or one that never came up: tried again
            self._start(worker, self._seats[name])

    def _start(self, worker: str, seat: Seat) -> None:
        self._losses.pop(worker, None)
        node = seat.view.node
        place = WorkerPlace(
            worker, node.name, node.node_type.gpu_type, self._memory(seat.directory), self._disk(seat.directory)
        )
        handle = WorkerActor.options(num_gpus=1, scheduling_strategy=affinity(seat.ray_node.node_id)).remote(  # type: ignore[attr-defined]
            place, self.job, self._worker_threads, forwarded_environment(), self._record
        )
        self._workers[worker] = handle
        self._reports.add(worker, handle, self.clock())

    def dismiss(self, workers: Sequence[str]) -> None:
        for worker in workers:
            handle = self._workers.pop(worker, None)
            if handle is not None:
                self._reports.remove(worker)
                ray.kill(handle)

    def kill_processes(self, workers: Sequence[str]) -> None:
        """Kill these workers' processes without telling the controller (rehearsals)."""
        self._tell(workers, lambda handle: ray.kill(handle))

    def claim_generation(self, entry: Descent) -> None:
        self.durable.claim(entry)

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        self._inventories.drop()
        self._errands.upkeep.begin(orders)
        for worker, order in orders.items():
            self._workers[worker].begin.remote(order)

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        self._tell(workers, lambda handle: handle.request_stop.remote(checkpoint))

    def interrupt(self, workers: Sequence[str]) -> None:
        self._tell(workers, lambda handle: handle.interrupt.remote())

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        self._tell(workers, lambda handle: handle.roll_forward.remote(generation, vote))

    def _tell(self, workers: Sequence[str], call: Callable[[Any], Any]) -> None:
        for worker in workers:
            if worker in self._workers:
                call(self._workers[worker])

    def commit_checkpoint(self, step: int, generation: int, layout: Any, receipts: Sequence[Any]) -> None:
        self.durable.commit(step, generation, layout, receipts)

    def release_node(self, node: str) -> None:
        """End the agent once nothing that it keeps is needed: a draining node then has no lease left and Ray lets it go."""
        seat = self._seats.get(node)
        if seat is None or seat.released:
            return
        seat.released = True
        notice = self._board.departures.get(node)
        self._errands.release(node, seat.agent, None if notice is None else notice.deadline, self.clock())

    def give_back(self, node: str) -> None:
        """The node is not wanted any more: Ray drains it, which the controller sees as its notice."""
        if node in self._seats:
            ray_cluster.drain(self._seats[node].ray_node.node_id, "idle", None)

    def publish(self, status: Mapping[str, Any]) -> None:
        """Leave the status where others find it, with the seconds since each worker said anything."""
        now = self.clock()
        heard = {worker: answer.heard_at for worker, answer in self._reports.answers.items()}
        silence = {worker: round(now - at, 1) for worker, at in heard.items() if at is not None}
        ray_cluster.publish_status(self.job.name, {**status, "silence_s": silence})

    def close(self, *, forget_snapshots: bool = False, at_once: bool = False) -> None:
        """End every actor of the job and the rendezvous store; with `forget_snapshots` the nodes' copies are removed
        (a job that is done needs none, and host memory is dear); `at_once` without a word to the actors.
        """
        if not at_once:
            workers = [handle.close.remote() for handle in self._workers.values()]
            ray.wait(workers, num_returns=len(workers), timeout=5) if workers else None
            agents = [seat.agent.close.remote(forget_snapshots) for seat in self._seats.values()]
            ray.wait(agents, num_returns=len(agents), timeout=5) if agents else None
        for handle in [*self._workers.values(), *(seat.agent for seat in self._seats.values())]:
            ray.kill(handle)
        self._workers.clear()
        self._board.close()
        self._prices.close()
        self._rendezvous.close()


def affinity(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)
