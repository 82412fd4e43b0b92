"""Fleet: the nodes that are alive, as values."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from planner.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeType:
    """Type of equal machines.

    Bandwidths are bytes per second in one direction: intra-node per GPU, inter-node per node.

    num_gpus: may be 0 (a head node, never planned on).
    usd_per_hour: price per node, None if neither catalogue nor label names one.
    slowdown: factor on the profile's compute times of its GPUs, as measured on live machines that
    throttle or share.
    host_memory_bytes, host_cores: memory and cores of the machine (or of its container), None if
    unknown.
    """

    name: str
    gpu_type: str
    num_gpus: int
    gpu_memory_bytes: int
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    usd_per_hour: float | None = None
    spot: bool = False
    zone: str = ""
    max_nodes: int = 1
    slowdown: float = 1.0
    host_memory_bytes: int | None = None
    host_cores: float | None = None

    def __hash__(self) -> int:
        """Hash only name and slowdown: searches look types up tens of thousands of times."""
        return hash((self.name, self.slowdown))


@dataclass(frozen=True, slots=True)
class Node:
    """Machine of the fleet; its workers are named `<node>/<gpu index>`."""

    name: str
    node_type: NodeType

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(f"{self.name}/{index}" for index in range(self.node_type.num_gpus))


Member = tuple[str, NodeType]
"""Node name and node type of one worker of a group."""


@lru_cache(maxsize=1 << 14)
def node_of(worker: str) -> str:
    """The name of a worker's node, also of one that is in no fleet any more."""
    return worker.rsplit("/", 1)[0]


@dataclass(frozen=True)
class Fleet:
    """Nodes that are alive in one generation. Node names are unique."""

    generation: int
    nodes: tuple[Node, ...]
    _node_by_worker: dict[str, Node] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            repeated = min(name for name, count in Counter(names).items() if count > 1)
            raise ConfigError(f"two nodes of the fleet have the same name: {repeated}")
        node_by_worker = {}
        for node in self.nodes:
            for worker in node.workers:
                node_by_worker[worker] = node
        object.__setattr__(self, "_node_by_worker", node_by_worker)

    @property
    def workers(self) -> tuple[str, ...]:
        """Every GPU's worker name, nodes in order."""
        return tuple(self._node_by_worker)

    @cached_property
    def node_types(self) -> tuple[NodeType, ...]:
        """Node types of the nodes, in order of appearance."""
        return tuple(dict.fromkeys(node.node_type for node in self.nodes))

    @cached_property
    def gpu_node_types(self) -> tuple[NodeType, ...]:
        """Node types with GPUs, in order of appearance."""
        return tuple(kind for kind in self.node_types if kind.num_gpus)

    def node_types_of(self, workers: Sequence[str]) -> tuple[NodeType, ...]:
        """Return the node type of each worker."""
        return tuple(self.node_of(worker).node_type for worker in workers)

    def node_of(self, worker: str) -> Node:
        """The node of a worker; ConfigError where the fleet has no such worker."""
        if worker not in self._node_by_worker:
            raise ConfigError(
                f"worker '{worker}' is not in the fleet of {len(self.nodes)} nodes"
                f" ({_examples(self.workers)})"
            )
        return self._node_by_worker[worker]

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU types of the nodes, in order of appearance."""
        return tuple(dict.fromkeys(node.node_type.gpu_type for node in self.nodes))

    def gpu_type(self, worker: str) -> str:
        return self.node_of(worker).node_type.gpu_type

    def gpu_types_of(self, workers: Iterable[str]) -> set[str]:
        """Return the GPU types of these workers."""
        return {self.gpu_type(worker) for worker in workers}

    def members_of(self, workers: Iterable[str]) -> list[Member]:
        """Return node name and node type of each worker, in the order of the workers."""
        nodes = [self.node_of(worker) for worker in workers]
        return [(node.name, node.node_type) for node in nodes]

    def usd_per_hour(self) -> float | None:
        """Price of all nodes; None where one has no price."""
        prices = []
        for node in self.nodes:
            price = node.node_type.usd_per_hour
            if price is None:
                return None
            prices.append(price)
        return sum(prices)


def _examples(names: tuple[str, ...]) -> str:
    if not names:
        return "no GPUs"
    shown = ", ".join(names[:4])
    return f"{shown}, ..." if len(names) > 4 else shown


@dataclass(frozen=True, slots=True)
class NodeBound:
    """Bound on the number of nodes that exist at one time.

    most: the bound. standing: number by type of the nodes among them that always exist.
    """

    most: int
    standing: tuple[tuple[str, int], ...] = ()

    def allows(self, counts: Mapping[str, int]) -> bool:
        """Return True if `counts` nodes by type can exist together with the standing nodes."""
        least = dict(self.standing)
        total = 0
        for name in {*counts, *least}:
            total += max(counts.get(name, 0), least.get(name, 0))
        return total <= self.most

    def allows_fleet(self, fleet: Fleet) -> bool:
        return self.allows(Counter(node.node_type.name for node in fleet.nodes))
