"""Observer of a job on a real Ray cluster.

It keeps the job's nodes, the reports of agents and workers, the losses, and the notices that stand.
"""

import logging
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

from autohet.control.values.observation import NodeView, Observation
from autohet.driver.checkpoints.durable import Durable
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.agents.agent_calls import AgentReport, Inventories
from autohet.driver.ray.agents.agent_commands import AgentCommands
from autohet.driver.ray.agents.ended_agents import EndedAgents
from autohet.driver.ray.data_watch import DataWatch
from autohet.driver.ray.gpu_users import gpu_users
from autohet.driver.ray.ray_calls import RayCalls
from autohet.driver.ray.reports.merge_reports import merge_reports
from autohet.driver.ray.reports.newest_reports import LatestReport, Reports
from autohet.driver.ray.reports.wake_up import WakeUp
from autohet.driver.ray.requests.launches import LaunchWatch
from autohet.driver.ray.store.rendezvous import Rendezvous
from autohet.driver.ray.tracked_nodes import TrackedNode, TrackedNodes
from autohet.driver.ray.worker_losses import WorkerLosses
from autohet.driver.sources.choose import make_sources
from autohet.driver.sources.merge import NoticeMerger
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.simple import RayDrains, Scripted
from autohet.driver.sources.spot_prices import SpotPrices, SpotType, live_node_type
from autohet.runtime.job import Job
from autohet.runtime.job.identity import DATA_DIGEST, DATA_ROWS
from autohet.runtime.messages import Phase, WorkerReport
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import node_of

logger = logging.getLogger("autohet")

NODES_S = 0.25
CALM_NODES_S = 1.0
"""Seconds between two polls of Ray for its nodes, of 1 ms each.

The second value holds while all workers train: an arrival is then gathered for longer, and ends are
reported by other sources.
"""
DRAINS_S = 0.5
"""Seconds between two polls of Ray for its drains, of 0.6 ms each."""
BUSY_S = 5.0
"""Seconds after which a worker that has not started may wait for its GPU, and between two looks."""
FREED_S = 20.0
SLOW_START_S = 60.0
"""Seconds after which a process that Ray has not launched counts as one that waits for its GPU."""
BEATS = 4
"""Heartbeats per `suspicion_s` of a worker that has no news.

Three of them may be late or lost on the way. The driver reads them no less often.
"""
AGENT_BEAT_S = 5.0
"""Heartbeat period of an agent; its silence means nothing until it is asked something."""


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
        self.clock = clock
        self.timeouts = job.elastic.timeouts()
        self.wake_up = WakeUp()
        """Wake-up of the driver's wait: by reports, ends of actors, claims and signals."""
        durable.wake = self.wake_up.wake
        self._stop_reason: str | None = None
        self._stop_request = ray_cluster.ClusterMemory("stop", run_id)
        self.launches: LaunchWatch | None = None
        """Watch of launches; set if the autoscaler is asked for nodes."""
        self.spot_types: Mapping[str, SpotType] = {}
        """Spot types among the node types that the autoscaler may be asked for."""
        self._prices = SpotPrices()
        self.scripted = Scripted()
        self.drains = RayDrains(ray_cluster.draining_nodes, DRAINS_S)
        lines = ray_cluster.ClusterMemory("notices", run_id, lambda: durable.epoch)
        self.notices = NoticeMerger(make_sources(job.elastic, self.drains, self.scripted, lines))

        host = ray_cluster.head_address()
        self.rendezvous = Rendezvous(host)
        self.agent_reports = Reports(host, clock, AGENT_BEAT_S, self.wake_up)
        self.worker_reports = Reports(host, clock, self.timeouts.suspicion_s / BEATS, self.wake_up)
        self._merged_at = -math.inf

        self.calls = RayCalls(self.wake_up.wake)
        self.inventories = Inventories(self.calls, self.timeouts)
        self.agent_commands = AgentCommands(self.timeouts, self.calls)
        self._ended_agents = EndedAgents(self.wake_up.wake)
        self._data = DataWatch(job)
        self._nodes_read_at = -math.inf
        self._busy_read_at = -math.inf
        self._busy_at: dict[str, float] = {}
        """Time at which each node was last found in others' use."""
        self.tracked = TrackedNodes(job, run_id, cluster, lambda: durable.epoch)
        self.nodes = self.tracked.in_use
        self.workers: dict[str, Any] = {}
        """Actor of each worker that has a process."""
        self._losses = WorkerLosses(self.timeouts, self.calls, self.worker_reports)
        self.losses = self._losses.by_worker

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
            if self._stop_reason is None:
                self._stop_reason = self._stop_request.load().get("by")
        if self.agent_reports.fresh():
            self._judge_data(now)
        self._find_busy(now)
        self.find_losses(now)

        silent = self._losses.freezes.silent_nodes
        inventories = self.inventories.take(now, silent, fresh=self.durable.fresh())
        holdings = self.agent_commands.take(now, silent)
        watched = []
        for name, tracked in self.nodes.items():
            answer = self.agent_reports.answers.get(name)
            watched.append(_watched_node(name, tracked.ray_node, answer))
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
            usual_prices=self._prices.usual(self.spot_types),
            busy=dict(self.busy),
        )

    @property
    def busy(self) -> Mapping[str, str]:
        """Nodes whose GPUs others use, and who."""
        return self._losses.busy

    def _find_busy(self, now: float) -> None:
        """Find the nodes on which workers wait since others use the GPUs.

        A node counts as free once nobody else has used it for FREED_S: a job whose worker has died
        starts it again within that.
        """
        if now - self._busy_read_at < BUSY_S:
            return
        self._busy_read_at = now
        known = self._losses.busy
        waits_s = dict.fromkeys(known.keys() & self.nodes.keys(), math.inf)
        for worker, answer in self.worker_reports.answers.items():
            name = node_of(worker)
            waited_s = now - answer.asked_at
            if answer.heard_at is None and name in self.nodes and waited_s >= BUSY_S:
                waits_s.setdefault(name, waited_s)

        ids = {name: self.nodes[name].ray_node.node_id for name in waits_s}
        slow = [ids[name] for name, waited_s in waits_s.items() if waited_s >= SLOW_START_S]
        users = gpu_users(set(ids.values()), slow, self.run_id) if ids else {}
        busy = {}
        for name, node_id in ids.items():
            if node_id in users:
                busy[name] = users[node_id]
                self._busy_at[name] = now
            elif name in known and now - self._busy_at[name] < FREED_S:
                busy[name] = known[name]
        self._losses.busy = busy

    def _judge_data(self, now: float) -> None:
        """Compare the data of all nodes that have reported, and record the digest they agree on."""
        data = {}
        for name, answer in self.agent_reports.answers.items():
            if answer.value:
                data[name] = answer.value.data
        self._data.judge(data, now)
        reference = self._data.reference
        if reference is not None:
            self.durable.record(DATA_DIGEST, reference.digest)
            self.durable.record(DATA_ROWS, reference.num_rows)

    def is_calm(self) -> bool:
        """Return true if nothing changes: a long tick is enough.

        All workers train or are not used, no node leaves or is suspected, and no agent has an
        answer due.
        """
        is_suspicious = (
            self.agent_reports.await_words
            or self.worker_reports.await_words
            or self._losses.freezes.asked
        )
        if is_suspicious or self.losses or self.notices.departures:
            return False
        if self.inventories.asked or self.agent_commands.waiting:
            return False

        answers = self.worker_reports.answers.values()
        return all_train({None if each.value is None else each.value.phase for each in answers})

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
        if facts is not None and facts.cloud == "aws":
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
        return {
            name: tracked.agent for name, tracked in self.nodes.items() if tracked.agent is not None
        }

    def _read_nodes(self, now: float) -> None:
        living = ray_cluster.living_nodes()
        for name in self.tracked.dead(living):
            self._forget(name, "its node died", now)
        self.tracked.track_new(living, now)

    def _forget(self, name: str, reason: str, now: float) -> TrackedNode:
        """Forget a node that is gone, with its agent and its notices; its workers are lost."""
        tracked = self.nodes.pop(name)
        self.agent_reports.remove(name)
        self.agent_commands.forget(name)
        self._losses.forget_node(tracked.view.workers)
        for worker in tracked.view.workers:
            if worker in self.workers:
                self._losses.lose(worker, reason, now)
        return tracked

    def find_losses(self, now: float) -> None:
        """Find workers and agents that have died, fell silent, froze, or never came up.

        A node cannot be used without an agent: it is given up, and taken into use again if it may.
        """
        answers = self.agent_reports.answers
        for name in self._ended_agents.find(answers):
            answers[name].error = "its connection ended, and its node refuses another one"
        self._losses.find(self.agents, now)
        for name, answer in list(answers.items()):
            if answer.error is not None and name in self.nodes:
                tracked = self._forget(name, f"its node's agent died ({answer.error})", now)
                self.tracked.retry_or_leave_out(name, tracked, now)

    def close(self) -> None:
        """Close all that listens and polls; the actors are the workforce's to end."""
        self.agent_reports.close()
        self.worker_reports.close()
        self.wake_up.close()
        self.notices.close()
        if self.launches is not None:
            self.launches.close()
        self._prices.close()
        self.rendezvous.close()


def all_train(phases: Set[Phase | None]) -> bool:
    """Return True if workers in these phases train, beside workers that the plan does not use.

    None: a worker that has not reported yet.
    """
    return Phase.TRAINING in phases and phases <= {Phase.TRAINING, Phase.IDLE, Phase.RELEASED}


def _watched_node(name: str, node: ray_cluster.RayNode, answer: LatestReport | None) -> WatchedNode:
    report: AgentReport | None = None if answer is None else answer.value
    aliases: tuple[str, ...] = (node.node_id, node.address, node.host_name)
    if answer is None or report is None or answer.told_at is None:
        return WatchedNode(name, node.node_id, aliases=aliases)
    instance = None
    if report.facts is not None:
        instance = report.facts.instance_id
        aliases = (*aliases, report.facts.name)
    return WatchedNode(name, node.node_id, instance, report.signs, answer.told_at, aliases)
