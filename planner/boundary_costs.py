"""What hidden states and their gradients take from stage to stage: links, slices, NICs that several pipelines share."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.cluster import Fleet, NodeType
from planner.communication import Links
from planner.plan import Pipeline, Plan, Stage
from planner.transfers import Transfer, transfers_between


@dataclass(frozen=True, slots=True)
class _Crossing:
    """One direction of a boundary. hops: each sort of transfer once: sender's and receiver's node type, the node that it leaves (None
    inside a node), slices; leaving: node -> hidden states that leave it, as if whole."""

    hops: tuple[tuple[NodeType, NodeType, str | None, int], ...]
    leaving: tuple[tuple[str, float], ...]


class BoundaryCosts:
    """Boundaries on one fleet. message_bytes(microbatch size): of the hidden states, or of their gradient. sliced: whether they cross
    from node to node in slices (`planner.transfers`), or whole to each rank."""

    def __init__(self, fleet: Fleet, links: Links, message_bytes: Callable[[int], float], sliced: bool) -> None:
        self.fleet, self.links, self.message_bytes, self.sliced = fleet, links, message_bytes, sliced
        self._crossings: dict[tuple[Stage, Stage], _Crossing] = {}
        self._seconds: dict[tuple[NodeType, NodeType, bool, int, int, float], float] = {}
        self._loads: tuple[Plan, dict[tuple[str, int, bool], float]] | None = None

    def hop_s(
        self, sender: NodeType, receiver: NodeType, microbatch: int, same_node: bool, slices: int, flows: float
    ) -> float:
        """Seconds of one transfer, with the gathering of slices after it; `flows` as large as this one share the NICs."""
        key = (sender, receiver, same_node, microbatch, slices, flows)
        known = self._seconds.get(key)
        if known is None:
            size = self.message_bytes(microbatch)
            known = self.links.message_s(sender, receiver, same_node, size / slices, flows)
            known = self._seconds[key] = known + self.links.all_gather_s(receiver, slices, size)
        return known

    def of(self, plan: Plan, pipeline: Pipeline) -> tuple[list[float], list[float]]:
        """Seconds of a pipeline's boundaries, of hidden states and of gradients: the slowest transfer of each."""
        loads, size = self._loads_of(plan), pipeline.microbatch_sequences
        forward, backward = [], []
        for i, (a, b) in enumerate(zip(pipeline.stages, pipeline.stages[1:], strict=False)):
            forward.append(self._boundary_s(self._crossing(a, b), loads, i, True, size))
            backward.append(self._boundary_s(self._crossing(b, a), loads, i, False, size))
        return forward, backward

    def _boundary_s(
        self, crossing: _Crossing, loads: dict[tuple[str, int, bool], float], index: int, forward: bool, size: int
    ) -> float:
        slowest = 0.0
        for sender, receiver, node, slices in crossing.hops:
            flows = 1.0 if node is None else max(1.0, loads[node, index, forward] * slices)
            slowest = max(slowest, self.hop_s(sender, receiver, size, node is None, slices, flows))
        return slowest

    def _crossing(self, sender: Stage, receiver: Stage) -> _Crossing:
        known = self._crossings.get((sender, receiver))
        if known is None:
            known = self._crossings[sender, receiver] = self._new_crossing(transfers_between(sender, receiver))
        return known

    def _new_crossing(self, transfers: tuple[Transfer, ...]) -> _Crossing:
        hops, leaving = [], dict[str, float]()
        for transfer in transfers:
            a, b = self.fleet.node_of(transfer.source), self.fleet.node_of(transfer.target)
            slices = transfer.slices if self.sliced else 1
            if a is not b:
                leaving[a.name] = leaving.get(a.name, 0.0) + 1 / slices
            hops.append((a.node_type, b.node_type, None if a is b else a.name, slices))
        return _Crossing(tuple(dict.fromkeys(hops)), tuple(leaving.items()))

    def _loads_of(self, plan: Plan) -> dict[tuple[str, int, bool], float]:
        """What leaves each node over the same boundary of all pipelines: they run in step and share its NIC."""
        if self._loads is not None and self._loads[0] is plan:
            return self._loads[1]
        found: dict[tuple[str, int, bool], float] = {}
        for pipeline in plan.pipelines:
            for i, (a, b) in enumerate(zip(pipeline.stages, pipeline.stages[1:], strict=False)):
                for forward, crossing in ((True, self._crossing(a, b)), (False, self._crossing(b, a))):
                    for node, load in crossing.leaving:
                        found[node, i, forward] = found.get((node, i, forward), 0.0) + load
        self._loads = (plan, found)
        return found
