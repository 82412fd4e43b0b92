"""Division of a checkpoint among the workers that hold its shards."""

from __future__ import annotations

from collections.abc import Mapping

from recovery.state.layout import Layout, ShardId


def assign_writers(
    layout: Layout, node_by_worker: Mapping[str, str] | None = None
) -> dict[str, frozenset[ShardId]]:
    """Assign every held shard to exactly one of its holders, which writes it.

    Bytes are balanced over nodes, then over workers. Longest processing time first (Graham 1969),
    shards with the fewest holders before all others. A node's workers share its link, so a node's
    load counts before a worker's. Deterministic; a worker may get the empty set.
    """
    nodes = node_by_worker or {worker: worker for worker in layout.workers}
    node_load = dict.fromkeys(nodes.values(), 0)
    worker_load = dict.fromkeys(layout.workers, 0)
    written: dict[str, set[ShardId]] = {worker: set() for worker in layout.workers}

    def turn(shard: ShardId) -> tuple[int, int, ShardId]:
        return (len(layout.holders(shard)), -layout.shard_bytes(shard), shard)

    def load(worker: str) -> tuple[int, int, str]:
        return (node_load[nodes[worker]], worker_load[worker], worker)

    held = [shard for shard in layout.shards if layout.holders(shard)]
    for shard in sorted(held, key=turn):
        writer = min(layout.holders(shard), key=load)
        num_bytes = layout.shard_bytes(shard)
        written[writer].add(shard)
        node_load[nodes[writer]] += num_bytes
        worker_load[writer] += num_bytes
    return {worker: frozenset(shards) for worker, shards in written.items()}
