"""Observer of a job on a real Ray cluster.

It keeps the job's nodes, the reports of agents and workers, the losses, and the notices that stand.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autohet.control.values.observation import Loss, NodeView, Observation
from autohet.driver.checkpoints.durable import Durable
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.agents.agent_calls import AgentReport, Inventories
from autohet.driver.ray.agents.agent_commands import AgentCommands
from autohet.driver.ray.cluster import RayNode
from autohet.driver.ray.data_watch import DataWatch
from autohet.driver.ray.node_type_lookup import NodeTypeLookup
from autohet.driver.ray.ray_calls import RayCalls
from autohet.driver.ray.recent_failures import RecentFailures
from autohet.driver.ray.reports.merge_reports import merge_reports
from autohet.driver.ray.reports.newest_reports import LatestReport, Reports
from autohet.driver.ray.reports.silence import FreezeDetector, Heard
from autohet.driver.ray.reports.wake_up import WakeUp
from autohet.driver.ray.requests.launches import LaunchWatch
from autohet.driver.ray.store.rendezvous import Rendezvous
from autohet.driver.sources.choose import make_sources
from autohet.driver.sources.merge import NoticeMerger
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.simple import RayDrains, Scripted
from autohet.driver.sources.spot_prices import SpotPrices, SpotType, live_node_type
from autohet.runtime.job import Job
from autohet.runtime.job.checkpoint import CheckpointSection
from autohet.runtime.job.identity import DATA_DIGEST
from autohet.runtime.messages import Phase, WorkerReport
from autohet.runtime.step.precision import check_computes
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import Node

logger = logging.getLogger("autohet")

NODES_S = 0.25
CALM_NODES_S = 1.0
"""Seconds between two polls of Ray for its nodes, of 1 ms each.

The second value holds while all workers train: an arrival is then gathered for longer, and ends are
reported by other sources.
"""
DRAINS_S = 0.5
"""Seconds between two polls of Ray for its drains, of 0.6 ms each."""
BEATS = 4
"""Heartbeats per `suspicion_s` of a worker that has no news.

Three of them may be late or lost on the way. The driver reads them no less often.
"""
AGENT_BEAT_S = 5.0
"""Heartbeat period of an agent; its silence means nothing until it is asked something."""
REFUSED_S = 600.0
"""Seconds until a refused node is checked again: its metadata may not have answered."""
MAX_AGENT_STARTS = 3
MAX_WORKER_STARTS = 3
"""Starts of a worker that dies each time before its first word."""


@dataclass
class TrackedNode:
    """Ray node in use: its name in plans, its agent once started, and its snapshots' directory."""

    ray_node: RayNode
    view: NodeView
    directory: str
    agent: Any = None
    released: bool = False

    def snapshot_directories(self, checkpoint: CheckpointSection) -> tuple[str, str]:
        """Return the directories of the node's snapshots, as (host memory, disk)."""
        return (
            f"{checkpoint.memory_directory}/{self.directory}",
            f"{checkpoint.local_directory}/{self.directory}",
        )


class RayObserver:
    """Nodes, agents and workers of a job, as Ray, the actors and the notice sources report them.

    It starts, ends and drains nothing: its module may not import code that does (pyproject.toml);
    `RayWorkers`, `RayNodeAgents` and `RayAutoscaler` do. `clock` measures silence and deadlines:
    never the wall clock, which may be set while a job runs.
    """

    def __init__(
        self,
        job: Job,
        run_id: str,
        durable: Durable,
        cluster: Cluster | None,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self.run_id = run_id
        self.durable = durable
        self.cluster = cluster
        self.clock = clock
        self.timeouts = job.elastic.timeouts()
        self.wake_up = WakeUp()
        """Wake-up of the driver's wait: by reports, ends of actors and signals."""
        self._stop_reason: str | None = None
        self.launches: LaunchWatch | None = None
        """Watch of failed launches; set if the autoscaler is asked for nodes."""
        self.spot_types: Mapping[str, SpotType] = {}
        """Spot types among the node types that the autoscaler may be asked for."""
        self.scripted = Scripted()
        self.drains = RayDrains(ray_cluster.draining_nodes, DRAINS_S)
        lines = ray_cluster.ClusterMemory("notices", run_id)
        self.notices = NoticeMerger(make_sources(job.elastic, self.drains, self.scripted, lines))
        self._node_types = NodeTypeLookup()
        self._prices = SpotPrices()
        self.nodes: dict[str, TrackedNode] = {}
        """Nodes in use, by name."""
        self._names: dict[str, str] = {}
        """Names of nodes by Ray's id; a node that has one is not taken into use again."""
        self._given_up: set[str] = set()
        """Nodes by Ray's id whose agents keep dying."""
        self._name_memory = ray_cluster.ClusterMemory("names", run_id)
        self._given_names: dict[str, str] = self._name_memory.load()
        """Names of all nodes by Ray's id, also of those that an earlier driver has named."""
        self._refused: dict[str, tuple[float, str]] = {}
        """Time and reason of each refused node's refusal, by Ray's id."""
        self.workers: dict[str, Any] = {}
        """Actor of each worker that has a process."""
        self.losses: dict[str, Loss] = {}
        host = ray_cluster.head_address()
        self.agent_reports = Reports(host, clock, AGENT_BEAT_S, self.wake_up)
        self.worker_reports = Reports(host, clock, self.timeouts.suspicion_s / BEATS, self.wake_up)
        self.rendezvous = Rendezvous(host)
        self._nodes_read_at = -math.inf
        self._merged_at = -math.inf
        self._agent_deaths = RecentFailures(MAX_AGENT_STARTS)
        self._failed_starts = RecentFailures(MAX_WORKER_STARTS)
        calls = RayCalls()
        self.inventories = Inventories(calls, self.timeouts)
        self.agent_commands = AgentCommands(self.timeouts, calls)
        self._freezes = FreezeDetector(self.timeouts, calls)
        self._data = DataWatch(job)

    def expect_data(self, digest: str | None) -> None:
        """Refuse nodes whose data has other tokens than the checkpoint's run."""
        self._data.expected = digest

    @property
    def stop_reason(self) -> str | None:
        """Reason why the job is to stop; setting it, in a signal handler too, ends a wait."""
        return self._stop_reason

    @stop_reason.setter
    def stop_reason(self, reason: str | None) -> None:
        self._stop_reason = reason
        self.wake_up.wake()

    def observe(self) -> Observation:
        """Combine the messages received in `wait` with the state found now."""
        now = self.clock()
        poll_s = CALM_NODES_S if self.is_calm() else NODES_S
        if now - self._nodes_read_at >= poll_s:
            self._nodes_read_at = now
            self._read_nodes(now)
        if self.agent_reports.fresh():
            self._judge_data(now)
        self.find_losses(now)

        silent = self._freezes.silent_nodes
        inventories = self.inventories.take(now, silent, fresh=self.durable.fresh())
        holdings = self.agent_commands.take(now, silent)
        watched = []
        for name, tracked in self.nodes.items():
            answer = self.agent_reports.answers.get(name)
            watched.append(_watched_node(name, tracked.ray_node.node_id, answer))
        self.notices.look(watched, now)
        nodes = {name: self._view(tracked) for name, tracked in self.nodes.items()}
        checkpoint = self.durable.state()
        launches = None
        if self.launches is not None:
            launches = self.launches.look(now)

        # Last: news is reported once, so nothing that may fail may come between here and the
        # observation.
        reports = self.take_reports(now)
        return Observation(
            now=now,
            nodes=nodes,
            notices=dict(self.notices.departures),
            reports=reports,
            losses=dict(self.losses),
            inventories=inventories,
            checkpoint=checkpoint,
            stop_reason=self.stop_reason,
            risks=dict(self.notices.risks),
            store=self.rendezvous.address,
            newest_copies=dict(self.agent_commands.newest_copies),
            holdings=holdings,
            transfers=self.agent_commands.take_handed_over(),
            launches=launches,
            prices=self._prices.of(self.spot_types),
        )

    def _judge_data(self, now: float) -> None:
        """Compare the data of all nodes that have reported, and record the digest they agree on."""
        data = {}
        for name, answer in self.agent_reports.answers.items():
            if answer.value:
                data[name] = answer.value.data
        self._data.judge(data, now)
        if self._data.digest is not None:
            self.durable.record(DATA_DIGEST, self._data.digest)

    def is_calm(self) -> bool:
        """Return true if nothing changes: a long tick is enough.

        All workers train, no node leaves or is suspected, and no agent has an answer due.
        """
        is_suspicious = (
            self.agent_reports.await_words or self.worker_reports.await_words or self._freezes.asked
        )
        if is_suspicious or self.losses or self.notices.departures:
            return False
        if self.inventories.asked or self.agent_commands.waiting:
            return False

        for answer in self.worker_reports.answers.values():
            if answer.value is None or answer.value.phase is not Phase.TRAINING:
                return False
        return True

    def take_reports(self, now: float) -> dict[str, WorkerReport]:
        """Return the newest report of each worker, with all its news since the last call.

        News of a worker that is lost comes along in the round that finds the loss, and not later.
        """
        fresh = self.worker_reports.fresh()
        answers = self.worker_reports.answers
        newest: dict[str, WorkerReport | None] = {
            worker: answer.value for worker, answer in answers.items()
        }
        reports = merge_reports(newest, fresh, self.losses, self._merged_at)
        # Each step, receipt and transfer counts once: the kept report must not repeat them.
        for worker in reports.keys() & {report.worker for report in fresh}:
            answer = answers[worker]
            answer.value = answer.value.without_news()
        self._merged_at = now
        return reports

    def _view(self, tracked: TrackedNode) -> NodeView:
        answer = self.agent_reports.answers.get(tracked.view.node.name)
        report: AgentReport | None = None if answer is None else answer.value
        if report is None:
            return tracked.view

        node = tracked.view.node
        facts = report.facts
        price = None
        if facts is not None:
            price = self._prices.usd_per_hour(facts.instance_type, facts.zone)
        kind = live_node_type(node.node_type, facts, tracked.ray_node.labels, price)
        return replace(
            tracked.view,
            endpoint=report.endpoint,
            node=replace(node, node_type=kind),
            data=self._data.states.get(node.name),
        )

    @property
    def agents(self) -> dict[str, Any]:
        """Agent's actor by node."""
        agents = {}
        for name, tracked in self.nodes.items():
            if tracked.agent is not None:
                agents[name] = tracked.agent
        return agents

    def _read_nodes(self, now: float) -> None:
        alive = {node.node_id: node for node in ray_cluster.living_nodes()}
        for name, tracked in list(self.nodes.items()):
            if tracked.ray_node.node_id not in alive:
                self._forget(name, "its node died", now)

        self._given_up &= alive.keys()
        self._agent_deaths.forget(self._agent_deaths.known - alive.keys())
        for node_id, node in alive.items():
            if node_id in self._given_up and not self._agent_deaths.is_excluded(node_id, now):
                self._given_up.discard(node_id)
                del self._names[node_id]
            refused_at, _ = self._refused.get(node_id, (-math.inf, ""))
            if node_id not in self._names and now - refused_at >= REFUSED_S:
                self.track(node, now)

    def track(self, node: RayNode, now: float) -> None:
        """Give a new node its name, or refuse it for `REFUSED_S` with a warning.

        A node is refused if its facts are missing, or its GPUs cannot compute the job's precision.
        """
        try:
            kind = self._node_types.node_type(node, self.cluster)
            if kind is not None:
                check_computes(self.job, kind.gpu_type)
        except ConfigError as error:
            reason = str(error)
            _, last_reason = self._refused.get(node.node_id, (0.0, ""))
            self._refused[node.node_id] = (now, reason)
            if reason != last_reason:
                logger.warning("A node at %s is not used: %s", node.address, reason)
            return
        if kind is None:
            return  # The lookup asks the node itself; its answer comes in a later round.

        name = node.labels.get(ray_cluster.NAME_LABEL) or self._name_of(node)
        self._names[node.node_id] = name
        directory = f"{self.run_id}/{ray_cluster.directory_name(node)}"
        view = NodeView(Node(name, kind), now, agent_started=False)
        self.nodes[name] = TrackedNode(node, view, directory)

    def _name_of(self, node: RayNode) -> str:
        """Return the name that this node has had, under an earlier driver too, or an unused one.

        A new name is one that no node of this run has had.
        """
        name = self._given_names.get(node.node_id)
        if name is not None:
            return name

        taken = {*self._names.values(), *self._given_names.values()}
        index = 0
        while f"{node.group}-{index}" in taken:
            index += 1
        name = f"{node.group}-{index}"
        self._given_names[node.node_id] = name
        self._name_memory.save(self._given_names)
        return name

    def _forget(self, name: str, reason: str, now: float) -> None:
        """Forget a node that is gone, with its agent and its notices; its workers are lost."""
        tracked = self.nodes.pop(name)
        self.agent_reports.remove(name)
        self.agent_commands.forget(name)
        self._failed_starts.forget(tracked.view.workers)
        for worker in tracked.view.workers:
            # It said that every start on this node failed, which the next node may do better.
            if worker in self.losses and self.losses[worker].for_good:
                del self.losses[worker]
            if worker in self.workers:
                self._lose(worker, reason, now)

    def find_losses(self, now: float) -> None:
        """Find workers and agents that have died, fell silent, froze, or never came up."""
        for worker, loss in self.losses.items():
            if loss.for_good and not self._failed_starts.is_excluded(worker, now):
                self.losses[worker] = replace(loss, for_good=False)

        for worker, answer in self.worker_reports.answers.items():
            if worker not in self.losses:
                self._check_worker(worker, answer, now)
        for worker, reason in self._frozen(now).items():
            self._lose(worker, reason, now)
        for name, answer in list(self.agent_reports.answers.items()):
            if answer.error is not None and name in self.nodes:
                self._lose_agent(name, answer.error, now)

    def _check_worker(self, worker: str, answer: LatestReport, now: float) -> None:
        """Lose a worker that has died, or has been silent for too long."""
        never_heard = answer.heard_at is None
        if answer.error is not None:
            if never_heard:
                self._failed_starts.add(worker, now)
            self._lose(worker, answer.error, now)
            return

        # A new process may take longer to its first word than a running one between two.
        limit_s = self.timeouts.worker_start_s if never_heard else self.timeouts.heartbeat_s
        heard_at = answer.asked_at if answer.heard_at is None else answer.heard_at
        silent_s = now - heard_at
        if silent_s > limit_s:
            self._lose(worker, f"said nothing for {silent_s:.1f} s", now)

    def _frozen(self, now: float) -> dict[str, str]:
        heard = []
        for worker, answer in self.worker_reports.answers.items():
            if answer.heard_at is not None and worker not in self.losses:
                heard.append(Heard(worker, answer.value.process_id, answer.heard_at))
        return self._freezes.frozen(heard, self.agents, now)

    def _lose_agent(self, name: str, error: str, now: float) -> None:
        """Give up a node whose agent died, since it cannot be used without an agent.

        The node is taken on again unless it was told to leave or its agent keeps dying.
        """
        tracked = self.nodes[name]
        self._forget(name, f"its node's agent died ({error})", now)
        if tracked.released:
            return
        node_id = tracked.ray_node.node_id
        self._agent_deaths.add(node_id, now)
        if not self._agent_deaths.is_excluded(node_id, now):
            del self._names[node_id]
            return
        self._given_up.add(node_id)
        logger.warning(
            "Deciding to leave out %s until its agent has not died for %.0f minutes, since it died"
            " %d times within that",
            name,
            self._agent_deaths.window_s / 60,
            MAX_AGENT_STARTS,
        )

    def _lose(self, worker: str, reason: str, now: float) -> None:
        heard_at = now
        answer = self.worker_reports.answers.get(worker)
        if answer is not None and answer.heard_at is not None:
            heard_at = answer.heard_at
        for_good = self._failed_starts.is_excluded(worker, now)
        if for_good:
            reason = f"it died in each of {MAX_WORKER_STARTS} starts: {reason}"
        # The first reason stays: later ones are often its consequences.
        self.losses.setdefault(worker, Loss(worker, reason, now, heard_at, for_good))

    def close(self) -> None:
        """Close all that listens and polls; the actors are the workforce's to end."""
        self.agent_reports.close()
        self.worker_reports.close()
        self.wake_up.close()
        self.notices.close()
        self._prices.close()
        self.rendezvous.close()


def _watched_node(name: str, node_id: str, answer: LatestReport | None) -> WatchedNode:
    report: AgentReport | None = None if answer is None else answer.value
    if answer is None or report is None or answer.told_at is None:
        return WatchedNode(name, node_id)
    instance = None if report.facts is None else report.facts.instance_id
    return WatchedNode(name, node_id, instance, report.signs, answer.told_at)
