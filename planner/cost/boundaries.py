"""Seconds that hidden states and their gradients take between stages.

Transfers run on links, in slices, and through NICs that several transfers share.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Fleet, Node, NodeType
from planner.cost.links import Links, transfers_between
from planner.cost.stage_formats import StageFormats
from planner.plan import Pipeline, Plan, Stage

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PARTS = 64  # of a flow: plans that differ little share what was computed of others
_REMEMBERED = 8192  # pipelines, hops
_REST = attrgetter(*(each.name for each in fields(Stage) if each.name != "workers"))


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

    def shared(self, nodes: int) -> Floats:
        """Hidden states that share the card while each transfer uses it, its own among them."""
        key = self.node + nodes * self.boundary
        all_flows, all_busy = (
            np.bincount(self.node, each, nodes) for each in (self.flows, self.busy)
        )
        together, theirs = (np.bincount(key, each) for each in (self.flows, self.busy))
        others = all_busy[self.node] - theirs[key] - (self.stage_busy - self.busy)
        shared = np.minimum(all_flows[self.node], together[key] / np.maximum(1.0 - others, 1e-9))
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
        sent = self.sender / np.maximum(1.0, leaving[self.leaving] * self.slices)
        taken = self.receiver / np.maximum(1.0, arriving[self.arriving] * self.slices)
        return np.asarray(
            self.alone_s + self.num_bytes / np.minimum(self.flow, np.minimum(sent, taken))
        )


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

    def on(self, numbers: Sequence[int]) -> "_Way":
        """Return the way where each node of the uses has the number that `numbers` gives it."""
        of = np.array(numbers, dtype=np.int64)
        leaving = replace(self.leaving, node=of[self.leaving.node])
        arriving = replace(self.arriving, node=of[self.arriving.node])
        return _Way(leaving, arriving, self.hops, self.entry, self.least_s)


WaysByLikeness = dict[Hashable, _Way]
"""Boundaries of pipelines whose nodes are numbered in the order of their first use, by all that
they depend on: the same on any fleet.
"""
_Seconds = tuple[tuple[float, ...], tuple[float, ...]]


class BoundaryCosts:
    """Seconds of stage boundaries on one fleet.

    formats: bytes of the hidden states, or of their gradient, between stages. work_s(pipeline):
    seconds that its slowest stage works for a microbatch. sliced: hidden states cross from node to
    node in slices (`transfers_between`), else whole to each rank.

    The same boundaries of all pipelines are crossed at the same time and share a NIC evenly.
    Transfers at other boundaries meet them for the share of the time that they use that NIC:
    processor sharing, alone / (1 - share) (Kleinrock 1967), at worst all at once. The transfers
    that one stage sends follow each other, and so do those that it receives (measured:
    scripts/benchmarks/pipeline_transfers.py).

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
        self._hop_s: dict[tuple[NodeType, NodeType, bool, float, int, NicFlows], float] = {}
        self._latest: tuple[tuple[tuple[int, int], ...], Plan, dict[int, _Seconds]] | None = None

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
        slices = tp_degree if self.sliced and not same_node else 1
        each = 0.0 if same_node else float(tp_degree)
        formats = (self.formats.of_type(kind.gpu_type) for kind in (sender, receiver))
        num_bytes = self.formats.border_bytes(microbatch, *formats)
        transfers = NicFlows(max(1.0, flows.leaving * each), max(1.0, flows.arriving * each))
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
            seconds = self.links.message_s(sender, receiver, same_node, num_bytes / slices, *flows)
            self._hop_s[key] = seconds + self.links.all_gather_s(receiver, slices, num_bytes)
            _forget(self._hop_s)
        return self._hop_s[key]

    def of(self, plan: Plan, pipeline: Pipeline) -> _Seconds:
        """Return seconds of hidden states and of gradients at each boundary of `pipeline`.

        Each is the slowest transfer of its boundary. The seconds of the latest plan are cached,
        since callers ask for the same stages again with other microbatches in flight.
        """
        key = tuple((id(p.stages), p.microbatch_sequences) for p in plan.pipelines)
        if self._latest is None or self._latest[0] != key:
            self._latest = (
                key,
                plan,
                self._of(plan),
            )  # the plan is kept, so that no other has the same ids
        return self._latest[2][id(pipeline.stages)]

    def _of(self, plan: Plan) -> dict[int, _Seconds]:
        ways = [self._way(pipeline) for pipeline in plan.pipelines]
        nodes = len(self._number)
        leaving = _joined([way.leaving for way in ways])
        arriving = _joined([way.arriving for way in ways])
        seconds = _joined(_numbered(ways)).seconds(leaving.shared(nodes), arriving.shared(nodes))
        found = dict[int, _Seconds]()
        begin = 0
        for pipeline, way in zip(plan.pipelines, ways, strict=True):
            slowest = way.least_s.copy()
            end = begin + len(way.entry)
            np.maximum.at(slowest, way.entry, seconds[begin:end])
            each = slowest.tolist()
            begin = end
            found[id(pipeline.stages)] = tuple(each[::2]), tuple(each[1::2])
        return found

    def _way(self, pipeline: Pipeline) -> _Way:
        key = id(pipeline.stages), pipeline.microbatch_sequences
        known = self._ways.get(key)
        if known is None:
            # the stages are kept, so that no others have the same id
            known = self._ways[key] = pipeline.stages, self._new_way(pipeline)
            _forget(self._ways)
        return known[1]

    def _new_way(self, pipeline: Pipeline) -> _Way:
        """Return the boundaries of a pipeline.

        Pipelines that are equal but for the names of equal nodes share what is computed.
        """
        numbers: dict[int, int] = {}
        stages: list[Hashable] = []
        for stage in pipeline.stages:
            places = [self._number[self.fleet.node_of(worker).name] for worker in stage.workers]
            mine = tuple(numbers.setdefault(place, len(numbers)) for place in places)
            stages.append((mine, _REST(stage)))
        nodes = [self.fleet.nodes[number] for number in numbers]
        kinds = tuple(node.node_type for node in nodes)
        key = pipeline.microbatch_sequences, kinds, tuple(stages)
        way = self._alike.get(key)
        if way is None:
            way = self._alike[key] = self._way_on(pipeline, nodes)
            _forget(self._alike)
        return way.on(list(numbers))

    def _way_on(self, pipeline: Pipeline, nodes: Sequence[Node]) -> _Way:
        """Return the boundaries of a pipeline on these nodes, numbered in this order."""
        kinds = [node.node_type for node in nodes]
        rows = self._rows(pipeline.stages, nodes)
        sizes = self._border_bytes(pipeline)
        least_s = np.zeros(2 * (len(pipeline.stages) - 1))
        for at, _, _, one, other, parts in rows:
            if one == other:
                hop_s = self.hop_s(kinds[one], kinds[one], sizes[at], True, parts)
                least_s[at] = max(least_s[at], hop_s)
        across = {row: count for row, count in rows.items() if row[3] != row[4]}
        table = np.array(list(across), dtype=np.int64).reshape(-1, 6)
        entry, sending, taking, sender, receiver, slices = table.T
        flows = np.array(list(across.values())) / np.maximum(slices, 1)
        period = max(self.work_s(pipeline), 1e-30)
        bytes_per_s = np.array(sizes)[entry] / period
        efficiency = self.links.parameters.efficiency_inter
        nics = np.array([kind.inter_node_bytes_per_s * efficiency for kind in kinds])
        leaving, out = _uses(entry, sending, sender, flows, bytes_per_s, nics)
        arriving, into = _uses(entry, taking, receiver, flows, bytes_per_s, nics)
        hops = [
            self._hop(kinds[one], kinds[other], sizes[at], parts)
            for at, _, _, one, other, parts in across
        ]
        alone, num_bytes, flow, fast_out, fast_in = np.array(hops).reshape(-1, 5).T
        return _Way(
            leaving,
            arriving,
            _Hops(out, into, alone, num_bytes, slices.astype(float), flow, fast_out, fast_in),
            entry,
            least_s,
        )

    def _border_bytes(self, pipeline: Pipeline) -> list[float]:
        """Return bytes of hidden states at each entry (twice the boundary, plus one for back)."""
        found = list[float]()
        formats = [self.formats.of(stage) for stage in pipeline.stages]
        for one, other in itertools.pairwise(formats):
            size = self.formats.border_bytes(pipeline.microbatch_sequences, one, other)
            found += [size, size]
        return found

    def _rows(
        self, stages: Sequence[Stage], nodes: Sequence[Node]
    ) -> Counter[tuple[int, int, int, int, int, int]]:
        """Count the pipeline's transfers by their endpoints.

        Key: (entry, sending stage, receiving stage, number of the sender's node, number of the
        receiver's node, slices).
        """
        found = Counter[tuple[int, int, int, int, int, int]]()
        number_of = {node.name: number for number, node in enumerate(nodes)}
        for i, (a, b) in enumerate(itertools.pairwise(stages)):
            for entry, sending, taking, sender, receiver in (
                (2 * i, i, i + 1, a, b),
                (2 * i + 1, i + 1, i, b, a),
            ):
                for each in transfers_between(sender, receiver):
                    one, other = (
                        number_of[self.fleet.node_of(name).name]
                        for name in (each.source, each.target)
                    )
                    found[
                        entry, sending, taking, one, other, each.slices if self.sliced else 1
                    ] += 1
        return found

    def _hop(
        self, sender: NodeType, receiver: NodeType, whole: float, slices: int
    ) -> tuple[float, float, float, float, float]:
        gather_s = self.links.all_gather_s(receiver, slices, whole)
        alone_s = self.links.hop_latency(sender, receiver) + gather_s
        flow = self.links.one_flow(sender, receiver, whole / slices)
        efficiency = self.links.parameters.efficiency_inter
        return (
            alone_s,
            whole / slices,
            math.inf if flow is None else flow,
            sender.inter_node_bytes_per_s * efficiency,
            receiver.inter_node_bytes_per_s * efficiency,
        )


def _uses(
    entry: Ints, stage: Ints, node: Ints, flows: Floats, bytes_per_s: Floats, nics: Floats
) -> tuple[_Uses, Ints]:
    """Return the use of NICs by these hops at one end, and the entry of each hop in it.

    bytes_per_s: bytes a second of one flow of each hop, averaged over all the time. nics: bytes a
    second of each node's NIC.
    """
    key, first, use = np.unique(entry * len(nics) + node, return_index=True, return_inverse=True)
    node = node[first]
    flows = np.bincount(use, flows, len(key)).astype(np.float64)
    busy = np.minimum(1.0, flows * bytes_per_s[first] / nics[node])
    _, same = np.unique(stage[first] * len(nics) + node, return_inverse=True)
    theirs = np.bincount(same, busy, len(key)).astype(np.float64)
    return _Uses(node, entry[first], flows, busy, theirs[same]), np.asarray(use, dtype=np.int64)


def _numbered(ways: Sequence[_Way]) -> list[_Hops]:
    """Return the hops of each way, with their uses renumbered among those of all ways."""
    found = list[_Hops]()
    leaving = 0
    arriving = 0
    for way in ways:
        found.append(
            replace(
                way.hops, leaving=way.hops.leaving + leaving, arriving=way.hops.arriving + arriving
            )
        )
        leaving = leaving + len(way.leaving.node)
        arriving = arriving + len(way.arriving.node)
    return found


_Arrays = TypeVar("_Arrays", _Uses, _Hops)


def _joined(parts: Sequence[_Arrays]) -> _Arrays:
    """Concatenate the parts field by field."""
    kind = type(parts[0])
    arrays = []
    for each in fields(kind):
        arrays.append(np.concatenate([getattr(part, each.name) for part in parts]))
    return kind(*arrays)


def _forget(known: dict[Any, Any]) -> None:
    """Evict the oldest entries beyond `_REMEMBERED`."""
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
