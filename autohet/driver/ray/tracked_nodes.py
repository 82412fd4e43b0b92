"""Nodes of a job as Ray lists them: which are in use, under which names, and which are refused."""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autohet.control.values.observation import NodeView
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.cluster import RayNode
from autohet.driver.ray.node_type_lookup import NodeTypeLookup
from autohet.driver.ray.recent_failures import RecentFailures
from autohet.runtime.job import Job
from autohet.runtime.job.checkpoint import CheckpointSection
from autohet.runtime.step.precision import check_computes
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import Node

logger = logging.getLogger("autohet")
REFUSED_S = 600.0
"""Seconds until a refused node is checked again: its metadata may not have answered."""
MAX_AGENT_STARTS = 3


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


class TrackedNodes:
    """Names Ray's nodes and takes them into use; owned by the observer.

    `in_use`: by name.
    """

    def __init__(
        self, job: Job, run_id: str, cluster: Cluster | None, epoch: Callable[[], int]
    ) -> None:
        self._job = job
        self._run_id = run_id
        self._cluster = cluster
        self._types = NodeTypeLookup()
        self.in_use: dict[str, TrackedNode] = {}
        self._names: dict[str, str] = {}
        """Names of nodes by Ray's id; a node that has one is not taken into use again."""
        self._given_up: set[str] = set()
        """Nodes by Ray's id whose agents keep dying."""
        self._name_memory = ray_cluster.ClusterMemory("names", run_id, epoch)
        self._given_names: dict[str, str] = self._name_memory.load()
        """Names of all nodes by Ray's id, also of those that an earlier driver has named."""
        self._refused: dict[str, tuple[float, str]] = {}
        """Time and reason of each refused node's refusal, by Ray's id."""
        self._agent_deaths = RecentFailures(MAX_AGENT_STARTS)

    def dead(self, alive: Iterable[RayNode]) -> list[str]:
        """Return the names of the nodes in use that are not among the living."""
        living = {node.node_id for node in alive}
        return [
            name for name, tracked in self.in_use.items() if tracked.ray_node.node_id not in living
        ]

    def track_new(self, nodes: Iterable[RayNode], now: float) -> None:
        """Take the living nodes into use that are not, or not any more, named, refused or left out.

        A node whose agents kept dying is left out until they have not for a while.
        """
        alive = {node.node_id: node for node in nodes}
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
            kind = self._types.node_type(node, self._cluster)
            if kind is not None:
                check_computes(self._job, kind.gpu_type)
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
        directory = f"{self._run_id}/{ray_cluster.directory_name(node)}"
        view = NodeView(Node(name, kind), now, agent_started=False)
        self.in_use[name] = TrackedNode(node, view, directory)

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

    def retry_or_leave_out(self, name: str, tracked: TrackedNode, now: float) -> None:
        """Decide on a node that is out of use since its agent died.

        It is taken into use again unless it was told to leave or its agent keeps dying.
        """
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
