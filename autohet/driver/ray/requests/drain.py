"""Draining of a Ray node by `GcsClient.drain_node`, which Ray does not document (2.60)."""

import time

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2


def drain(node_id: str, message: str, deadline_s: float | None) -> bool:
    """Tell Ray that the node will be preempted; return true if accepted.

    Ray then puts nothing new there, and the autoscaler replaces the node.
    """
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    # Ray wants the wall clock's milliseconds since 1970, and takes 0 for no deadline.
    deadline_ms = 0
    if deadline_s is not None:
        deadline_ms = int((time.time() + deadline_s) * 1000)
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
    accepted, _ = client.drain_node(node_id, reason, message, deadline_ms)
    return bool(accepted)
