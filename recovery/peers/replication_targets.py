"""Choice of the shards that need a copy on another node, and of the nodes that take them.

Pure, decided once a generation. A shard whose live holders are all on one node would be lost with
that node. Such shards are pushed to agents of other nodes after each snapshot
(`recovery.peers.replication`), spread so that no node takes in much more than another.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from recovery.state.layout import Layout, ShardId

ZoneChoice = Literal["same", "any", "other"]
"""Zones that copies go to.

`same`: the node's own zone only. `any`: the same zone first. `other`: any, with another zone first,
so that the failure of a zone destroys no last copy.
"""


@dataclass(frozen=True)
class Peer:
    """Node whose agent can take copies.

    `zone` is empty if it is not known; it then counts as the zone of the pushing node. `leaving`:
    the node has had notice or is at risk, and is chosen only if there is no other.
    """

    node: str
    zone: str = ""
    leaving: bool = False


@dataclass(frozen=True)
class ReplicationTarget:
    """Shards of one worker's state that its node's agent pushes after each snapshot.

    They go to the first of `peers` that takes them (names of nodes; the first is the one that the
    bytes are balanced for).
    """

    worker: str
    shards: tuple[ShardId, ...]
    peers: tuple[str, ...]


def replication_targets(
    layout: Layout,
    node_by_worker: Mapping[str, str],
    peers: Iterable[Peer],
    at_risk: Collection[str] = (),
    *,
    zones: ZoneChoice = "any",
    connects: Callable[[str, str], bool] | None = None,
) -> dict[str, tuple[ReplicationTarget, ...]]:
    """Map each worker to the targets that its node must push; empty if there is no other node.

    After the pushes no shard is on one node alone, nor only on nodes `at_risk`, which may all leave
    at once. Every shard that one node alone holds (or those at risk) is in exactly one target, if
    any peer may take it. The target belongs to the worker there with the least to push.

    Peers: another node; not one that leaves, if there is another; in the zone that `zones` prefers;
    then the one with the fewest bytes. Larger shards first (longest processing time first, Graham
    1969). A target's further peers are no farther than its first: data between zones costs money.
    `connects(zone, zone)`: whether data may be sent from one zone to the other at all.
    """
    candidates = sorted(peers, key=lambda peer: peer.node)
    zone_by_node = {peer.node: peer.zone for peer in candidates}
    choices: dict[str, list[list[str]]] = {}
    for node in set(node_by_worker.values()):
        home = Peer(node, zone_by_node.get(node, ""))
        choices[node] = _choices(home, candidates, zones, connects)

    pushed = dict.fromkeys(layout.workers, 0)
    taken = dict.fromkeys(zone_by_node, 0)
    found: dict[tuple[str, str], list[ShardId]] = {}
    for shard, workers in _alone(layout, node_by_worker, at_risk):
        groups = choices[node_by_worker[workers[0]]]
        if not groups:
            continue
        worker = min(workers, key=lambda name: (pushed[name], name))
        peer = min(groups[0], key=lambda node: (taken[node], node))
        num_bytes = layout.shard_bytes(shard)
        pushed[worker] += num_bytes
        taken[peer] += num_bytes
        found.setdefault((worker, peer), []).append(shard)

    targets: dict[str, tuple[ReplicationTarget, ...]] = {}
    for (worker, peer), shards in sorted(found.items()):
        node = node_by_worker[worker]
        others = _fallbacks(node, peer, choices[node], zone_by_node)
        target = ReplicationTarget(worker, tuple(sorted(shards)), (peer, *others))
        targets[worker] = (*targets.get(worker, ()), target)
    return targets


def _fallbacks(
    node: str, peer: str, groups: list[list[str]], zone_by_node: Mapping[str, str]
) -> list[str]:
    """Return the other nodes of `groups`, in order, that are no farther from `node` than `peer`."""
    zone = zone_by_node.get(node, "")
    is_far = not is_near(zone, zone_by_node[peer])
    others = []
    for group in groups:
        for other in group:
            if other != peer and (is_far or is_near(zone, zone_by_node[other])):
                others.append(other)
    return others


def _alone(
    layout: Layout, node_by_worker: Mapping[str, str], at_risk: Collection[str]
) -> list[tuple[ShardId, tuple[str, ...]]]:
    """Return shards that one node alone, or nodes at risk alone, hold, with their holders.

    Largest shards first.
    """
    risky = set(at_risk)
    alone = []
    for shard in layout.shards:
        workers = layout.holders(shard)
        nodes = {node_by_worker[worker] for worker in workers}
        if not nodes:
            continue
        are_at_risk = nodes <= risky
        if len(nodes) == 1 or are_at_risk:
            alone.append((shard, workers))
    return sorted(alone, key=lambda item: (-layout.shard_bytes(item[0]), item[0]))


def is_near(zone: str, other: str) -> bool:
    """Return True if two nodes are in one zone, or the zone of one is not known."""
    return zone == other or not zone or not other


def _choices(
    home: Peer,
    peers: list[Peer],
    zones: ZoneChoice,
    connects: Callable[[str, str], bool] | None,
) -> list[list[str]]:
    """Return groups of other nodes, best group first; nodes of a group are equally good."""
    groups: dict[tuple[bool, bool], list[str]] = {}
    for peer in peers:
        near = is_near(home.zone, peer.zone)
        if peer.node == home.node or (zones == "same" and not near):
            continue
        if not near and connects is not None and not connects(home.zone, peer.zone):
            continue
        # False sorts first: a node that stays, then one in the preferred zone.
        is_second_choice = near == (zones == "other")
        group = groups.setdefault((peer.leaving, is_second_choice), [])
        group.append(peer.node)
    return [groups[key] for key in sorted(groups)]
