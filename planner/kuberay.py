"""KubeRay's documents as cluster-launcher documents: a `RayCluster`, or the one in a `RayJob`, has
worker groups instead of node types.

As Ray's own autoscaler derives them (`ray/autoscaler/_private/kuberay/autoscaling_config.py`, Ray
2.60): a group is a node type, its `labels` are the nodes', `maxReplicas` times `numOfHosts` their
number. Instance type, market and zone are read from the node selector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from planner.documents import read_mapping
from planner.errors import ConfigError

HEAD = "headgroup"
"""What Ray's autoscaler calls the head's group."""
GPU_RESOURCE = "nvidia.com/gpu"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
SPOT = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
}
"""Node labels that say that a node is a spot one: Karpenter, EKS managed node groups, GKE."""


def is_kuberay(document: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(document, Mapping) and str(document.get("apiVersion", "")).startswith(
        "ray.io/"
    )


def as_launcher_document(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same cluster as `ray up` would have it: name, node types with resources, labels and
    bounds.

    Raises:
        ConfigError: it is another kind of document, or a group lacks what its nodes are known by.
    """
    kind = document.get("kind")
    spec = read_mapping(document.get("spec") or {}, f"spec of {where}")
    if kind == "RayJob":
        if "rayClusterSpec" not in spec:
            raise ConfigError(
                f"{where} is a RayJob for a cluster that it only selects; give the RayCluster's own"
                " file"
            )
        spec = read_mapping(spec["rayClusterSpec"], f"rayClusterSpec of {where}")
    elif kind != "RayCluster":
        raise ConfigError(
            f"{where} is a {kind} of {document.get('apiVersion')}; a RayCluster or RayJob was"
            " expected"
        )
    metadata = read_mapping(document.get("metadata") or {}, f"metadata of {where}")
    types = {
        HEAD: _node_type(
            read_mapping(spec.get("headGroupSpec") or {}, f"headGroupSpec of {where}"), HEAD
        )
    }
    for group in spec.get("workerGroupSpecs") or []:
        name = group.get("groupName")
        if not isinstance(name, str) or not name or name in types:
            raise ConfigError(
                f"a worker group of {where} has the groupName {name!r}; each needs one of its own"
            )
        types[name] = _node_type(group, name)
    provider = {"type": "kuberay", "namespace": metadata.get("namespace", "default")}
    return {
        "cluster_name": str(metadata.get("name", "kuberay")),
        "max_workers": sum(of["max_workers"] for of in types.values()),
        "provider": provider,
        "available_node_types": types,
        "head_node_type": HEAD,
    }


def _node_type(group: Mapping[str, Any], name: str) -> dict[str, Any]:
    template = read_mapping(group.get("template") or {}, f"template of group '{name}'")
    pod = read_mapping(template.get("spec") or {}, f"pod of group '{name}'")
    containers = pod.get("containers") or [{}]
    resources = read_mapping(containers[0].get("resources") or {}, f"resources of group '{name}'")
    limits = {**(resources.get("limits") or {}), **(group.get("resources") or {})}
    given = {**(resources.get("requests") or {}), **limits}
    start = group.get("rayStartParams") or {}
    shape = {"GPU": int(start.get("num-gpus", given.get("GPU", given.get(GPU_RESOURCE, 0))))}
    cpus = start.get("num-cpus", given.get("CPU", given.get("cpu")))
    if cpus is not None:
        shape["CPU"] = _cores(str(cpus))
    hosts = group.get("numOfHosts", 1)
    return {
        "resources": shape,
        "labels": {**_market(pod), **_memory(limits.get("memory")), **(group.get("labels") or {})},
        "min_workers": 0 if name == HEAD else group.get("minReplicas", 0) * hosts,
        "max_workers": 0 if name == HEAD else _bound(group, name) * hosts,
        "node_config": _placement(pod),
    }


def _cores(quantity: str) -> int:
    """Kubernetes' quantity of CPUs, rounded up as Ray does."""
    return -(-int(quantity[:-1]) // 1000) if quantity.endswith("m") else -int(-float(quantity) // 1)


_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(?:([KMGTP])(i?))?")


def _memory(quantity: object) -> dict[str, str]:
    """Of a container, whose tmpfs counts to it, by Kubernetes' quantity of bytes; nothing where it
    has no limit or one of another form.
    """
    match = _QUANTITY.fullmatch(str(quantity or ""))
    if match is None:
        return {}
    number, unit, binary = match.groups()
    num_bytes = float(number) * (1024 if binary else 1000) ** " KMGTP".index(unit or " ")
    gib = f"{num_bytes / 2**30:.3f}"
    return {"autohet.io/host-memory-gib": gib} if float(gib) else {}


def _bound(group: Mapping[str, Any], name: str) -> int:
    if not isinstance(group.get("maxReplicas"), int):
        raise ConfigError(
            f"worker group '{name}' has no maxReplicas: how many nodes of it there may be"
        )
    return int(group["maxReplicas"])


def _market(pod: Mapping[str, Any]) -> dict[str, str]:
    selector = pod.get("nodeSelector") or {}
    spot = any(selector.get(label) == value for label, value in SPOT.items())
    return {"autohet.io/spot": "true"} if spot else {}


def _placement(pod: Mapping[str, Any]) -> dict[str, Any]:
    selector = pod.get("nodeSelector") or {}
    found: dict[str, Any] = {}
    if INSTANCE_TYPE in selector:
        found["InstanceType"] = selector[INSTANCE_TYPE]
    if ZONE in selector:
        found["Placement"] = {"AvailabilityZone": selector[ZONE]}
    return found
