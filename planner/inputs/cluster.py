"""Cluster: the nodes that may exist, read from a Ray cluster-launcher YAML."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.errors import ConfigError
from planner.inputs.autoscaling import AutoscaledType, autoscaling_config
from planner.inputs.catalogue import (
    PRICE_REGION,
    PRICES_AS_OF,
    InstanceType,
    canonical_gpu_type,
    find_gpu_type,
    find_instance_type,
    may_have_gpus,
)
from planner.inputs.cluster_documents import (
    DOCKER_KEYS,
    NODE_TYPE_KEYS,
    TOP_KEYS,
    derived_labels,
    provider_type,
    read_cluster_yaml,
    refuse_other_documents,
    with_legacy_types,
)
from planner.inputs.documents import Document, Json, check_keys, read_mapping, read_section
from planner.inputs.fleet import Fleet, Node, NodeBound, NodeType
from planner.inputs.kuberay import ANY_INSTANCE, NOT_PLANNED, POD
from planner.inputs.machines import pods_on
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
VCPUS_A_CORE = 2
"""Hardware threads that clouds rent as vCPUs."""


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
    pod: Mapping[str, float] | None = None,
) -> NodeType:
    """A node type from its labels, which override the catalogue's row of `instance_type`.

    num_gpus None takes the catalogue's number. pod: what a node requests which is a pod: it has
    its part of the machine's price, network and memory. ConfigError names every label that would
    supply a missing fact.
    """
    check_label_names(labels, name)
    row = find_instance_type(instance_type or "")
    if num_gpus is None and row:
        num_gpus = row.num_gpus
    part = 1.0 if pod is None else _part_of(row, num_gpus, pod, name)
    gpu_type = _gpu_type(labels, row)
    memory_gib = label_number(labels, "gpu-memory-gib", name)
    host_memory_gib = label_number(labels, "host-memory-gib", name)
    intra_gbps = label_number(labels, "intra-node-gbps", name)
    inter_gbps = label_number(labels, "inter-node-gbps", name)
    usd_per_hour = label_number(labels, "usd-per-hour", name, zero=True)

    known_memory = None
    known_intra = None
    known_inter = None
    host_cores = None
    device = find_gpu_type(gpu_type or "")
    if row:
        known_memory = row.gpu_memory_bytes
        known_intra = row.intra_node_bytes_per_s
        known_inter = row.inter_node_bytes_per_s * part
        if usd_per_hour is None and row.usd_per_hour is not None:
            usd_per_hour = row.usd_per_hour * part
        if host_memory_gib is None:
            host_memory_gib = row.host_memory_bytes * part / GIB
        if row.vcpus:
            host_cores = row.vcpus * part / VCPUS_A_CORE
    elif device:
        known_memory = device.memory_bytes

    facts: Document = {
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
        host_cores=host_cores,
    )


def _gpu_type(labels: Mapping[str, str], row: InstanceType | None) -> str | None:
    """Return the GPU type of the labels, else of the instance type.

    It is spelled as the instance type's row has it, if they mean the same device: Ray's `A100` says
    nothing of the memory, which the machine does.
    """
    named = label_text(labels, "gpu-type") or labels.get(RAY_ACCELERATOR_LABEL)
    if row is None:
        return named or None
    if not named or row.gpu_type.upper().startswith(f"{named.upper()}-"):
        return row.gpu_type
    if canonical_gpu_type(named) == canonical_gpu_type(row.gpu_type):
        return row.gpu_type
    return named


def _part_of(
    row: InstanceType | None, num_gpus: int | None, pod: Mapping[str, float], name: str
) -> float:
    """Part of its machine that a pod takes: by GPUs, vCPUs and memory no more of its kind fit.

    Raises:
        ConfigError: not even one fits.
    """
    if row is None or not num_gpus:
        return 1.0
    number = pods_on(row, num_gpus, pod)
    if number:
        return 1 / number
    gpus = max(num_gpus, pod.get("gpu", 0.0))
    asked, has = f"{gpus:g} GPUs", f"{row.num_gpus}"
    if gpus <= row.num_gpus:
        asked, has = f"{pod.get('cpu', 0.0):g} vCPUs", f"{row.vcpus}"
        if pod.get("cpu", 0.0) <= (row.vcpus or math.inf):
            asked = f"{pod['memory'] / GIB:g} GiB of memory"
            has = f"{row.host_memory_bytes / GIB:g}"
    raise ConfigError(
        f"node type '{name}' has {asked} on a {row.name}, which has {has}: no such node can start;"
        " ask for less"
    )


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
    autoscaling = autoscaling_config(top, where)
    found: list[NodeType] = []
    errors: list[str] = []
    of_document = [str(note) for note in top.get("notes") or ()]
    notes = list(of_document)
    for name in types:
        try:
            kind = _node_type(types[name], autoscaling.types[name], top, notes)
        except ConfigError as error:
            errors.append(str(error))
            continue
        if kind is not None:
            found.append(kind)
    if errors:
        raise ConfigError("; ".join(errors))
    if not found:
        vsphere = provider_type(top) == "vsphere"
        reasons = [*notes[len(of_document) :], *of_document]
        for name, entry in types.items():
            unknown = why_gpus_are_unknown(name, entry)
            if unknown:
                reasons.append(unknown)
        if vsphere:
            reasons.append(
                "it is Ray's file for vSphere, whose VM classes say nothing of GPUs: add GPU under"
                " resources and labels of what its machines have"
            )
        what = f"no node type of {where} has GPUs and max_workers above 0"
        raise ConfigError("; ".join([what, *dict.fromkeys(reasons)]))
    # nodes of an emulated fleet are started by its script, whatever an autoscaler would allow
    emulated = provider_type(top) == "fake_multinode"
    return Cluster(
        name=str(top["cluster_name"]),
        node_types=tuple(found),
        bound=None if emulated else autoscaling.bound_of(found),
        notes=tuple(notes),
        zones=read_zone_table(top, where),
    )


def _node_type(entry: Json, kind: AutoscaledType, top: Json, notes: list[str]) -> NodeType | None:
    """Return a node type with GPUs; None if it has none or may not exist.

    `notes` gets the reason if it may have GPUs that are left out.
    """
    name = kind.name
    check_keys(entry, f"node type '{name}'", NODE_TYPE_KEYS)
    check_keys(read_section(entry, "docker"), f"docker of node type '{name}'", DOCKER_KEYS)
    labels = read_labels(entry, name)
    config = read_mapping(entry.get("node_config") or {}, f"node_config of '{name}'")
    derived = derived_labels(config, top)
    instance = kind.instance_type
    gpus = kind.resources.get("GPU")
    if gpus is None:
        # Resources without a GPU say that a node of no known instance type has none.
        is_silent = instance is None and not kind.resources
        if is_silent or (instance is not None and may_have_gpus(instance)):
            notes.append(unknown_instance_note(name, instance))
        return None
    notes += [note for note in (kind.note, config.get(NOT_PLANNED)) if note]
    if gpus == 0 or kind.max_nodes == 0 or NOT_PLANNED in config:
        return None
    # KubeRay's nodes are pods, several of which may be on one machine.
    pod = config.get(POD, {}) if provider_type(top) == "kuberay" else None
    facts = {**derived, **labels}
    num_gpus = read_num_gpus(gpus, name)
    machines = config.get(ANY_INSTANCE) or ()
    made = [
        node_type_from_labels(name, facts, num_gpus, machine, kind.max_nodes, pod=pod)
        for machine in machines or (instance,)
    ]
    found = _least_of(made, machines)
    is_catalogues = found.usd_per_hour is not None and "autohet.io/usd-per-hour" not in facts
    if is_catalogues and kind.region not in ("", PRICE_REGION):
        note = (
            f"prices are of {PRICES_AS_OF}; those of {kind.region} differ: set the label"
            " 'autohet.io/usd-per-hour' to what you pay"
        )
        notes += [] if note in notes else [note]
    return found


def _least_of(kinds: Sequence[NodeType], machines: Sequence[str]) -> NodeType:
    """Return a node that may be on any of several machines: the least of each, the dearest price.

    Raises:
        ConfigError: they have different GPUs.
    """
    first = kinds[0]
    gpu_types = {kind.gpu_type for kind in kinds}
    if len(gpu_types) > 1:
        raise ConfigError(
            f"node type '{first.name}' may be on {', '.join(machines)}, whose GPUs differ"
            f" ({', '.join(sorted(gpu_types))}); make a group of each, or name one GPU in its"
            " nodeSelector"
        )
    prices = [kind.usd_per_hour for kind in kinds if kind.usd_per_hour is not None]
    memories = [kind.host_memory_bytes for kind in kinds if kind.host_memory_bytes is not None]
    cores = [kind.host_cores for kind in kinds if kind.host_cores is not None]
    return replace(
        first,
        gpu_memory_bytes=min(kind.gpu_memory_bytes for kind in kinds),
        intra_node_bytes_per_s=min(kind.intra_node_bytes_per_s for kind in kinds),
        inter_node_bytes_per_s=min(kind.inter_node_bytes_per_s for kind in kinds),
        usd_per_hour=max(prices) if len(prices) == len(kinds) else None,
        host_memory_bytes=min(memories, default=None),
        host_cores=min(cores, default=None),
    )
