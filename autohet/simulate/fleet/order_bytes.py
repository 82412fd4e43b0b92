"""Transfer times of the checkpoints and copies that a generation's orders ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autohet.runtime.messages import GenerationOrder
from planner.inputs.fleet import node_of


def checkpoint_bytes(order: GenerationOrder) -> int:
    """Return the bytes of a worker's part of a checkpoint."""
    return sum(order.layout.shard_bytes(shard) for shard in order.checkpoint_shards)


def upload_s(orders: Mapping[str, GenerationOrder], bytes_per_s: float) -> float:
    """Return the seconds to upload a checkpoint: those of the slowest node's part."""
    by_node: Counter[str] = Counter()
    for worker, order in orders.items():
        by_node[node_of(worker)] += checkpoint_bytes(order)
    return max(by_node.values()) / bytes_per_s


def snapshot_s(orders: Mapping[str, GenerationOrder], bytes_per_s: float) -> float:
    """Return the seconds until the state of the slowest worker is in host memory."""
    layout = next(iter(orders.values())).layout
    return max(map(layout.bytes_of, layout.workers)) / bytes_per_s


def push_s(orders: Mapping[str, GenerationOrder]) -> float:
    """Return the seconds of one round of copies to other nodes: those of the slowest worker."""
    seconds = [0.0]
    for order in orders.values():
        num_bytes = 0
        for target in order.replication_targets:
            num_bytes += sum(order.layout.shard_bytes(shard) for shard in target.shards)
        if num_bytes and order.replicate_bytes_per_s:
            seconds.append(num_bytes / order.replicate_bytes_per_s)
    return max(seconds)
