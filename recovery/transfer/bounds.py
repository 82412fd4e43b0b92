"""Lower bound on the time of a restore.

No choice of sources beats it, given the tiers' order and the links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery.transfer.links import LinkRates
from recovery.transfer.placement import Placement


@dataclass(frozen=True)
class Demand:
    """Bytes that must cross between nodes, and the seconds that local reads already cost.

    `destinations` maps each shard to the nodes that lack it.
    """

    placement: Placement
    destinations: Mapping[int, Sequence[str]]
    memory_s: Mapping[str, float]
    disk_s: Mapping[str, float]


def lower_bound_s(demand: Demand, links: LinkRates) -> float:
    """Return the largest of these times, each unavoidable.

    Nodes may pass on what they have received.

    * a node's local reads, at its memory's or disk's speed;
    * into a node: the bytes that it lacks, at its card's speed;
    * out of a node: the bytes that it alone holds and another lacks, once, at its card's speed (and
      its disk's, if only there);
    * all deliveries between nodes, at the sum of the speeds of the cards that could send them;
    * bytes that only durable storage holds, once, at the sum of the needing nodes' links to it, and
      at its own limit.
    """
    into: dict[str, float] = {}
    sole: dict[str, float] = {}
    sole_disk: dict[str, float] = dict(demand.disk_s)
    senders: set[str] = set()
    durable_nodes: set[str] = set()
    delivered = durable = 0
    sole_holder = _sole_holders(demand.placement)
    for shard, nodes in demand.destinations.items():
        num_bytes = demand.placement.num_bytes[shard]
        holding_nodes, only_disk = sole_holder[demand.placement.holders[shard]]
        for node in nodes:
            into[node] = into.get(node, 0.0) + num_bytes / links.network(node)
        senders.update(nodes, holding_nodes)
        delivered += num_bytes * (len(nodes) - (0 if holding_nodes else 1))
        if not holding_nodes:
            durable += num_bytes
            durable_nodes.update(nodes)
        elif len(holding_nodes) == 1:
            node = holding_nodes[0]
            sole[node] = sole.get(node, 0.0) + num_bytes / links.network(node)
            if only_disk:
                sole_disk[node] = sole_disk.get(node, 0.0) + num_bytes / links.disk(node)
    bounds = [0.0, *into.values(), *sole.values(), *sole_disk.values(), *demand.memory_s.values()]
    if delivered:
        bounds.append(delivered / sum(links.network(node) for node in senders))
    if durable:
        bounds.append(
            durable / min(sum(links.s3(node) for node in durable_nodes), links.s3_total_bytes_per_s)
        )
    return max(bounds)


def _sole_holders(placement: Placement) -> dict[tuple[int, ...], tuple[tuple[str, ...], bool]]:
    """Map each distinct holder set to its nodes, and to True if it is on disks alone."""
    table: dict[tuple[int, ...], tuple[tuple[str, ...], bool]] = {}
    for holders in set(placement.holders):
        sources = [placement.sources[number] for number in holders]
        peers = [source for source in sources if source.kind != "s3"]
        nodes = tuple(sorted({source.node for source in peers}))
        table[holders] = (nodes, all(source.kind == "disk" for source in peers))
    return table
