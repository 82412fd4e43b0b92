"""Training state that the runtime keeps in a node's host memory, and the room for it.

With S the masters and moments of a node's workers (12 bytes a parameter) and M its host memory:
state that leaves devices in a change of plans is S of the workers whose device has no room for 2 S
and the messages in flight, and must fit in 0.9 M. Snapshots take 2 S, copies of what other nodes
alone hold three rounds of it. Both lie in a memory file system of half of M; recovery keeps what
fits there. Not counted: processes (the 0.1), the page cache, reads, pinned memory.

`recovery.local.memory_budget` divides a node's host memory when a generation begins. This module
applies the same rules to a plan before anything is started; a test compares the two
(tests/runtime/test_host_memory_prediction.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.cost.memory.stage_terms import sharing_of
from planner.cost.memory.training_bytes import optimizer_bytes_each
from planner.inputs.cluster import GIB
from planner.inputs.fleet import Fleet, NodeType, node_of
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Plan, Stage
from planner.plans.redundancy import (
    EMBEDDING,
    HEAD,
    holders_by_shard,
    layer_named,
    stages_with_layers,
)

SNAPSHOT_FILES = 2
"""Snapshot files of each worker: a snapshot overwrites the older one (`memory_budget.FILES`)."""
COPY_ROUNDS = 3
"""Steps whose copies of other nodes' state may be kept at once (`memory_budget.ROUNDS`)."""
USABLE = 0.9
"""Usable share of the machine's memory and of the memory file system.

Same as `memory_budget.USABLE`: processes need the rest.
"""
MEMORY_FILE_SYSTEM = 0.5
"""Share of the machine's memory in the memory file system.

Linux gives a tmpfs this size if its mount names none. In a container it may be less; the runtime
reads the real size.
"""
IN_FLIGHT_BYTES = 128 * 2**20
"""Bytes of a restore's messages on a device at once (`recovery.transfer.exchange.IN_FLIGHT_BYTES`).
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """Snapshots and copies that a job keeps in host memory.

    snapshots: of its workers' state; copies: of state that one node alone holds, made from those
    snapshots and kept on other nodes.
    """

    snapshots: bool = True
    copies: bool = True


ALL_KEPT = Kept()


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one node's host memory.

    host_bytes: all of it. state_bytes: masters and moments of the node's workers. sole_bytes: the
    part of state_bytes that no other node holds. copies_bytes: copies that other nodes may want to
    keep here. staged_bytes: state of workers whose device has no room for two such states, which a
    change of plans moves to host memory. offloaded_bytes: masters and moments that stay there as
    long as the plan does.
    """

    node: str
    node_type: str
    host_bytes: int
    state_bytes: float
    sole_bytes: float
    copies_bytes: float
    staged_bytes: float
    kept: Kept = ALL_KEPT
    offloaded_bytes: float = 0.0

    @property
    def usable_bytes(self) -> float:
        return USABLE * self.host_bytes

    @property
    def room_bytes(self) -> float:
        """Bytes of room for snapshots and copies."""
        free = max(0.0, self.usable_bytes - self.offloaded_bytes)
        return min(MEMORY_FILE_SYSTEM * self.usable_bytes, free)

    @property
    def filled_bytes(self) -> float:
        """Bytes of the snapshots and copies that the room holds."""
        return min(self.wanted_bytes, self.room_bytes)

    @property
    def snapshot_bytes(self) -> float:
        """Bytes of snapshots of all state that the node's workers hold."""
        return SNAPSHOT_FILES * self.state_bytes if self.kept.snapshots else 0.0

    @property
    def sole_snapshot_bytes(self) -> float:
        """Bytes of snapshots of the state that no other node holds."""
        return SNAPSHOT_FILES * self.sole_bytes if self.kept.snapshots else 0.0

    @property
    def wanted_bytes(self) -> float:
        """Bytes of snapshots of everything, and of copies."""
        return self.snapshot_bytes + self.copies_bytes

    @property
    def suffices(self) -> bool:
        """True if the room holds all snapshots and copies, so recovery leaves nothing out."""
        return self.wanted_bytes <= self.room_bytes

    @property
    def can_stage(self) -> bool:
        """True if the state that leaves the devices fits beside the kept snapshots and copies."""
        moved = self.staged_bytes + self.offloaded_bytes
        return moved + self.filled_bytes <= self.usable_bytes

    @property
    def worst_bytes(self) -> float:
        """Bytes in the worst case of a change of plans.

        The change aborts after all new state has arrived, and no snapshot of the step exists. Host
        memory then holds the old state and the new state, which is assumed to be as large.
        """
        moved = 2 * self.staged_bytes + self.offloaded_bytes
        return self.filled_bytes + moved

    def sentence(self) -> str | None:
        """Return a sentence on what is left out, why, and what helps; None if all is kept."""
        if self.suffices and self.can_stage:
            return None
        said = []
        if not self.suffices:
            said.append(self._left_out())
        if not self.can_stage:
            said.append(self._staged_beside())
        # enough for the memory file system, and for all of it at once
        together = self.staged_bytes + self.offloaded_bytes + self.wanted_bytes
        more = max(self.wanted_bytes / MEMORY_FILE_SYSTEM, together) / USABLE
        return (
            f"Host memory of {self.node} ({_gib(self.host_bytes)}): {'; '.join(said)}. With"
            f" {_gib(more)} nothing would be left out; more nodes to hold the model help as well"
        )

    def _left_out(self) -> str:
        copies = ""
        if self.copies_bytes:
            copies = f", copies of what other nodes alone hold {_gib(self.copies_bytes)}"

        if self.sole_snapshot_bytes > self.room_bytes:
            what = (
                f"not all of the {_gib(self.sole_bytes)} that no other node holds is kept, so a"
                " death of its processes may cost the steps since the last checkpoint"
            )
        elif self.sole_snapshot_bytes + self.copies_bytes > self.room_bytes:
            what = (
                "what no other node holds is kept first, and copies for other nodes go to its disk"
            )
        else:
            what = (
                "what no other node holds is kept first, then copies for other nodes, then of the"
                " rest what fits"
            )
        return (
            f"snapshots of its {_gib(self.state_bytes)} of state take"
            f" {_gib(self.snapshot_bytes)}{copies}, and there is room for {_gib(self.room_bytes)}:"
            f" {what}"
        )

    def _staged_beside(self) -> str:
        free = self.usable_bytes - self.filled_bytes
        if self.offloaded_bytes:
            return (
                f"a change of plans may put {_gib(self.staged_bytes)} of state beside the"
                f" {_gib(self.offloaded_bytes)} of optimizer state that lie there, where"
                f" {_gib(free - self.offloaded_bytes)} are free beside snapshots and copies: a"
                " worker that finds no room fails"
            )
        return (
            f"a change of plans may move {_gib(self.staged_bytes)} of state from its GPUs to host"
            f" memory, where {_gib(free)} are free beside snapshots and copies: a worker that finds"
            " no room fails"
        )

    def to_document(self) -> dict[str, Any]:
        names = (
            "host_bytes",
            "state_bytes",
            "sole_bytes",
            "copies_bytes",
            "staged_bytes",
            "offloaded_bytes",
            "snapshot_bytes",
            "room_bytes",
            "worst_bytes",
        )
        document: dict[str, Any] = {"node": self.node}
        for name in names:
            document[name] = int(getattr(self, name))
        return document


def sentences(nodes: Iterable[HostMemory]) -> list[str]:
    """Return one sentence for each node type that lacks host memory.

    It describes the node of that type that lacks most.
    """
    worst: dict[str, tuple[float, str]] = {}
    for node in nodes:
        said = node.sentence()
        if said is None:
            continue
        lack = node.wanted_bytes + node.staged_bytes
        most, _ = worst.get(node.node_type, (0.0, ""))
        if lack > most:
            worst[node.node_type] = lack, said
    return [said for _, said in worst.values()]


def document_of(nodes: Iterable[HostMemory]) -> dict[str, Any]:
    """Return the `host_memory` part of a plan's document.

    Empty if no node's host memory is known.
    """
    known = tuple(nodes)
    if not known:
        return {}
    by_name = [node.to_document() for node in known]
    return {"host_memory": {"by_node": by_name, "sentences": sentences(known)}}


def staged_bytes(state_bytes: float, room_bytes: float) -> float:
    """Return bytes of a worker's state that go to host memory in a change to an equal plan.

    The plan changed to has as much state. All of the state is staged if the device has no room for
    both states and the messages in flight; otherwise none is.
    """
    fits_on_device = 2 * state_bytes + IN_FLIGHT_BYTES <= room_bytes
    return 0.0 if fits_on_device else state_bytes


def may_lack(kind: NodeType) -> bool:
    """Return True if the GPUs of a node may hold more than its usable host memory."""
    if kind.host_memory_bytes is None:
        return False
    return kind.num_gpus * kind.gpu_memory_bytes > USABLE * kind.host_memory_bytes


def why_not_staged(
    kind: NodeType, node: str, num_bytes: float, offloaded_bytes: float = 0.0
) -> str | None:
    """Explain why a node cannot stage `num_bytes` in a change of plans; None if it can.

    Snapshots and copies are not counted, since they can be released. None also if the size of the
    node's host memory is unknown. offloaded_bytes: optimizer state that is there already.
    """
    if kind.host_memory_bytes is None:
        return None
    usable = USABLE * kind.host_memory_bytes
    if num_bytes + offloaded_bytes <= usable:
        return None
    if offloaded_bytes:
        moved = (
            f"put {_gib(num_bytes)} of state beside the {_gib(offloaded_bytes)} of optimizer state"
            f" of {node} in its host memory"
        )
    else:
        moved = f"move {_gib(num_bytes)} of state from the GPUs of {node} to its host memory"
    return (
        f"a change of plans would {moved}, of which {_gib(usable)} of"
        f" {_gib(kind.host_memory_bytes)} can be used (label autohet.io/host-memory-gib)"
    )


def why_not_offloaded(kind: NodeType, node: str, num_bytes: float) -> str | None:
    """Explain why a node has no room for what a plan keeps there; None if it has room.

    None also if the size of the node's host memory is unknown.
    """
    if kind.host_memory_bytes is None or num_bytes <= USABLE * kind.host_memory_bytes:
        return None
    return (
        f"{node} would have to keep {_gib(num_bytes)} in its host memory, of which"
        f" {_gib(USABLE * kind.host_memory_bytes)} of {_gib(kind.host_memory_bytes)} can be used"
        " (label autohet.io/host-memory-gib)"
    )


def host_memory_ceiling(kind: NodeType, room_bytes: float) -> float:
    """Return the largest state of a worker that a node can always stage in its host memory.

    It holds for each worker of the node, whatever state the others have.
    """
    if kind.host_memory_bytes is None:
        return room_bytes
    equal_part = USABLE * kind.host_memory_bytes / max(1, kind.num_gpus)
    never_staged = (room_bytes - IN_FLIGHT_BYTES) / 2
    return max(equal_part, never_staged)


@dataclass(frozen=True, slots=True)
class Sole:
    """State that only one node holds.

    share: share of each worker's state that no other node holds; scalars: scalars of parameters
    that each node alone holds, each counted once.
    """

    share: Mapping[str, float]
    scalars: Mapping[str, float]


def sole_state(plan: Plan, fleet: Fleet, spec: ModelSpec) -> Sole:
    """Return the state that would be lost with each node.

    Shared optimizer state has one copy, so all of it would be lost.
    """
    nodes = _nodes(plan, fleet, spec)
    sharing = sharing_of(plan)
    share = dict[str, float]()
    # by node and piece: workers of one node may hold the same piece, which counts once
    once = defaultdict[str, dict[object, float]](dict)
    for worker, pieces in _pieces_by_worker(plan, spec).items():
        whole = 0.0
        sole = 0.0
        for layer, part, scalars in pieces:
            is_shared = layer in sharing.layers
            size = scalars / sharing.holders if is_shared else scalars
            whole += size
            if is_shared or len(nodes[layer, part]) == 1:
                sole += size
                # each holder has another part of shared state
                owner = worker if is_shared else ""
                once[node_of(worker)][layer, part, owner] = size
        share[worker] = sole / whole

    scalars_by_node = {node: sum(sizes.values()) for node, sizes in once.items()}
    return Sole(share, scalars_by_node)


WHOLE = -1
"""Part number for tensors that each rank of a stage holds whole."""
_Part = tuple[str, int]  # layer, and part of what tensor parallelism cuts of it
HostPiece = tuple[str, int, float]
"""Piece of a layer: layer, part of what tensor parallelism cuts of it, scalars."""


def _nodes(plan: Plan, fleet: Fleet, spec: ModelSpec) -> dict[_Part, set[str]]:
    """Names of the nodes that hold each piece."""
    found = defaultdict[_Part, set[str]](set)
    for shard, names in holders_by_shard(plan, fleet, spec.num_layers).items():
        for part in (shard.part, WHOLE):
            found[shard.layer, part] |= names
        if shard.layer == HEAD and spec.tied_embeddings:
            found[EMBEDDING, shard.part] |= names
    return found


def _pieces_by_worker(plan: Plan, spec: ModelSpec) -> dict[str, list[HostPiece]]:
    parts = plan.num_parts
    found = dict[str, list[HostPiece]]()
    for pipeline in plan.pipelines:
        tied = 0 if len(pipeline.stages) == 1 else spec.tied_parameters
        for stage, names in stages_with_layers(pipeline):
            for rank, worker in enumerate(stage.workers):
                pieces = list[HostPiece]()
                for name in names:
                    pieces += _pieces(spec, stage, rank, name, parts, tied)
                found[worker] = pieces
    return found


def _pieces(
    spec: ModelSpec, stage: Stage, rank: int, layer: str, parts: int, tied: int
) -> Iterator[HostPiece]:
    """Yield the pieces of one layer on one rank.

    tied: scalars of the embedding that come with a head on another stage.
    """
    share = stage.share(rank)
    own_spec = spec.with_share(share) if stage.tp_shares else spec
    own = layer_named(own_spec, layer)
    cut = own.parameters_per_worker(1 / share.fraction) - own.replicated_parameters
    held = share.units(parts)
    yield layer, WHOLE, float(own.replicated_parameters)
    for part in held:
        yield layer, part, cut / len(held)
        if layer == HEAD and tied:
            yield EMBEDDING, part, tied / parts


def by_node(
    plan: Plan,
    fleet: Fleet,
    spec: ModelSpec,
    state: Mapping[str, float],
    staged: Mapping[str, float],
    kept: Kept,
) -> tuple[HostMemory, ...]:
    """Return host memory of the plan's nodes for which its size is known.

    state: bytes by worker; staged: bytes by node.
    """
    alone = sole_state(plan, fleet, spec)
    all_alone = sum(alone.scalars.values())
    workers = dict[str, list[str]]()
    for worker in state:
        workers.setdefault(node_of(worker), []).append(worker)
    other_nodes = max(1, len(workers) - 1)

    found = list[HostMemory]()
    for node, mine in workers.items():
        kind = fleet.node_of(mine[0]).node_type
        if kind.host_memory_bytes is None:
            continue
        copies_bytes = 0.0
        if kept.copies:
            # the copies of the other nodes' state, spread evenly
            theirs = optimizer_bytes_each(spec) * (all_alone - alone.scalars.get(node, 0.0))
            copies_bytes = COPY_ROUNDS * theirs / other_nodes
        found.append(
            HostMemory(
                node=node,
                node_type=kind.name,
                host_bytes=kind.host_memory_bytes,
                state_bytes=sum(state[worker] for worker in mine),
                sole_bytes=sum(state[worker] * alone.share[worker] for worker in mine),
                copies_bytes=copies_bytes,
                staged_bytes=staged.get(node, 0.0),
                kept=kept,
            )
        )
    return tuple(found)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
