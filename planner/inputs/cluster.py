"""Cluster: the nodes that may exist, read from a Ray cluster-launcher YAML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ConfigError
from planner.inputs.catalogue import (
    InstanceType,
    canonical_gpu_type,
    find_gpu_type,
    find_instance_type,
    may_have_gpus,
)
from planner.inputs.cluster_documents import (
    DEFAULT_HEAD,
    NODE_TYPE_KEYS,
    TOP_KEYS,
    accelerator_count,
    derived_labels,
    instance_type_of,
    provider_type,
    read_cluster_yaml,
    refuse_other_documents,
    with_legacy_types,
)
from planner.inputs.documents import check_keys, is_integer, read_mapping
from planner.inputs.fleet import Fleet, Node, NodeBound, NodeType
from planner.inputs.node_labels import (
    RAY_ACCELERATOR_LABEL,
    check_label_names,
    is_spot,
    label_number,
    label_text,
    read_labels,
    read_num_gpus,
    refuse_missing_facts,
    unknown_instance_note,
    why_gpus_are_unknown,
)
from planner.inputs.zones import EC2_ZONES, ZoneTable, read_zone_table

GIB = 2**30
MOST_NODES = 100_000
"""Nodes of a cluster, at most; a larger number is a missing bound."""


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
        # The types with the most GPUs fill the bound first.
        by_size = sorted(self.node_types, key=lambda kind: -kind.num_gpus)
        counts = dict(self.bound.standing) if self.bound else {}
        for kind in by_size:
            while counts.get(kind.name, 0) < kind.max_nodes:
                more = dict(counts)
                more[kind.name] = counts.get(kind.name, 0) + 1
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
    check_label_names(labels, name)
    row = find_instance_type(instance_type or "")
    if num_gpus is None and row:
        num_gpus = row.num_gpus
    part = _part_of(row, num_gpus, name) if shares_machine else 1.0
    gpu_type = _gpu_type(labels, row)
    memory_gib = label_number(labels, "gpu-memory-gib", name)
    host_memory_gib = label_number(labels, "host-memory-gib", name)
    intra_gbps = label_number(labels, "intra-node-gbps", name)
    inter_gbps = label_number(labels, "inter-node-gbps", name)
    usd_per_hour = label_number(labels, "usd-per-hour", name, zero=True)

    known_memory = None
    known_intra = None
    known_inter = None
    device = find_gpu_type(gpu_type or "")
    if row:
        known_memory = row.gpu_memory_bytes
        known_intra = row.intra_node_bytes_per_s
        known_inter = row.inter_node_bytes_per_s * part
        if usd_per_hour is None and row.usd_per_hour is not None:
            usd_per_hour = row.usd_per_hour * part
        if host_memory_gib is None:
            host_memory_gib = row.host_memory_bytes * part / GIB
    elif device:
        known_memory = device.memory_bytes

    facts: dict[str, Any] = {
        "gpu-type": gpu_type,
        "gpu-memory-gib": memory_gib * GIB if memory_gib else known_memory,
        "intra-node-gbps": intra_gbps * 1e9 / 8 if intra_gbps else known_intra,
        "inter-node-gbps": inter_gbps * 1e9 / 8 if inter_gbps else known_inter,
    }
    refuse_missing_facts(name, facts, num_gpus, instance_type)
    return NodeType(
        name=name,
        gpu_type=canonical_gpu_type(facts["gpu-type"]),
        num_gpus=num_gpus or 0,
        gpu_memory_bytes=int(facts["gpu-memory-gib"]),
        intra_node_bytes_per_s=facts["intra-node-gbps"],
        inter_node_bytes_per_s=facts["inter-node-gbps"],
        usd_per_hour=usd_per_hour,
        spot=is_spot(labels, name),
        zone=label_text(labels, "zone") or "",
        max_nodes=max_nodes,
        host_memory_bytes=int(host_memory_gib * GIB) if host_memory_gib else None,
    )


def _gpu_type(labels: Mapping[str, str], row: InstanceType | None) -> str | None:
    """Return the GPU type of the labels, else of the instance type.

    It is spelled as the instance type's row has it, if they mean the same device.
    """
    named = label_text(labels, "gpu-type") or labels.get(RAY_ACCELERATOR_LABEL)
    if row is None:
        return named or None
    if not named or canonical_gpu_type(named) == canonical_gpu_type(row.gpu_type):
        return row.gpu_type
    return named


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
        raise ConfigError(_why_no_types(types, where, notes))
    # nodes of an emulated fleet are started by its script, whatever an autoscaler would allow
    emulated = provider_type(top) == "fake_multinode"
    return Cluster(
        name=str(top["cluster_name"]),
        node_types=tuple(found),
        bound=None if emulated else bounds.of_planned(found),
        notes=tuple(notes),
        zones=read_zone_table(top, where),
    )


def _why_no_types(types: Mapping[str, Any], where: str, notes: Sequence[str]) -> str:
    """Return the message for a file without node types to plan on."""
    reasons = list(notes)
    for name, entry in types.items():
        unknown = why_gpus_are_unknown(name, entry)
        if unknown:
            reasons.append(unknown)
    what = f"no node type of {where} has GPUs and max_workers above 0"
    return "; ".join([what, *dict.fromkeys(reasons)])


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
        default_head = DEFAULT_HEAD if DEFAULT_HEAD in types else None
        head = top.get("head_node_type", default_head)
        if head is not None and head not in types:
            raise ConfigError(
                f"head_node_type of {where} is '{head}', which is not one of its node types"
                f" ({', '.join(types)})"
            )
        if head is None:
            limit = _count(top, "max_workers", where, MOST_NODES)
            own_limit = min(limit, _default_max_workers(top))
        else:
            limit = _count(top, "max_workers", where, _default_max_workers(top))
            own_limit = limit

        least: dict[str, int] = {}
        most: dict[str, int] = {}
        for name in types:
            what = f"node type '{name}'"
            entry = read_mapping(types[name], what)
            # Ray starts no workers of the head's type unless the file says so.
            default = 0 if name == head else own_limit
            least[name] = _count(entry, "min_workers", what, 0)
            most[name] = _count(entry, "max_workers", what, default)
            if least[name] > most[name]:
                raise ConfigError(
                    f"min_workers of {what} is {least[name]}, above its max_workers {most[name]}"
                )

        num_least = sum(least.values())
        if num_least > limit:
            raise ConfigError(
                f"max_workers of {where} is {limit}, below the sum of min_workers"
                f" {num_least}: Ray refuses that; raise it"
            )
        if head is None and "max_workers" not in top:
            limit = sum(most.values())
        if head is not None:
            most[head] += 1
        return NodeCounts(head, least, most, limit)

    def of_planned(self, kinds: Sequence[NodeType]) -> "NodeBound | None":
        """The bound on nodes that are planned on; None where no more can exist anyway."""
        planned = {kind.name for kind in kinds}
        num_others = sum(count for name, count in self.least.items() if name not in planned)
        most = self.max_workers - num_others
        if self.head in planned:
            most += 1
        num_possible = sum(min(kind.max_nodes, most) for kind in kinds)
        if num_possible <= most:
            return None

        standing = {}
        for kind in kinds:
            number = self.least[kind.name] + (kind.name == self.head)
            if number:
                standing[kind.name] = number
        return NodeBound(most, tuple(sorted(standing.items())))


def _default_max_workers(top: Mapping[str, Any]) -> int:
    """Return Ray's default for a file without max_workers (`ray/autoscaler/*/defaults.yaml`)."""
    return {"spark": 8, "vsphere": 5}.get(str(provider_type(top)), 2)


def _count(document: Mapping[str, Any], key: str, what: str, default: int) -> int:
    value = document.get(key, default)
    if not is_integer(value) or not 0 <= value <= MOST_NODES:
        raise ConfigError(
            f"{key} of {what} must be an integer of at least 0 and at most {MOST_NODES}, not"
            f" {value!r}"
        )
    return value


def _node_type(
    name: str, entry: Mapping[str, Any], top: Mapping[str, Any], most: int, notes: list[str]
) -> NodeType | None:
    """Return a node type with GPUs; None if it has none or may not exist.

    `notes` gets the reason if it may have GPUs that are left out.
    """
    check_keys(entry, f"node type '{name}'", NODE_TYPE_KEYS)
    labels = read_labels(entry, name)
    config = read_mapping(entry.get("node_config") or {}, f"node_config of '{name}'")
    derived = derived_labels(config, top)
    instance = instance_type_of(config)
    resources = read_mapping(entry.get("resources") or {}, f"resources of '{name}'")
    gpus = resources.get("GPU")
    if gpus is None:
        gpus = accelerator_count(config)
    if gpus is None and find_instance_type(instance or "") is None:
        # Resources without a GPU say that a node of no known instance type has none.
        is_silent = instance is None and not resources
        if is_silent or (instance is not None and may_have_gpus(instance)):
            notes.append(unknown_instance_note(name, instance))
        return None
    if gpus == 0 or most == 0:
        return None
    return node_type_from_labels(
        name,
        {**derived, **labels},
        None if gpus is None else read_num_gpus(gpus, name),
        instance,
        most,
        # KubeRay's nodes are pods, several of which may be on one machine.
        shares_machine=provider_type(top) == "kuberay",
    )
