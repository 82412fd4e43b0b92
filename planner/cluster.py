"""Cluster (what may exist: a Ray cluster-launcher YAML) and fleet (what is alive: a value with its
generation).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from planner.catalogue import canonical_gpu_type, find_gpu_type, instance_types
from planner.documents import check_keys, read_mapping
from planner.errors import ConfigError
from planner.kuberay import as_launcher_document, is_kuberay

GIB = 2**30
_T = TypeVar("_T")
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
_NODE_TYPE_KEYS = frozenset(
    {
        "resources",
        "labels",
        "node_config",
        "min_workers",
        "max_workers",
        "docker",
        "worker_setup_commands",
        "worker_image",
        "pod_config",
        "object_store_memory",
        "idle_timeout_s",
        "priority",
        "initialization_commands",
    }
)


@dataclass(frozen=True, slots=True)
class NodeType:
    """Equal machines. Bandwidths are bytes per second in one direction: intra-node per GPU,
    inter-node per node.

    usd_per_hour is per node, None where neither catalogue nor label names a price; num_gpus may be
    0 (a head node, never planned on). slowdown: its compute takes this many times what the profile
    says of its GPUs, as measured on live machines that throttle or share. host_memory_bytes: of the
    machine (or of its container), None where nobody says.
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
        """Of what tells types apart: searches look them up tens of thousands of times."""
        return hash((self.name, self.slowdown))


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the fleet; its workers are named `<node>/<gpu index>`."""

    name: str
    node_type: NodeType

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(f"{self.name}/{index}" for index in range(self.node_type.num_gpus))


def node_of(worker: str) -> str:
    """The name of a worker's node, also of one that is in no fleet any more."""
    return worker.rsplit("/", 1)[0]


@dataclass(frozen=True)
class Fleet:
    """What is alive in one generation. Node names are unique."""

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

    def usd_per_hour(self) -> float | None:
        """Price of all nodes; None where one has no price."""
        prices = [node.node_type.usd_per_hour for node in self.nodes]
        return (
            None
            if any(price is None for price in prices)
            else sum(price for price in prices if price is not None)
        )


def _examples(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") if names else "no GPUs"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What may exist. `node_types` has those with GPUs only."""

    name: str
    node_types: tuple[NodeType, ...]

    def fleet(self) -> Fleet:
        """The largest fleet: `max_nodes` of each type, named `<type>-<index>`, generation 0."""
        nodes = [
            Node(f"{kind.name}-{i}", kind)
            for kind in self.node_types
            for i in range(kind.max_nodes)
        ]
        return Fleet(generation=0, nodes=tuple(nodes))


def node_type_from_labels(
    name: str,
    labels: Mapping[str, str],
    num_gpus: int | None,
    instance_type: str | None = None,
    max_nodes: int = 1,
) -> NodeType:
    """A node type from its labels, which override the catalogue's row of `instance_type`.

    num_gpus None takes the catalogue's number. ConfigError names the label that would supply a
    missing fact.
    """
    for key in labels:
        if key.startswith(LABEL_PREFIX) and key not in LABELS:
            raise ConfigError(
                f"unknown label '{key}' on node type '{name}'; known: {', '.join(sorted(LABELS))}"
            )
    row = instance_types().get(instance_type or "")
    gpu_type = (
        _text(labels, "gpu-type")
        or labels.get(RAY_ACCELERATOR_LABEL)
        or (row.gpu_type if row else None)
    )
    if gpu_type is None:
        raise _missing(name, "gpu-type", instance_type)
    if row and canonical_gpu_type(gpu_type) == canonical_gpu_type(row.gpu_type):
        gpu_type = row.gpu_type
    gpu_type = canonical_gpu_type(gpu_type)
    device = find_gpu_type(gpu_type)
    memory, host_memory = (
        _number(labels, "gpu-memory-gib", name),
        _number(labels, "host-memory-gib", name),
    )
    intra, inter = (
        _number(labels, "intra-node-gbps", name),
        _number(labels, "inter-node-gbps", name),
    )
    price = _number(labels, "usd-per-hour", name, zero=True)
    known_memory = row.gpu_memory_bytes if row else (device.memory_bytes if device else None)
    return NodeType(
        name=name,
        gpu_type=gpu_type,
        num_gpus=(
            num_gpus
            if num_gpus is not None
            else _known(row.num_gpus if row else None, name, "gpu-type", instance_type)
        ),
        gpu_memory_bytes=int(
            _known(memory * GIB if memory else known_memory, name, "gpu-memory-gib", instance_type)
        ),
        intra_node_bytes_per_s=_known(
            intra * 1e9 / 8 if intra else (row.intra_node_bytes_per_s if row else None),
            name,
            "intra-node-gbps",
            instance_type,
        ),
        inter_node_bytes_per_s=_known(
            inter * 1e9 / 8 if inter else (row.inter_node_bytes_per_s if row else None),
            name,
            "inter-node-gbps",
            instance_type,
        ),
        usd_per_hour=(row.usd_per_hour if row else None) if price is None else price,
        spot=_flag(labels, "spot", name),
        zone=_text(labels, "zone") or "",
        max_nodes=max_nodes,
        host_memory_bytes=(
            int(host_memory * GIB) if host_memory else (row.host_memory_bytes if row else None)
        ),
    )


def _known(value: _T | None, name: str, label: str, instance_type: str | None) -> _T:
    if value is None:
        raise _missing(name, label, instance_type)
    return value


def _missing(name: str, label: str, instance_type: str | None) -> ConfigError:
    source = (
        f"instance type '{instance_type}' is not in the catalogue"
        if instance_type
        else "it names no instance type"
    )
    return ConfigError(
        f"node type '{name}' has no {label.replace('-', ' ')}: {source}; set the label"
        f" '{LABEL_PREFIX}{label}'"
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
    """Reads a Ray cluster-launcher YAML; ConfigError where it cannot be read or is wrong."""
    return cluster_from_document(read_cluster_yaml(path), f"cluster '{path}'")


def read_cluster_yaml(path: str | Path) -> object:
    """What a cluster file holds, whatever that is; KubeRay's as a cluster-launcher document.

    ConfigError where it cannot be read.
    """
    import yaml

    try:
        document: object = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read cluster '{path}': {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cluster '{path}' is no text: byte {error.start} is not UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"cluster '{path}' is not YAML: {error}") from None
    return as_launcher_document(document, f"cluster '{path}'") if is_kuberay(document) else document


def cluster_from_document(document: object, where: str = "cluster") -> Cluster:
    """The node types with GPUs of a Ray cluster-launcher document."""
    top = read_mapping(document, where)
    check_keys(top, where, _TOP_KEYS, frozenset({"cluster_name", "available_node_types"}))
    types = read_mapping(top["available_node_types"], "available_node_types")
    head = top.get("head_node_type")
    limit = top.get("max_workers", 2)
    found = [
        _node_type(name, read_mapping(types[name], f"node type '{name}'"), top, name == head, limit)
        for name in types
    ]
    with_gpus = tuple(
        kind for kind in found if kind is not None and kind.num_gpus > 0 and kind.max_nodes > 0
    )
    if not with_gpus:
        unknown = "".join(
            f"; {text}" for text in (_unknown_instance(name, types[name]) for name in types) if text
        )
        raise ConfigError(f"no node type of {where} has GPUs and max_workers above 0{unknown}")
    return Cluster(name=str(top["cluster_name"]), node_types=with_gpus)


_TOP_KEYS = frozenset(
    {
        "cluster_name",
        "max_workers",
        "upscaling_speed",
        "idle_timeout_minutes",
        "docker",
        "provider",
        "auth",
        "available_node_types",
        "head_node_type",
        "file_mounts",
        "cluster_synced_files",
        "file_mounts_sync_continuously",
        "rsync_exclude",
        "rsync_filter",
        "initialization_commands",
        "setup_commands",
        "head_setup_commands",
        "worker_setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
        "no_restart",
        "min_workers",
        "initial_workers",
        "autoscaling_mode",
        "target_utilization_fraction",
        "head_node",
        "worker_nodes",
        "metadata",
    }
)


def _unknown_instance(name: str, entry: Mapping[str, Any]) -> str:
    """Why a node type may have GPUs and nobody knows."""
    instance = (entry.get("node_config") or {}).get("InstanceType")
    if instance in instance_types() or "GPU" in (entry.get("resources") or {}):
        return ""
    named = (
        f"instance type '{instance}' of '{name}' is not in the catalogue of GPU instances"
        if instance
        else (f"'{name}' names no instance type")
    )
    return f"{named}, so its GPUs would have to be said under resources"


def _node_type(
    name: str, entry: Mapping[str, Any], top: Mapping[str, Any], is_head: bool, limit: int
) -> NodeType | None:
    check_keys(entry, f"node type '{name}'", _NODE_TYPE_KEYS)
    labels = {
        str(k): v for k, v in read_mapping(entry.get("labels") or {}, f"labels of '{name}'").items()
    }
    for key, value in labels.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"label '{key}' of node type '{name}' must be a string (quote it), not {value!r}"
            )
    config = read_mapping(entry.get("node_config") or {}, f"node_config of '{name}'")
    instance = config.get("InstanceType")
    gpus = read_mapping(entry.get("resources") or {}, f"resources of '{name}'").get("GPU")
    if not gpus and (gpus == 0 or instance not in instance_types()):
        return None
    count = entry.get("max_workers", limit)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(
            f"max_workers of node type '{name}' must be an integer of at least 0, not {count!r}"
        )
    labels = _spot_and_zone(config, top) | labels
    return node_type_from_labels(
        name, labels, int(gpus) if gpus else None, instance, count + is_head
    )


def _spot_and_zone(config: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, str]:
    """Spot market and zone as the launcher's own keys say them; labels override."""
    found: dict[str, str] = {}
    if (config.get("InstanceMarketOptions") or {}).get("MarketType") == "spot":
        found[LABEL_PREFIX + "spot"] = "true"
    zone = (config.get("Placement") or {}).get("AvailabilityZone") or (
        top.get("provider") or {}
    ).get("availability_zone")
    if isinstance(zone, str) and "," not in zone:
        found[LABEL_PREFIX + "zone"] = zone
    return found
