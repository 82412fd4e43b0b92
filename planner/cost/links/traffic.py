"""Links and their traffic: messages, collectives, and hidden states from stage to stage.

Several flows may share a NIC.

Formulas: a message of n bytes takes latency + n / bandwidth (alpha-beta, Hockney 1994). A ring
all-reduce of n bytes over p members sends 2 (p - 1) / p n bytes over every link of the ring
(Patarasu and Yuan, 2009); laid out node by node it crosses each node's NIC once. Where NCCL takes
its tree instead (many ranks, few bytes) it waits less: on HAP's 64 GPUs bandwidth is predicted 21%
too low. Flows that leave a node at one time share its NIC, and so do those that reach one:
min(measured one flow, sender's NIC * efficiency / leaving, receiver's NIC * efficiency / arriving).

Hidden states are whole on every rank of a stage. Inside a node, rank j of t2 takes them whole from
rank j * t1 // t2 of t1. From node to node that would be t2 times the same bytes through one NIC.
There each rank takes one of t2 equal slices, and its group gathers them inside its node (Narayanan
et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021,
section 4.1). `transfers_between` says who sends to whom; the runtime follows it too.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.inputs.catalogue import canonical_gpu_type
from planner.inputs.documents import parse_number
from planner.inputs.fleet import Member, NodeType, node_of
from planner.inputs.profile import read_table
from planner.inputs.zones import EC2_ZONES, NO_LINK, ZoneLink, ZoneTable
from planner.plans.plan import Stage

_Pair = tuple[str, str, str]  # scope, GPU type, GPU type of the peer
_Points = tuple[tuple[float, ...], tuple[float, ...]]
_COLUMNS = ("scope", "gpu_type", "peer_gpu_type", "message_bytes", "bytes_per_s")


@dataclass(frozen=True)
class LinkTable:
    """Measured bandwidth of one flow by message size.

    curves: (scope, gpu type, peer) -> rising (log2 bytes, bytes per second).
    """

    curves: Mapping[_Pair, _Points]

    def bytes_per_s(
        self, scope: str, gpu_type: str, peer: str, message_bytes: float
    ) -> float | None:
        """Return measured bytes per second of one flow; None if that pair was not measured.

        Interpolated over the logarithm of the size, flat beyond its ends.
        """
        # a link is as fast either way
        curve = self.curves.get((scope, gpu_type, peer))
        if curve is None:
            curve = self.curves.get((scope, peer, gpu_type))
        if curve is None:
            return None
        sizes, rates = curve
        size = np.log2(max(message_bytes, 1.0))
        return float(np.interp(size, sizes, rates))


def read_links(path: str | Path) -> LinkTable:
    """Reads a link table (CSV or Parquet); ConfigError names the row that is wrong."""
    points: dict[_Pair, dict[float, float]] = {}
    for number, row in enumerate(read_table(path, "links"), 1):
        what = f"row {number} of links '{path}'"
        wrong = set(row) ^ set(_COLUMNS)
        if wrong:
            names = ", ".join(str(column) for column in row)
            raise ConfigError(f"{what} has columns {names}; they must be {', '.join(_COLUMNS)}")
        if row["scope"] not in ("intra", "inter"):
            raise ConfigError(f"'scope' of {what} is '{row['scope']}'; it must be intra or inter")

        gpu_type = canonical_gpu_type(row["gpu_type"])
        peer = canonical_gpu_type(row["peer_gpu_type"])
        rate = _positive(row, "bytes_per_s", what)
        size = np.log2(_positive(row, "message_bytes", what))
        curve = points.setdefault((row["scope"], gpu_type, peer), {})
        curve[size] = rate

    curves = {}
    for key, rate_by_size in points.items():
        sizes = tuple(sorted(rate_by_size))
        curves[key] = (sizes, tuple(rate_by_size[size] for size in sizes))
    return LinkTable(curves)


def _positive(row: Mapping[str, Any], column: str, what: str) -> float:
    value = parse_number(row[column])
    if not 0.0 < value < float("inf"):
        raise ConfigError(f"'{column}' of {what} must be a positive number, not {row[column]!r}")
    return value


@dataclass(frozen=True)
class Links:
    """Seconds of messages and collectives between GPUs of node types."""

    parameters: CostParameters
    table: LinkTable | None = None
    zones: ZoneTable = EC2_ZONES

    def with_node_types(self, kinds: Mapping[NodeType, NodeType]) -> "Links":
        """Return these links with some node types replaced.

        A measured bandwidth scales with the link of the type that comes first in its pair.
        """
        if self.table is None:
            return self
        scale = {}
        for old, new in kinds.items():
            inside = new.intra_node_bytes_per_s / old.intra_node_bytes_per_s
            between = new.inter_node_bytes_per_s / old.inter_node_bytes_per_s
            scale["intra", old.gpu_type] = inside
            scale["inter", old.gpu_type] = between

        curves = {}
        for (scope, gpu, peer), (sizes, rates) in self.table.curves.items():
            factor = scale.get((scope, gpu), 1.0)
            scaled = tuple(rate * factor for rate in rates)
            curves[scope, gpu, peer] = (sizes, scaled)
        return replace(self, table=LinkTable(curves))

    def bandwidth(
        self,
        sender: NodeType,
        receiver: NodeType,
        same_node: bool,
        message_bytes: float,
        leaving: float = 1.0,
        arriving: float = 1.0,
    ) -> float:
        """Return bytes per second of one flow.

        leaving, arriving: equal flows that leave the sender's NIC, and arrive at the receiver's
        NIC, at the same time. Flows inside a node share nothing.
        """
        if same_node:
            measured = self.measured_rate(sender, receiver, same_node, message_bytes)
            if measured is not None:
                return measured
            nominal = min(sender.intra_node_bytes_per_s, receiver.intra_node_bytes_per_s)
            return nominal * self.parameters.efficiency_intra

        sent = sender.inter_node_bytes_per_s / max(leaving, 1.0)
        taken = receiver.inter_node_bytes_per_s / max(arriving, 1.0)
        share = min(sent, taken) * self.parameters.efficiency_inter
        # one flow may not fill a NIC that several flows fill
        one_flow = self.one_flow(sender, receiver, message_bytes)
        return share if one_flow is None else min(one_flow, share)

    def one_flow(self, sender: NodeType, receiver: NodeType, message_bytes: float) -> float | None:
        """Return the most bytes per second that one flow between two nodes reaches.

        The link table and the link between zones limit it; None if neither does.
        """
        measured = self.measured_rate(sender, receiver, False, message_bytes)
        between = self.zone_link(sender, receiver)
        if between is None:
            return measured
        if measured is None:
            return between.bytes_per_s
        return min(measured, between.bytes_per_s)

    def zone_link(self, one: NodeType, other: NodeType) -> ZoneLink | None:
        """Return the link between the zones of two node types; None within one zone."""
        if one.zone == other.zone:
            return None
        link = self.zones.link(one.zone, other.zone)
        if link is None and not self.zones.connects(one.zone, other.zone):
            return NO_LINK
        return link

    def hop_latency(self, one: NodeType, other: NodeType) -> float:
        """Seconds before the first byte of a message between two nodes."""
        between = self.zone_link(one, other)
        if between is None:
            return self.parameters.latency_inter_s
        return self.parameters.latency_inter_s + between.latency_s

    def measured_rate(
        self, sender: NodeType, receiver: NodeType, same_node: bool, message_bytes: float
    ) -> float | None:
        """Return bytes per second of one flow by the link table; None if it lacks the pair."""
        if self.table is None:
            return None
        scope = "intra" if same_node else "inter"
        return self.table.bytes_per_s(scope, sender.gpu_type, receiver.gpu_type, message_bytes)

    def latency(self, same_node: bool) -> float:
        if same_node:
            return self.parameters.latency_intra_s
        return self.parameters.latency_inter_s

    def message_s(
        self,
        sender: NodeType,
        receiver: NodeType,
        same_node: bool,
        message_bytes: float,
        leaving: float = 1.0,
        arriving: float = 1.0,
    ) -> float:
        """Return seconds of a message between two GPUs.

        leaving, arriving: equal messages that leave the sender's NIC, and arrive at the receiver's
        NIC, at the same time.
        """
        rate = self.bandwidth(sender, receiver, same_node, message_bytes, leaving, arriving)
        if same_node:
            latency_s = self.latency(True)
        else:
            latency_s = self.hop_latency(sender, receiver)
        return latency_s + message_bytes / rate

    def all_reduce_s(
        self,
        members: Sequence[Member],
        num_bytes: float,
        flows: float | Mapping[str, float] = 1.0,
    ) -> float:
        """Return seconds of a ring all-reduce over workers.

        members: (node name, node type), ordered node by node. flows: rings that share each NIC, or
        a mapping of node to the rings that share its NIC.
        """
        count = len(members)
        if count < 2 or num_bytes <= 0:
            return 0.0
        nodes = dict(members)
        volume = ring_bytes(count, num_bytes)
        # the size of a ring's messages, by which measured bandwidths differ
        chunk = num_bytes / count
        slowest = 0.0
        has_links_inside = len(nodes) < count
        if has_links_inside:
            kinds = dict.fromkeys(nodes.values())
            slowest = max(self.ring_link_s(kind, True, count, num_bytes) for kind in kinds)
        if len(nodes) > 1:
            rate = self._slowest_pair(nodes, chunk, flows)
            slowest = max(slowest, volume / (self._ring_efficiency(count) * rate))

        rounds = 2 * (count - 1)
        between_s = self._between_zones_s(list(nodes.values())) * rounds / count
        return slowest + rounds * self.latency(len(nodes) == 1) + between_s

    def _slowest_pair(
        self, nodes: Mapping[str, NodeType], chunk: float, flows: float | Mapping[str, float]
    ) -> float:
        """Return bytes per second between the two nodes of a ring that have the slowest link.

        Any two count, since the ring's order is not known here.
        """
        shared = flows if isinstance(flows, Mapping) else dict.fromkeys(nodes, flows)
        # nodes of one type with as many rings are equal: a ring of many nodes has few kinds of them
        ends = dict.fromkeys((kind, shared[name]) for name, kind in nodes.items())
        slowest = math.inf
        for one, other in itertools.combinations_with_replacement(ends, 2):
            kind, leaving = one
            other_kind, arriving = other
            rate = self.bandwidth(kind, other_kind, False, chunk, leaving, arriving)
            slowest = min(slowest, rate)
        return slowest

    def all_to_all_s(self, members: Sequence[Member], to_each: Sequence[float]) -> float:
        """Return seconds in which every member sends `to_each[i]` bytes to each member i.

        members: (node name, node type). Messages to the members of other nodes share the NICs. The
        way back, from each member i as many bytes to every member, takes as long.
        """
        count = len(members)
        nodes = dict(members)
        on_node = Counter(name for name, _ in members)
        slowest = 0.0
        for (name, kind), num_bytes in zip(members, to_each, strict=True):
            if not num_bytes:
                continue
            inside = (on_node[name] - 1) * num_bytes
            if inside:
                slowest = max(slowest, inside / self.bandwidth(kind, kind, True, num_bytes))

            arriving = on_node[name] * (count - on_node[name])
            for other, sender in nodes.items():
                if other == name:
                    continue
                leaving = on_node[other] * (count - on_node[other])
                rate = self.bandwidth(sender, kind, False, num_bytes, leaving, arriving)
                slowest = max(slowest, num_bytes / (self._ring_efficiency(count) * rate))

        between_s = self._between_zones_s([kind for _, kind in members]) / count
        latency_s = (count - 1) * self.latency(len(on_node) == 1)
        return slowest + latency_s + between_s

    def _between_zones_s(self, ring: Sequence[NodeType]) -> float:
        """Return the latency in seconds that hops between zones add to a trip around a ring."""
        if len({kind.zone for kind in ring}) < 2:
            return 0.0
        total_s = 0.0
        for i, kind in enumerate(ring):
            link = self.zone_link(kind, ring[i - 1])
            if link is not None:
                total_s += link.latency_s
        return total_s

    def ring_link_s(
        self, node_type: NodeType, same_node: bool, count: int, num_bytes: float
    ) -> float:
        """Return seconds for which a ring all-reduce of `count` members fills a link.

        The link is one inside a node if `same_node`, else a node's NIC. The limit of a single flow
        through a NIC is ignored.
        """
        volume = ring_bytes(count, num_bytes)
        if same_node:
            return volume / self.bandwidth(node_type, node_type, True, num_bytes / count)
        nic = node_type.inter_node_bytes_per_s * self.parameters.efficiency_inter
        return volume / (nic * self._ring_efficiency(count))

    def _ring_efficiency(self, count: int) -> float:
        """Return the share of a message's bandwidth that a ring of `count` members reaches.

        The ring runs between nodes. An all-to-all is taken to reach as much.
        """
        return self.parameters.all_reduce_efficiency if count > 2 else 1.0

    def all_gather_s(self, node_type: NodeType, count: int, num_bytes: float) -> float:
        """Return seconds of a ring all-gather of `num_bytes` in all over `count` GPUs of one node.

        Each GPU has its part.
        """
        if count < 2 or num_bytes <= 0:
            return 0.0
        part = num_bytes / count
        link = self.bandwidth(node_type, node_type, True, part)
        rate = min(link, self.parameters.gather_bytes_per_s)
        rounds = count - 1
        return rounds * part / rate + rounds * self.latency(True)


def ring_bytes(count: int, num_bytes: float) -> float:
    """Return bytes that a ring all-reduce over `count` members sends over each of its links."""
    return 2 * (count - 1) / count * num_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of slice `index` of `slices` from `source` to `target`; one slice is the whole."""

    source: str
    target: str
    index: int
    slices: int


# Executors ask for every microbatch; the planner remembers what it makes of them.
@lru_cache(maxsize=256)
def transfers_between(sender: Stage, receiver: Stage) -> tuple[Transfer, ...]:
    """Return the transfers between two stages: one for each rank of the receiver, in rank order.

    Gradients take the same transfers with the stages exchanged.
    """
    slices = receiver.tp_degree if _apart(sender, receiver) else 1
    transfers = []
    for rank, target in enumerate(receiver.workers):
        source = sender.workers[rank * sender.tp_degree // receiver.tp_degree]
        index = rank if slices > 1 else 0
        transfers.append(Transfer(source, target, index, slices))
    return tuple(transfers)


def _apart(sender: Stage, receiver: Stage) -> bool:
    """Return True if the receiver's group is on one node that hosts no worker of the sender."""
    nodes = {node_of(worker) for worker in receiver.workers}
    senders = {node_of(worker) for worker in sender.workers}
    return len(nodes) == 1 and nodes.isdisjoint(senders)
