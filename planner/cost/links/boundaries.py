"""Seconds that hidden states and their gradients take between stages.

Transfers run on links, in slices, and through NICs that several transfers share.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeVar

import numpy as np

from planner.arrays import Floats, Ints
from planner.cost.eviction import evict_oldest
from planner.cost.links.traffic import Links, transfers_between
from planner.cost.memory.stage_terms import traits_of
from planner.cost.stage_formats import StageFormats
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.plan import Pipeline, Plan, Stage

_PARTS = 64  # of a flow: plans that differ little share what was computed of others
_REMEMBERED = 8192  # pipelines, hops


class NicFlows(NamedTuple):
    """Transfers at one time that leave the sender's NIC, and arrive at the receiver's NIC."""

    leaving: float = 1.0
    arriving: float = 1.0


ALONE = NicFlows()


@dataclass(frozen=True, slots=True)
class _Uses:
    """Use of NICs by the transfers of one pipeline, or of all pipelines.

    Arrays, one entry for each pair of boundary and NIC. node: the NIC's node; boundary: twice the
    boundary's number, plus one for gradients (the way back); flows: hidden states at a time; busy:
    share of the time for which they fill the NIC; stage_busy: the same share of all that this stage
    sends, or receives, through the NIC, since these transfers follow each other.
    """

    node: Ints
    boundary: Ints
    flows: Floats
    busy: Floats
    stage_busy: Floats

    def flows_sharing(self, nodes: int) -> Floats:
        """Hidden states that share the card while each transfer uses it, its own among them."""
        key = self.node + nodes * self.boundary
        all_flows = np.bincount(self.node, self.flows, nodes)
        all_busy = np.bincount(self.node, self.busy, nodes)
        flows_at_boundary = np.bincount(key, self.flows)
        busy_at_boundary = np.bincount(key, self.busy)

        # Transfers at the same boundary share the NIC all the time. So they are no part of the time
        # that others take, and neither is what the own stage sends before and after.
        own_stage_elsewhere = self.stage_busy - self.busy
        others = all_busy[self.node] - busy_at_boundary[key] - own_stage_elsewhere
        free = np.maximum(1.0 - others, 1e-9)
        shared = np.minimum(all_flows[self.node], flows_at_boundary[key] / free)
        # the subtrahend keeps a whole number whole that rounding errors have lifted a little
        return np.asarray(np.ceil(shared * _PARTS - 1e-6) / _PARTS)


@dataclass(frozen=True, slots=True)
class _Hops:
    """Transfers between two nodes each, of one pipeline or of all pipelines.

    leaving, arriving: entries of the uses; alone_s: seconds that do not depend on them; num_bytes:
    bytes of a slice; slices: slices of the hidden states; flow, sender, receiver: bytes a second
    that the links allow one flow, the sender's NIC and the receiver's NIC.
    """

    leaving: Ints
    arriving: Ints
    alone_s: Floats
    num_bytes: Floats
    slices: Floats
    flow: Floats
    sender: Floats
    receiver: Floats

    def seconds(self, leaving: Floats, arriving: Floats) -> Floats:
        """Return the seconds of each transfer.

        leaving, arriving: for each entry of the uses, hidden states that share the NIC.
        """
        leaving_flows = leaving[self.leaving] * self.slices
        arriving_flows = arriving[self.arriving] * self.slices
        sent = self.sender / np.maximum(1.0, leaving_flows)
        taken = self.receiver / np.maximum(1.0, arriving_flows)
        bytes_per_s = np.minimum(self.flow, np.minimum(sent, taken))
        return np.asarray(self.alone_s + self.num_bytes / bytes_per_s)


@dataclass(frozen=True, slots=True)
class _Way:
    """Boundaries of one pipeline.

    hops: transfers between nodes; entry: boundary of each hop (twice its number, plus one for the
    way back); least_s: for each entry, the slowest transfer inside a node.
    """

    leaving: _Uses
    arriving: _Uses
    hops: _Hops
    entry: Ints
    least_s: Floats

    def with_nodes(self, numbers: Sequence[int]) -> "_Way":
        """Return the way where each node of the uses has the number that `numbers` gives it."""
        number_of = np.array(numbers, dtype=np.int64)
        leaving = replace(self.leaving, node=number_of[self.leaving.node])
        arriving = replace(self.arriving, node=number_of[self.arriving.node])
        return _Way(leaving, arriving, self.hops, self.entry, self.least_s)


class _Row(NamedTuple):
    """Transfers of one pipeline with equal endpoints.

    entry: twice the boundary's number, plus one for the way back. sending, taking: stages. sender,
    receiver: numbers of nodes. slices: slices of the hidden states.
    """

    entry: int
    sending: int
    taking: int
    sender: int
    receiver: int
    slices: int


WaysByLikeness = dict[Hashable, _Way]
"""Boundaries of pipelines whose nodes are numbered in the order of their first use, by all that
they depend on: the same on any fleet.
"""
_Seconds = tuple[tuple[float, ...], tuple[float, ...]]
_SecondsByStages = dict[int, _Seconds]
_PlanKey = tuple[tuple[int, int], ...]
_HopKey = tuple[NodeType, NodeType, bool, float, int, NicFlows]


class BoundaryCosts:
    """Seconds of stage boundaries on one fleet.

    formats: bytes of the hidden states, or of their gradient, between stages. work_s(pipeline):
    seconds that its slowest stage works for a microbatch. sliced: hidden states cross from node to
    node in slices (`transfers_between`), else whole to each rank.

    The same boundaries of all pipelines are crossed at the same time and share a NIC evenly.
    Transfers at other boundaries meet them for the share of the time that they use that NIC:
    processor sharing, alone / (1 - share) (Kleinrock 1967), at worst all at once. The transfers
    that one stage sends follow each other, and so do those that it receives (measured:
    scripts/benchmarks/step/pipeline_transfers.py).

    known: cache of ways, which may be shared by fleets.
    """

    def __init__(
        self,
        fleet: Fleet,
        links: Links,
        formats: StageFormats,
        work_s: Callable[[Pipeline], float],
        sliced: bool,
        known: WaysByLikeness | None = None,
    ) -> None:
        self.fleet = fleet
        self.links = links
        self.formats = formats
        self.work_s = work_s
        self.sliced = sliced
        self._number = {node.name: i for i, node in enumerate(fleet.nodes)}
        self._ways: dict[tuple[int, int], tuple[tuple[Stage, ...], _Way]] = {}
        self._alike: WaysByLikeness = {} if known is None else known
        self._hop_s: dict[_HopKey, float] = {}
        self._latest: tuple[_PlanKey, Plan, _SecondsByStages] | None = None

    def between_s(
        self,
        sender: NodeType,
        receiver: NodeType,
        microbatch: int,
        *,
        same_node: bool = False,
        tp_degree: int = 1,
        flows: NicFlows = ALONE,
    ) -> float:
        """Return seconds of one microbatch's transfer between two stages, in one direction.

        The receiver is a group of `tp_degree` GPUs of one node. flows: such groups for which
        transfers leave the sender's node, and arrive at the receiver's node.
        """
        if same_node:
            transfers = ALONE
        else:
            leaving = max(1.0, flows.leaving * tp_degree)
            arriving = max(1.0, flows.arriving * tp_degree)
            transfers = NicFlows(leaving, arriving)

        slices = tp_degree if self.sliced and not same_node else 1
        sent_in = self.formats.of_type(sender.gpu_type)
        taken_in = self.formats.of_type(receiver.gpu_type)
        num_bytes = self.formats.border_bytes(microbatch, sent_in, taken_in)
        return self.hop_s(sender, receiver, num_bytes, same_node, slices, transfers)

    def hop_s(
        self,
        sender: NodeType,
        receiver: NodeType,
        num_bytes: float,
        same_node: bool,
        slices: int,
        flows: NicFlows = ALONE,
    ) -> float:
        """Return seconds of one transfer, with the gathering of slices after it.

        num_bytes: all slices together. flows: transfers of this size at the same time.
        """
        key = (sender, receiver, same_node, num_bytes, slices, flows)
        if key not in self._hop_s:
            slice_bytes = num_bytes / slices
            message_s = self.links.message_s(sender, receiver, same_node, slice_bytes, *flows)
            gather_s = self.links.all_gather_s(receiver, slices, num_bytes)
            self._hop_s[key] = message_s + gather_s
            evict_oldest(self._hop_s, _REMEMBERED)
        return self._hop_s[key]

    def of(self, plan: Plan, pipeline: Pipeline) -> _Seconds:
        """Return seconds of hidden states and of gradients at each boundary of `pipeline`.

        Each is the slowest transfer of its boundary. The seconds of the latest plan are cached,
        since callers ask for the same stages again with other microbatches in flight.
        """
        key = tuple((id(p.stages), p.microbatch_sequences) for p in plan.pipelines)
        if self._latest is None or self._latest[0] != key:
            # the plan is kept, so that no other has the same ids
            self._latest = key, plan, self._seconds_by_stages(plan)
        _, _, seconds_by_stages = self._latest
        return seconds_by_stages[id(pipeline.stages)]

    def _seconds_by_stages(self, plan: Plan) -> _SecondsByStages:
        """Return the seconds of each pipeline by the identity of its stages."""
        ways = [self._way(pipeline) for pipeline in plan.pipelines]
        nodes = len(self._number)
        leaving = _join([way.leaving for way in ways])
        arriving = _join([way.arriving for way in ways])
        hops = _join(_renumber_hops(ways))
        seconds = hops.seconds(leaving.flows_sharing(nodes), arriving.flows_sharing(nodes))

        found: _SecondsByStages = {}
        begin = 0
        for pipeline, way in zip(plan.pipelines, ways, strict=True):
            end = begin + len(way.entry)
            slowest = way.least_s.copy()
            np.maximum.at(slowest, way.entry, seconds[begin:end])
            begin = end

            by_entry = slowest.tolist()
            hidden_states_s = tuple(by_entry[::2])
            gradients_s = tuple(by_entry[1::2])
            found[id(pipeline.stages)] = hidden_states_s, gradients_s
        return found

    def _way(self, pipeline: Pipeline) -> _Way:
        key = id(pipeline.stages), pipeline.microbatch_sequences
        known = self._ways.get(key)
        if known is None:
            # the stages are kept, so that no others have the same id
            known = self._ways[key] = pipeline.stages, self._new_way(pipeline)
            evict_oldest(self._ways, _REMEMBERED)
        return known[1]

    def _new_way(self, pipeline: Pipeline) -> _Way:
        """Return the boundaries of a pipeline.

        Pipelines that are equal but for the names of equal nodes share what is computed.
        """
        numbers: dict[int, int] = {}  # in the order of first use, by the node's number in the fleet
        stages: list[Hashable] = []
        for stage in pipeline.stages:
            places = []
            for worker in stage.workers:
                number = self._number[self.fleet.node_of(worker).name]
                places.append(numbers.setdefault(number, len(numbers)))
            stages.append((tuple(places), traits_of(stage)))

        nodes = [self.fleet.nodes[number] for number in numbers]
        kinds = tuple(node.node_type for node in nodes)
        key = pipeline.microbatch_sequences, kinds, tuple(stages)
        way = self._alike.get(key)
        if way is None:
            way = self._alike[key] = self._way_on(pipeline, nodes)
            evict_oldest(self._alike, _REMEMBERED)
        return way.with_nodes(list(numbers))

    def _way_on(self, pipeline: Pipeline, nodes: Sequence[Node]) -> _Way:
        """Return the boundaries of a pipeline on these nodes, numbered in this order."""
        kinds = [node.node_type for node in nodes]
        sizes = self._border_bytes(pipeline)
        least_s = np.zeros(2 * (len(pipeline.stages) - 1))
        counts = dict[_Row, int]()
        hops = []
        for row, count in self._rows(pipeline.stages, nodes).items():
            sender = kinds[row.sender]
            size = sizes[row.entry]
            # transfers inside a node share nothing, so their seconds are known here
            if row.sender == row.receiver:
                hop_s = self.hop_s(sender, sender, size, True, row.slices)
                least_s[row.entry] = max(least_s[row.entry], hop_s)
            else:
                receiver = kinds[row.receiver]
                counts[row] = count
                hops.append(self._hop(sender, receiver, size, row.slices))

        # the shapes also hold if all transfers are inside nodes
        table = np.array(list(counts), dtype=np.int64).reshape(-1, len(_Row._fields))
        entry, sending, taking, sending_node, taking_node, slices = table.T
        # slices of one transfer are one flow of hidden states
        flows = np.array(list(counts.values())) / np.maximum(slices, 1)
        period_s = max(self.work_s(pipeline), 1e-30)
        bytes_per_s = np.array(sizes)[entry] / period_s
        efficiency = self.links.parameters.efficiency_inter
        nics = np.array([kind.inter_node_bytes_per_s * efficiency for kind in kinds])
        leaving, leaving_use = _uses(entry, sending, sending_node, flows, bytes_per_s, nics)
        arriving, arriving_use = _uses(entry, taking, taking_node, flows, bytes_per_s, nics)

        alone_s, num_bytes, flow, sender_nic, receiver_nic = np.array(hops).reshape(-1, 5).T
        return _Way(
            leaving=leaving,
            arriving=arriving,
            hops=_Hops(
                leaving=leaving_use,
                arriving=arriving_use,
                alone_s=alone_s,
                num_bytes=num_bytes,
                slices=slices.astype(float),
                flow=flow,
                sender=sender_nic,
                receiver=receiver_nic,
            ),
            entry=entry,
            least_s=least_s,
        )

    def _border_bytes(self, pipeline: Pipeline) -> list[float]:
        """Return bytes of hidden states at each entry (twice the boundary, plus one for back)."""
        found = list[float]()
        formats = [self.formats.of(stage) for stage in pipeline.stages]
        for one, other in itertools.pairwise(formats):
            size = self.formats.border_bytes(pipeline.microbatch_sequences, one, other)
            found += [size, size]
        return found

    def _rows(self, stages: Sequence[Stage], nodes: Sequence[Node]) -> Counter[_Row]:
        """Count the pipeline's transfers by their endpoints."""
        found = Counter[_Row]()
        number_of = {node.name: number for number, node in enumerate(nodes)}
        for boundary in range(len(stages) - 1):
            there = (2 * boundary, boundary, boundary + 1)
            back = (2 * boundary + 1, boundary + 1, boundary)
            for entry, sending, taking in (there, back):
                for transfer in transfers_between(stages[sending], stages[taking]):
                    sender = number_of[self.fleet.node_of(transfer.source).name]
                    receiver = number_of[self.fleet.node_of(transfer.target).name]
                    slices = transfer.slices if self.sliced else 1
                    found[_Row(entry, sending, taking, sender, receiver, slices)] += 1
        return found

    def _hop(
        self, sender: NodeType, receiver: NodeType, whole: float, slices: int
    ) -> tuple[float, float, float, float, float]:
        """Return seconds, bytes and rates of a transfer between nodes, as in `_Hops`.

        whole: bytes of all slices together.
        """
        gather_s = self.links.all_gather_s(receiver, slices, whole)
        alone_s = self.links.hop_latency(sender, receiver) + gather_s
        num_bytes = whole / slices
        flow = self.links.one_flow(sender, receiver, num_bytes)
        if flow is None:
            flow = math.inf
        efficiency = self.links.parameters.efficiency_inter
        sender_nic = sender.inter_node_bytes_per_s * efficiency
        receiver_nic = receiver.inter_node_bytes_per_s * efficiency
        return alone_s, num_bytes, flow, sender_nic, receiver_nic


def _uses(
    entry: Ints, stage: Ints, node: Ints, flows: Floats, bytes_per_s: Floats, nics: Floats
) -> tuple[_Uses, Ints]:
    """Return the use of NICs by these hops at one end, and the entry of each hop in it.

    bytes_per_s: bytes a second of one flow of each hop, averaged over all the time. nics: bytes a
    second of each node's NIC.
    """
    nodes = len(nics)
    key, first, use = np.unique(entry * nodes + node, return_index=True, return_inverse=True)
    node = node[first]
    flows = np.bincount(use, flows, len(key)).astype(np.float64)
    busy = np.minimum(1.0, flows * bytes_per_s[first] / nics[node])

    _, same_stage = np.unique(stage[first] * nodes + node, return_inverse=True)
    stage_busy = np.bincount(same_stage, busy, len(key)).astype(np.float64)
    uses = _Uses(node, entry[first], flows, busy, stage_busy[same_stage])
    return uses, np.asarray(use, dtype=np.int64)


def _renumber_hops(ways: Sequence[_Way]) -> list[_Hops]:
    """Return the hops of each way, with their uses renumbered among those of all ways."""
    found = list[_Hops]()
    leaving = 0
    arriving = 0
    for way in ways:
        hops = way.hops
        found.append(
            replace(hops, leaving=hops.leaving + leaving, arriving=hops.arriving + arriving)
        )
        leaving += len(way.leaving.node)
        arriving += len(way.arriving.node)
    return found


_Arrays = TypeVar("_Arrays", _Uses, _Hops)


def _join(parts: Sequence[_Arrays]) -> _Arrays:
    """Concatenate the parts field by field."""
    kind = type(parts[0])
    arrays = []
    for each in fields(kind):
        columns = [getattr(part, each.name) for part in parts]
        arrays.append(np.concatenate(columns))
    return kind(*arrays)
