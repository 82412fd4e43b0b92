"""Lookup of a new node's type.

It comes from the node's labels or the cluster file. If the type is in neither, the node itself is
asked.
"""

from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.cluster import RayNode
from autohet.runtime.process.cloud_metadata import CLOUDS, find_cloud
from autohet.runtime.process.metadata_server import MetadataUnavailable
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import NodeType


@ray.remote(num_cpus=0, max_retries=1)
def ask_instance_type() -> str | None:
    """Return this machine's instance type from its metadata service; None off the clouds."""
    try:
        _, facts = find_cloud([make() for make in CLOUDS.values()])
        return facts.instance_type
    except MetadataUnavailable:
        return None


class NodeTypeLookup:
    """Looks up node types without waiting for a node.

    Owned by the workforce and called from its thread.
    """

    def __init__(self) -> None:
        self._asked: dict[str, ray.ObjectRef[Any]] = {}

    def node_type(self, node: RayNode, cluster: Cluster | None) -> NodeType | None:
        """Return the node's type; None while the node has not answered.

        Raises:
            ConfigError: a fact is missing, and the node's instance type does not supply it.
        """
        try:
            return ray_cluster.node_type_of(node, cluster)
        except ConfigError:
            if node.node_id not in self._asked:
                affinity = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
                task = ask_instance_type.options(scheduling_strategy=affinity)
                self._asked[node.node_id] = task.remote()
            ready, _ = ray.wait([self._asked[node.node_id]], timeout=0)
            if not ready:
                return None
            # Taken out, so that a node that is refused now is asked again at its next turn.
            instance_type = self._answer(self._asked.pop(node.node_id))
            return ray_cluster.node_type_of(node, cluster, instance_type)

    def _answer(self, ref: ray.ObjectRef[Any]) -> str | None:
        try:
            found: str | None = ray.get(ref, timeout=5)
        except RayError:
            return None
        return found
