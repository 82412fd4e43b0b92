"""Cluster and fleet: the nodes that may exist, and the nodes that are alive.

A cluster is a Ray cluster-launcher YAML. A fleet is a value with its generation.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.catalogue import (
    InstanceType,
    all_instance_types,
    canonical_gpu_type,
    find_gpu_type,
    find_instance_type,
    may_have_gpus,
)
from planner.cluster_documents import (
    DEFAULT_HEAD,
    NODE_TYPE_KEYS,
    TOP_KEYS,
    accelerator_count,
    derived_labels,
    instance_type_of,
    read_cluster_yaml,
    refuse_other_documents,
    with_legacy_types,
)
from planner.documents import check_keys, read_mapping
from planner.errors import ConfigError
from planner.zones import EC2_ZONES, ZoneTable, read_zone_table

GIB = 2**30
LABEL_PREFIX = "autohet.io/"
_NUMBERS = (
    "gpu-memory-gib",
    "host-memory-gib",
    "intra-node-gbps",
    "inter-node-gbps",
    "usd-per-hour",
)
LABELS = frozenset(LABEL_PREFIX + name for name in ("gpu-type", *_NUMBERS, "spot", "zone"))
RAY_ACCELERATOR_LABEL = "ray.io/accelerator-type"
RAY_MARKET_LABEL = "ray.io/market-type"
MOST_NODES = 100_000
"""Nodes of a cluster, at most; a larger number is a missing bound."""


@dataclass(frozen=True, slots=True)
class NodeType:
    """Type of equal machines.

    Bandwidths are bytes per second in one direction: intra-node per GPU, inter-node per node.

    num_gpus: may be 0 (a head node, never planned on).
    usd_per_hour: price per node, None if neither catalogue nor label names one.
    slowdown: factor on the profile's compute times of its GPUs, as measured on live machines that
    throttle or share.
    host_memory_bytes: memory of the machine (or of its container), None if unknown.
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
            raise ConfigError(
                "two nodes of the fleet have the same name:"
                f" {sorted(n for n in names if names.count(n) > 1)[0]}"
            )
        object.__setattr__(
            self,
            "_node_by_worker",
            {worker: node for node in self.nodes for worker in node.workers},
        )

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
        prices = [node.node_type.usd_per_hour for node in self.nodes]
        return (
            None
            if any(price is None for price in prices)
            else sum(price for price in prices if price is not None)
        )


def _examples(names: tuple[str, ...]) -> str:
    if not names:
        return "no GPUs"
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


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
        names = {*counts, *least}
        return sum(max(counts.get(name, 0), least.get(name, 0)) for name in names) <= self.most

    def allows_fleet(self, fleet: Fleet) -> bool:
        return self.allows(Counter(node.node_type.name for node in fleet.nodes))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Node types of a cluster file with the limits on their numbers: the nodes that may exist.

    node_types: types with GPUs only.
    bound: limit on all of their nodes together; None if it is no tighter than the types' own
    limits.
    notes: sentences on the parts of the file that have no effect.
    zones: links between zones.
    """

    name: str
    node_types: tuple[NodeType, ...]
    bound: NodeBound | None = None
    notes: tuple[str, ...] = ()
    zones: ZoneTable = EC2_ZONES

    def most_gpus(self) -> int:
        """GPUs of the largest fleet that can exist at one time."""
        by_size = sorted(self.node_types, key=lambda kind: -kind.num_gpus)
        counts = dict(self.bound.standing) if self.bound else {}
        for kind in by_size:
            while counts.get(kind.name, 0) < kind.max_nodes:
                more = {**counts, kind.name: counts.get(kind.name, 0) + 1}
                if self.bound is not None and not self.bound.allows(more):
                    break
                counts = more
        return sum(kind.num_gpus * counts.get(kind.name, 0) for kind in by_size)

    def fleet(self) -> Fleet:
        """`max_nodes` of each type, named `<type>-<index>`, generation 0: more than can exist at
        one time where there is a `bound`.
        """
        nodes: list[Node] = []
        for kind in self.node_types:
            nodes += [Node(f"{kind.name}-{i}", kind) for i in range(kind.max_nodes)]
        return Fleet(generation=0, nodes=tuple(nodes))


def node_type_from_labels(
    name: str,
    labels: Mapping[str, str],
    num_gpus: int | None,
    instance_type: str | None = None,
    max_nodes: int = 1,
    *,
    shares_machine: bool = False,
) -> NodeType:
    """A node type from its labels, which override the catalogue's row of `instance_type`.

    num_gpus None takes the catalogue's number. shares_machine: a node that has some of its
    machine's GPUs (a pod) has that part of its price, network and memory. ConfigError names every
    label that would supply a missing fact.
    """
    for key in labels:
        if key.startswith(LABEL_PREFIX) and key not in LABELS:
            raise ConfigError(
                f"unknown label '{key}' on node type '{name}'; known: {', '.join(sorted(LABELS))}"
            )
    row = find_instance_type(instance_type or "")
    if num_gpus is None:
        num_gpus = row.num_gpus if row else None
    part = _part_of(row, num_gpus, name) if shares_machine else 1.0
    gpu_type = _text(labels, "gpu-type") or labels.get(RAY_ACCELERATOR_LABEL)
    gpu_type = gpu_type or (row.gpu_type if row else None)
    if row and gpu_type and canonical_gpu_type(gpu_type) == canonical_gpu_type(row.gpu_type):
        gpu_type = row.gpu_type
    device = find_gpu_type(gpu_type or "")
    memory = _number(labels, "gpu-memory-gib", name)
    host_memory = _number(labels, "host-memory-gib", name)
    intra = _number(labels, "intra-node-gbps", name)
    inter = _number(labels, "inter-node-gbps", name)
    price = _number(labels, "usd-per-hour", name, zero=True)
    known_memory = None
    if row:
        known_memory = row.gpu_memory_bytes
    elif device:
        known_memory = device.memory_bytes
    facts: dict[str, Any] = {
        "gpu-type": gpu_type,
        "gpu-memory-gib": memory * GIB if memory else known_memory,
        "intra-node-gbps": _rate(intra, row.intra_node_bytes_per_s if row else None),
        "inter-node-gbps": _rate(inter, row.inter_node_bytes_per_s * part if row else None),
    }
    _refuse_missing(name, facts, num_gpus, instance_type)
    if price is None and row and row.usd_per_hour is not None:
        price = row.usd_per_hour * part
    if host_memory is None and row:
        host_memory = row.host_memory_bytes * part / GIB
    return NodeType(
        name=name,
        gpu_type=canonical_gpu_type(facts["gpu-type"]),
        num_gpus=num_gpus or 0,
        gpu_memory_bytes=int(facts["gpu-memory-gib"]),
        intra_node_bytes_per_s=facts["intra-node-gbps"],
        inter_node_bytes_per_s=facts["inter-node-gbps"],
        usd_per_hour=price,
        spot=_is_spot(labels, name),
        zone=_text(labels, "zone") or "",
        max_nodes=max_nodes,
        host_memory_bytes=int(host_memory * GIB) if host_memory else None,
    )


def _part_of(row: InstanceType | None, num_gpus: int | None, name: str) -> float:
    """Part of its machine that a node has, by GPUs."""
    if row is None or not num_gpus:
        return 1.0
    if num_gpus > row.num_gpus:
        raise ConfigError(
            f"node type '{name}' has {num_gpus} GPUs on a {row.name}, which has {row.num_gpus}: no"
            " such node can start; ask for fewer"
        )
    return num_gpus / row.num_gpus


def _rate(gbps: float | None, known: float | None) -> float | None:
    """Bytes a second by a label in Gbit/s, else what is known."""
    return gbps * 1e9 / 8 if gbps else known


def _is_spot(labels: Mapping[str, str], name: str) -> bool:
    """Return the spot flag of our own label, else of Ray's market label."""
    if _text(labels, "spot") is not None:
        return _flag(labels, "spot", name)
    return labels.get(RAY_MARKET_LABEL) == "spot"


def _refuse_missing(
    name: str, facts: Mapping[str, object], num_gpus: int | None, instance_type: str | None
) -> None:
    """ConfigError that names all labels which are missing."""
    missing = [label for label, value in facts.items() if value is None]
    words = [label.replace("-", " ") for label in missing]
    remedies = [f"'{LABEL_PREFIX}{label}'" for label in missing]
    if num_gpus is None:
        words.append("number of GPUs")
        remedies.append("GPU under resources")
    if not words:
        return
    source = (
        f"instance type '{instance_type}' is not in the catalogue"
        if instance_type
        else "it names no instance type"
    )
    label = "label" if len(missing) == 1 else "labels"
    raise ConfigError(
        f"node type '{name}' has no {' and no '.join(words)}: {source}; set the {label}"
        f" {', '.join(remedies)}"
    )


def _text(labels: Mapping[str, str], label: str) -> str | None:
    return labels.get(LABEL_PREFIX + label) or None


def _number(
    labels: Mapping[str, str], label: str, name: str, *, zero: bool = False
) -> float | None:
    text = _text(labels, label)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0.0 < value < float("inf") or (zero and value == 0.0)):
        raise ConfigError(
            f"label '{LABEL_PREFIX}{label}' of node type '{name}' must be a positive"
            f" number{' or 0' * zero}, not '{text}'"
        )
    return value


def _flag(labels: Mapping[str, str], label: str, name: str) -> bool:
    text = _text(labels, label)
    if text not in (None, "true", "false"):
        raise ConfigError(
            f"label '{LABEL_PREFIX}{label}' of node type '{name}' must be \"true\" or \"false\","
            f" not '{text}'"
        )
    return text == "true"


def cluster_from_yaml(path: str | Path) -> Cluster:
    """Read a cluster file; ConfigError where it cannot be read or is wrong."""
    return cluster_from_document(read_cluster_yaml(path), f"cluster '{path}'")


def cluster_from_document(document: object, where: str = "cluster") -> Cluster:
    """The node types with GPUs of a Ray cluster-launcher document, and the bounds on their numbers
    as Ray means them. ConfigError names everything that is wrong.
    """
    top = read_mapping(document, where)
    refuse_other_documents(top, where)
    top = with_legacy_types(top)
    check_keys(top, where, TOP_KEYS, frozenset({"cluster_name", "available_node_types"}))
    types = read_mapping(top["available_node_types"], "available_node_types")
    bounds = NodeCounts.of(top, types, where)
    found: list[NodeType] = []
    errors: list[str] = []
    notes = [str(note) for note in top.get("notes") or ()]
    for name in types:
        try:
            kind = _node_type(name, types[name], top, bounds.most[name], notes)
        except ConfigError as error:
            errors.append(str(error))
            continue
        if kind is not None:
            found.append(kind)
    if errors:
        raise ConfigError("; ".join(errors))
    if not found:
        unknown = [_unknown_type(name, types[name]) for name in types]
        raise ConfigError(
            "; ".join(
                [
                    f"no node type of {where} has GPUs and max_workers above 0",
                    *dict.fromkeys([*notes, *filter(None, unknown)]),
                ]
            )
        )
    # nodes of an emulated fleet are started by its script, whatever an autoscaler would allow
    emulated = (top.get("provider") or {}).get("type") == "fake_multinode"
    return Cluster(
        name=str(top["cluster_name"]),
        node_types=tuple(found),
        bound=None if emulated else bounds.of_planned(found),
        notes=tuple(notes),
        zones=read_zone_table(top, where),
    )


@dataclass(frozen=True)
class NodeCounts:
    """Minimum and maximum number of nodes by type; the head counts as a node of its type.

    least: nodes that always exist.
    max_workers: Ray's bound on all nodes but the head.
    head: node type of the head; None for a part of a file that names no head, which Ray would not
    launch.
    """

    head: str | None
    least: Mapping[str, int]
    most: Mapping[str, int]
    max_workers: int

    @staticmethod
    def of(top: Mapping[str, Any], types: Mapping[str, Any], where: str) -> "NodeCounts":
        """Fill in the counts as Ray does.

        See fill_node_type_min_max_workers and validate_config in `ray/autoscaler/_private/util.py`.
        """
        head = top.get("head_node_type", DEFAULT_HEAD if DEFAULT_HEAD in types else None)
        if head is not None and head not in types:
            raise ConfigError(
                f"head_node_type of {where} is '{head}', which is not one of its node types"
                f" ({', '.join(types)})"
            )
        default = MOST_NODES if head is None else _default_max_workers(top)
        limit = _count(top, "max_workers", where, default)
        own_limit = min(limit, _default_max_workers(top)) if head is None else limit
        least: dict[str, int] = {}
        most: dict[str, int] = {}
        for name in types:
            entry = read_mapping(types[name], f"node type '{name}'")
            what = f"node type '{name}'"
            least[name] = _count(entry, "min_workers", what, 0)
            most[name] = _count(entry, "max_workers", what, 0 if name == head else own_limit)
            if least[name] > most[name]:
                raise ConfigError(
                    f"min_workers of {what} is {least[name]}, above its max_workers {most[name]}"
                )
        if sum(least.values()) > limit:
            raise ConfigError(
                f"max_workers of {where} is {limit}, below the sum of min_workers"
                f" {sum(least.values())}: Ray refuses that; raise it"
            )
        if head is None and "max_workers" not in top:
            limit = sum(most.values())
        at_head = {name: count + (name == head) for name, count in most.items()}
        return NodeCounts(head, least, at_head, limit)

    def of_planned(self, kinds: Sequence[NodeType]) -> "NodeBound | None":
        """The bound on nodes that are planned on; None where no more can exist anyway."""
        planned = {kind.name for kind in kinds}
        others = sum(count for name, count in self.least.items() if name not in planned)
        most = self.max_workers - others + (self.head in planned)
        standing = {}
        for kind in kinds:
            number = self.least[kind.name] + (kind.name == self.head)
            if number:
                standing[kind.name] = number
        if sum(min(kind.max_nodes, most) for kind in kinds) <= most:
            return None
        return NodeBound(most, tuple(sorted(standing.items())))


def _default_max_workers(top: Mapping[str, Any]) -> int:
    """Return Ray's default for a file without max_workers (`ray/autoscaler/*/defaults.yaml`)."""
    provider = (top.get("provider") or {}).get("type")
    return {"spark": 8, "vsphere": 5}.get(str(provider), 2)


def _count(document: Mapping[str, Any], key: str, what: str, default: int) -> int:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_NODES:
        raise ConfigError(
            f"{key} of {what} must be an integer of at least 0 and at most {MOST_NODES}, not"
            f" {value!r}"
        )
    return value


def _node_type(
    name: str, entry: Mapping[str, Any], top: Mapping[str, Any], most: int, notes: list[str]
) -> NodeType | None:
    """A node type with GPUs, None where it has none or may not exist; `notes` says why where GPUs
    are left out.
    """
    check_keys(entry, f"node type '{name}'", NODE_TYPE_KEYS)
    labels = _labels(entry, name)
    config = read_mapping(entry.get("node_config") or {}, f"node_config of '{name}'")
    derived = derived_labels(config, top)
    instance = instance_type_of(config)
    gpus = read_mapping(entry.get("resources") or {}, f"resources of '{name}'").get("GPU")
    row = find_instance_type(instance or "")
    if gpus is None:
        gpus = accelerator_count(config)
    if gpus is None and row is None:
        if instance is None or may_have_gpus(instance):
            notes.append(_unknown_instance(name, instance))
        return None
    if gpus == 0 or most == 0:
        return None
    shares_machine = (top.get("provider") or {}).get("type") == "kuberay"
    return node_type_from_labels(
        name,
        {**derived, **labels},
        None if gpus is None else _num_gpus(gpus, name),
        instance,
        most,
        shares_machine=shares_machine,
    )


def _labels(entry: Mapping[str, Any], name: str) -> dict[str, str]:
    labels = {
        str(k): v for k, v in read_mapping(entry.get("labels") or {}, f"labels of '{name}'").items()
    }
    for key, value in labels.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"label '{key}' of node type '{name}' must be a string (quote it), not {value!r}"
            )
    return labels


def _num_gpus(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ConfigError(f"GPU of node type '{name}' must be a whole number, not {value!r}")
    return int(value)


def _unknown_type(name: str, entry: Mapping[str, Any]) -> str:
    """Why nothing is known of a node type's GPUs; empty where the file or the catalogue says."""
    instance = instance_type_of(entry.get("node_config") or {})
    if "GPU" in (entry.get("resources") or {}) or find_instance_type(instance or ""):
        return ""
    return _unknown_instance(name, instance)


def _unknown_instance(name: str, instance: str | None) -> str:
    """Why a node type may have GPUs that are not planned on."""
    if instance is None:
        return f"'{name}' names no instance type; GPUs that it has must be said under resources"
    close = get_close_matches(instance, sorted(all_instance_types()), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return (
        f"instance type '{instance}' of '{name}' is not in the catalogue of GPU instances{hint}, so"
        " it is not planned on: say its GPUs under resources and its facts by labels"
        f" ({', '.join(sorted(LABELS))})"
    )
