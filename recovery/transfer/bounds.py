"""Lower bound on the time of a restore.

No choice of sources beats it, given the tiers' order and the links.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery.transfer.links import LinkRates
from recovery.transfer.placement import HolderSet, Placement


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
    into: defaultdict[str, float] = defaultdict(float)
    sole: defaultdict[str, float] = defaultdict(float)
    sole_disk: defaultdict[str, float] = defaultdict(float, demand.disk_s)
    senders: set[str] = set()
    durable_nodes: set[str] = set()
    delivered = 0
    durable = 0

    holding_by_holders = _holding_nodes(demand.placement)
    for shard, nodes in demand.destinations.items():
        num_bytes = demand.placement.num_bytes[shard]
        holding_nodes, only_disk = holding_by_holders[demand.placement.holders[shard]]
        for node in nodes:
            into[node] += num_bytes / links.network(node)
        senders.update(nodes, holding_nodes)

        if not holding_nodes:
            # The first of the nodes reads it from durable storage, which is no delivery.
            delivered += num_bytes * (len(nodes) - 1)
            durable += num_bytes
            durable_nodes.update(nodes)
            continue

        delivered += num_bytes * len(nodes)
        if len(holding_nodes) == 1:
            node = holding_nodes[0]
            sole[node] += num_bytes / links.network(node)
            if only_disk:
                sole_disk[node] += num_bytes / links.disk_bytes_per_s

    bounds = [0.0, *into.values(), *sole.values(), *sole_disk.values(), *demand.memory_s.values()]
    if delivered:
        senders_speed = sum(links.network(node) for node in senders)
        bounds.append(delivered / senders_speed)
    if durable:
        readers_speed = sum(links.s3(node) for node in durable_nodes)
        bounds.append(durable / readers_speed)
    return max(bounds)


def _holding_nodes(placement: Placement) -> dict[HolderSet, tuple[tuple[str, ...], bool]]:
    """Map each distinct holder set to its nodes, and to True if it is on disks alone."""
    table: dict[HolderSet, tuple[tuple[str, ...], bool]] = {}
    for holders in set(placement.holders):
        sources = placement.sources_at(holders)
        peers = [source for source in sources if source.kind != "s3"]
        nodes = {source.node for source in peers}
        only_disk = all(source.kind == "disk" for source in peers)
        table[holders] = (tuple(sorted(nodes)), only_disk)
    return table
