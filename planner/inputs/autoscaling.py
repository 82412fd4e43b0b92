"""Node types of a cluster file as Ray's autoscaler has them: bounds, resources, labels and place.

This is the one derivation of a file. The plan, the request to the autoscaler, quotas, prices and
the simulator all take their numbers from here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from planner.errors import ConfigError
from planner.inputs.catalogue import InstanceType, find_instance_type, instance_types
from planner.inputs.cluster_documents import (
    accelerator_count,
    default_head,
    instance_type_of,
    named_zones,
    provider_type,
    with_legacy_types,
)
from planner.inputs.documents import Json, is_integer, read_mapping, read_section
from planner.inputs.fleet import NodeBound, NodeType
from planner.inputs.machines import ec2_gpu_name
from planner.inputs.zones import region_of

MOST_NODES = 100_000
"""Nodes of a cluster, at most; a larger number is a missing bound."""
DETECTING = (None, "aws", "fake_multinode")
"""Providers for which Ray looks up what an instance type has, and files that Ray does not launch.

See `fillout_available_node_types_resources` in `ray/autoscaler/_private/*/node_provider.py`.
"""
_NUM_GPUS = re.compile(r"ray start .*--num-gpus[= ](\d+)")


@dataclass(frozen=True)
class AutoscaledType:
    """Node type with what Ray fills in.

    resources: those that Ray counts on. min_workers and max_workers: bounds on workers; the head
    counts in addition. zones: zones in which its nodes may come; empty if unknown. note: why fewer
    nodes can come than the file says; empty if all can.
    """

    name: str
    instance_type: str | None
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    min_workers: int
    max_workers: int
    is_head: bool = False
    priority: int = 0
    zones: frozenset[str] = frozenset()
    region: str = ""
    note: str = ""

    @property
    def standing(self) -> int:
        """Nodes that exist without any request; the head counts towards its type's minimum."""
        return max(self.min_workers, self.is_head)

    @property
    def max_nodes(self) -> int:
        return self.max_workers + self.is_head


@dataclass(frozen=True)
class AutoscalingConfig:
    """Node types of a cluster file, and Ray's bound on all workers together.

    head: node type of the head; None for a part of a file that names no head, which Ray would not
    launch.
    """

    head: str | None
    max_workers: int
    types: Mapping[str, AutoscaledType] = field(default_factory=dict)

    @property
    def max_nodes(self) -> int:
        return self.max_workers + (self.head is not None)

    def standing(self, names: Iterable[str]) -> dict[str, int]:
        """Return the nodes of these types that exist without any request."""
        return {name: self.types[name].standing for name in names if name in self.types}

    def workers(self, counts: Mapping[str, int], version: int = 2) -> dict[str, int]:
        """Return the nodes that Ray launches for `counts` nodes: without the head, with minimums.

        Types without nodes are left out. Version 1 of the autoscaler launches a type's minimum
        beside the head.
        """
        found = {}
        for name, kind in self.types.items():
            least = kind.standing + (kind.is_head and version == 1 and kind.min_workers > 0)
            number = max(counts.get(name, 0), least) - kind.is_head
            if number:
                found[name] = number
        return found

    def bound_of(self, kinds: Collection[NodeType]) -> NodeBound | None:
        """Return the bound on nodes of these types; None where no more can exist anyway."""
        planned = {kind.name for kind in kinds}
        most = self.max_nodes
        for name, kind in self.types.items():
            if name not in planned:
                most -= kind.standing
        if sum(kind.max_nodes for kind in kinds) <= most:
            return None

        standing = {name: number for name, number in self.standing(planned).items() if number}
        return NodeBound(most, tuple(sorted(standing.items())))

    def largest_total(self, weights: Mapping[str, float]) -> float:
        """Return the largest sum of `weights` by node type that nodes can have at one time.

        A quota of vCPUs must allow it.
        """
        spare = self.max_nodes - sum(kind.standing for kind in self.types.values())
        total = 0.0
        for name in sorted(self.types, key=lambda name: -weights.get(name, 0.0)):
            kind = self.types[name]
            more = min(kind.max_nodes - kind.standing, spare)
            weight = weights.get(name, 0.0)
            # nodes without weight take no place from others
            spare -= more if weight else 0
            total += weight * (kind.standing + more)
        return total


def autoscaling_config(document: object, where: str = "cluster") -> AutoscalingConfig:
    """Return a cluster file's node types as Ray fills them in.

    See fill_node_type_min_max_workers and validate_config in `ray/autoscaler/_private/util.py`.

    Raises:
        ConfigError: Ray would refuse the bounds or the head.
    """
    top = with_legacy_types(read_mapping(document, where))
    entries = read_mapping(top.get("available_node_types"), f"available_node_types of {where}")
    head = top.get("head_node_type", default_head(top, entries))
    # In a list, since what the file gives may be no key at all.
    if head is not None and head not in [*entries]:
        raise ConfigError(
            f"head_node_type of {where} is '{head}', which is not one of its node types"
            f" ({', '.join(entries)})"
        )
    usual = default_max_workers(top)
    limit = _count(top, "max_workers", where, MOST_NODES if head is None else usual)
    own_limit = min(limit, usual) if head is None else limit

    types = {}
    for name in entries:
        entry = read_mapping(entries[name], f"node type '{name}'")
        types[name] = _autoscaled_type(name, entry, top, own_limit, is_head=name == head)
    num_least = sum(kind.min_workers for kind in types.values())
    if num_least > limit:
        raise ConfigError(
            f"max_workers of {where} is {limit}, below the sum of min_workers {num_least}: Ray"
            " refuses that; raise it"
        )
    if head is None and "max_workers" not in top:
        limit = sum(kind.max_workers for kind in types.values())
    config = AutoscalingConfig(head, limit, types)
    # Nodes of an emulated fleet are started by its script, whatever an autoscaler would allow.
    if provider_type(top) == "fake_multinode":
        return config
    spare = config.max_nodes - sum(kind.standing for kind in types.values())
    possible = {name: _within(kind, spare, limit) for name, kind in types.items()}
    return AutoscalingConfig(head, limit, possible)


def _within(kind: AutoscaledType, spare: int, limit: int) -> AutoscaledType:
    """Return the type with at most `spare` nodes beyond those that stand."""
    most = max(0, kind.standing + spare - kind.is_head)
    if kind.max_workers <= most:
        return kind
    note = (
        f"'{kind.name}' can have {most} workers, not {kind.max_workers}: max_workers of the file is"
        f" {limit}, the minimums of other types included"
    )
    return replace(kind, max_workers=most, note=kind.note or note)


def _autoscaled_type(
    name: str, entry: Json, top: Json, limit: int, *, is_head: bool
) -> AutoscaledType:
    what = f"node type '{name}'"
    least = _count(entry, "min_workers", what, 0)
    # Ray starts no workers of the head's type unless the file says so.
    most = _count(entry, "max_workers", what, 0 if is_head else limit)
    if least > most:
        raise ConfigError(f"min_workers of {what} is {least}, above its max_workers {most}")

    config = read_mapping(entry.get("node_config") or {}, f"node_config of '{name}'")
    stated = read_mapping(entry.get("resources") or {}, f"resources of '{name}'")
    instance_type = instance_type_of(config)
    row = find_instance_type(instance_type or "")
    resources = dict(stated)
    note = ""
    if provider_type(top) in DETECTING:
        resources = {**_detected(row, config, is_head=is_head), **stated}
    elif "GPU" not in stated:
        num_gpus = _gpus_at_start(row, config, top, is_head=is_head)
        if num_gpus:
            # Ray finds the GPUs of a node that runs, and knows none of one that it may launch.
            resources["GPU"] = num_gpus
            note = _unstated_gpus(name, num_gpus, provider_type(top)) if least < most else ""
            most = least
    zones = named_zones(config, top)
    region = read_section(top, "provider").get("region") or region_of(min(zones, default=""))
    return AutoscaledType(
        name=name,
        instance_type=instance_type,
        resources=resources,
        labels=dict(read_section(entry, "labels")),
        min_workers=least,
        max_workers=most,
        is_head=is_head,
        priority=entry.get("priority", 0),
        zones=zones,
        region=str(region),
        note=note,
    )


def _detected(row: InstanceType | None, config: Json, *, is_head: bool) -> dict[str, float]:
    """Return the resources that Ray looks up for an instance type of EC2.

    The memory, which no request names, counts in the score by which Ray chooses a type.
    """
    found: dict[str, float] = {}
    if row is not None:
        found["GPU"] = row.num_gpus
        if not is_head:
            found["memory"] = row.host_memory_bytes
        if row.vcpus:
            found["CPU"] = row.vcpus
        if row.name in instance_types():
            found[f"accelerator_type:{ec2_gpu_name(row)}"] = 1
    attached = accelerator_count(config)
    if attached is not None:
        found["GPU"] = attached
    return found


def _gpus_at_start(row: InstanceType | None, config: Json, top: Json, *, is_head: bool) -> int:
    """Return the GPUs that `ray start` finds on a node whose type states none."""
    commands = top.get("head_start_ray_commands" if is_head else "worker_start_ray_commands")
    for command in commands or ():
        said = _NUM_GPUS.search(str(command))
        if said:
            return int(said[1])
    attached = accelerator_count(config)
    if attached is not None:
        return attached
    return row.num_gpus if row else 0


def _unstated_gpus(name: str, num_gpus: int, provider: object) -> str:
    return (
        f"'{name}' states no GPU under resources, and Ray looks GPUs up on AWS only (provider"
        f" {provider}): no request brings a node of it beyond min_workers; add resources: {{GPU:"
        f" {num_gpus}}}"
    )


def default_max_workers(top: Json) -> int:
    """Return Ray's default for a file without max_workers (`ray/autoscaler/*/defaults.yaml`)."""
    return {"spark": 8, "vsphere": 5}.get(str(provider_type(top)), 2)


def _count(document: Json, key: str, what: str, default: int) -> int:
    value = document.get(key, default)
    if not is_integer(value) or not 0 <= value <= MOST_NODES:
        raise ConfigError(
            f"{key} of {what} must be an integer of at least 0 and at most {MOST_NODES}, not"
            f" {value!r}"
        )
    return value
