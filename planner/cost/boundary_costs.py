"""What hidden states and their gradients take from stage to stage: links, slices, NICs that several pipelines share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from planner.cluster import Fleet, Node, NodeType
from planner.cost.communication import Links
from planner.cost.transfers import Transfer, transfers_between
from planner.plan import Pipeline, Plan, Stage


@dataclass(frozen=True, slots=True)
class _Crossing:
    """One direction of a boundary. hops: each sort of transfer once: sender's and receiver's node, slices; leaving, arriving: node ->
    hidden states that leave it and arrive there, as if whole."""

    hops: tuple[tuple[Node, Node, int], ...]
    leaving: tuple[tuple[str, float], ...]
    arriving: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class _Loads:
    """(node, boundary, whether forward) -> hidden states of all pipelines that leave the node, and that arrive there."""

    leaving: dict[tuple[str, int, bool], float] = field(default_factory=dict)
    arriving: dict[tuple[str, int, bool], float] = field(default_factory=dict)


_Seconds = tuple[list[float], list[float]]


class BoundaryCosts:
    """Boundaries on one fleet. message_bytes(microbatch size): of the hidden states, or of their gradient. sliced: whether they cross
    from node to node in slices (`planner.cost.transfers`), or whole to each rank."""

    def __init__(self, fleet: Fleet, links: Links, message_bytes: Callable[[int], float], sliced: bool) -> None:
        self.fleet, self.links, self.message_bytes, self.sliced = fleet, links, message_bytes, sliced
        self._crossings: dict[tuple[Stage, Stage], _Crossing] = {}
        self._seconds: dict[tuple[NodeType, NodeType, bool, int, int, float, float], float] = {}
        self._latest: dict[int, tuple[Pipeline, _Seconds]] = {}

    def hop_s(
        self, sender: NodeType, receiver: NodeType, microbatch: int, same_node: bool, slices: int, leaving: float,
        arriving: float,
    ) -> float:  # fmt: skip
        """Seconds of one transfer, with the gathering of slices after it; so many as large as this one leave the sender's NIC at the same
        time, and arrive at the receiver's."""
        key = (sender, receiver, same_node, microbatch, slices, leaving, arriving)
        known = self._seconds.get(key)
        if known is None:
            size = self.message_bytes(microbatch)
            known = self.links.message_s(sender, receiver, same_node, size / slices, leaving, arriving)
            known = self._seconds[key] = known + self.links.all_gather_s(receiver, slices, size)
        return known

    def of(self, plan: Plan, pipeline: Pipeline) -> _Seconds:
        """Seconds of a pipeline's boundaries, of hidden states and of gradients: the slowest transfer of each. Those of the latest plan are
        remembered: it is asked for with other microbatches in flight, which keep its stages."""
        latest = self._latest
        same = len(latest) == len(plan.pipelines) and all(
            id(p.stages) in latest and latest[id(p.stages)][0].microbatch_sequences == p.microbatch_sequences
            for p in plan.pipelines
        )
        if not same:
            loads = self._loads_of(plan)
            self._latest = {id(p.stages): (p, self._of(p, loads)) for p in plan.pipelines}
        return self._latest[id(pipeline.stages)][1]

    def _of(self, pipeline: Pipeline, loads: _Loads) -> _Seconds:
        size, forward, backward = pipeline.microbatch_sequences, list[float](), list[float]()
        for i, (a, b) in enumerate(zip(pipeline.stages, pipeline.stages[1:], strict=False)):
            forward.append(self._boundary_s(self._crossing(a, b), loads, i, True, size))
            backward.append(self._boundary_s(self._crossing(b, a), loads, i, False, size))
        return forward, backward

    def _boundary_s(self, crossing: _Crossing, loads: _Loads, index: int, forward: bool, size: int) -> float:
        slowest = 0.0
        for a, b, slices in crossing.hops:
            leaving = arriving = 1.0
            if a is not b:
                leaving = max(1.0, loads.leaving[a.name, index, forward] * slices)
                arriving = max(1.0, loads.arriving[b.name, index, forward] * slices)
            slowest = max(slowest, self.hop_s(a.node_type, b.node_type, size, a is b, slices, leaving, arriving))
        return slowest

    def _crossing(self, sender: Stage, receiver: Stage) -> _Crossing:
        known = self._crossings.get((sender, receiver))
        if known is None:
            known = self._crossings[sender, receiver] = self._new_crossing(transfers_between(sender, receiver))
        return known

    def _new_crossing(self, transfers: tuple[Transfer, ...]) -> _Crossing:
        hops = dict[tuple[str, str, int], tuple[Node, Node, int]]()
        leaving, arriving = dict[str, float](), dict[str, float]()
        for transfer in transfers:
            a, b = self.fleet.node_of(transfer.source), self.fleet.node_of(transfer.target)
            slices = transfer.slices if self.sliced else 1
            if a is not b:
                leaving[a.name] = leaving.get(a.name, 0.0) + 1 / slices
                arriving[b.name] = arriving.get(b.name, 0.0) + 1 / slices
            hops[a.name, b.name, slices] = a, b, slices
        return _Crossing(tuple(hops.values()), tuple(leaving.items()), tuple(arriving.items()))

    def _loads_of(self, plan: Plan) -> _Loads:
        """Of the same boundary of all pipelines: they run in step and share NICs."""
        loads = _Loads()
        for pipeline in plan.pipelines:
            for i, (a, b) in enumerate(zip(pipeline.stages, pipeline.stages[1:], strict=False)):
                for forward, crossing in ((True, self._crossing(a, b)), (False, self._crossing(b, a))):
                    for found, there in ((loads.leaving, crossing.leaving), (loads.arriving, crossing.arriving)):
                        for node, load in there:
                            found[node, i, forward] = found.get((node, i, forward), 0.0) + load
        return loads
