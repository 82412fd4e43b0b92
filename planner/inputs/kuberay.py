"""KubeRay's documents as cluster-launcher documents: a `RayCluster`, or the one inside a `RayJob`,
`RayService` or `RayCronJob`, has worker groups instead of node types.

Groups are read as Ray's own autoscaler derives them
(`ray/autoscaler/_private/kuberay/autoscaling_config.py`, Ray 2.60) and as KubeRay counts their pods
(`ray-operator/controllers/ray/utils/util.go`, GetWorkerGroupDesiredReplicas): a group is a node
type, its `labels` are the nodes'. Instance type, GPU type, market and zone come from the pod's node
selector and node affinity.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

from planner.errors import ConfigError
from planner.inputs.documents import (
    Document,
    Json,
    is_integer,
    quantity,
    read_mapping,
    read_section,
    read_sections,
)
from planner.inputs.kuberay_drains import drain_notes
from planner.inputs.machines import PART_OF_A_CARD, device_name, possible_machines
from planner.inputs.node_pools import (
    ELASTIC,
    GPU_RESOURCE,
    QUEUE,
    OtherDocuments,
    Places,
    device_classes,
    find_places,
    flavors_of,
)
from planner.inputs.zones import ZONE_LINKS

HEAD = "headgroup"
"""Name of the head's group in Ray's autoscaler."""
ZONES = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
SPOT = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "cloud.google.com/gke-provisioning": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""Node labels that say that a node is a spot one: Karpenter, EKS managed node groups, GKE, AKS."""
GPU_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/class",
    "gpu.nvidia.com/model",
)
"""Node labels that name a GPU: NVIDIA's feature discovery, GKE, the cluster autoscaler on AWS,
Karpenter, CoreWeave."""
DERIVED = "autohet"
"""Key of a node type's `node_config` for labels derived here, which Ray does not know."""
NOT_PLANNED = "autohet-not-planned"
"""Key of a node type's `node_config` with the reason why its GPUs are not planned on."""
ANY_INSTANCE = "InstanceTypes"
"""Key of a node type's `node_config` with the machines of which its nodes may be."""
POD = "autohet-pod"
"""Key of a node type's `node_config` with what a pod requests: vCPUs, bytes of memory, GPUs."""
SHARED = {
    "cloud.google.com/gke-gpu-partition-size": None,
    "cloud.google.com/gke-gpu-sharing-strategy": None,
    "cloud.google.com/gke-max-shared-clients-per-gpu": None,
    "nvidia.com/gpu.sharing-strategy": "none",
    "nvidia.com/gpu.replicas": "1",
    "nvidia.com/mig.config": "all-disabled",
}
"""Node labels that say that pods get parts of a GPU, and the value that says that they do not."""
SHARES = re.compile(
    r"nvidia\.com/mig-.*|.*/gpu[.-]?(shared|sliced|part.*|mem.*|cores?|percent.*)|.*/v(gpu|cuda).*"
)
"""Resources that are parts of a GPU: NVIDIA's plugin, HAMi, and those of Alibaba and Tencent."""
SHARING_ANNOTATIONS = ("gpu-fraction", "gpu-memory")
"""Annotations of a pod that gets a part of a GPU: NVIDIA's KAI scheduler."""
FACTS = ("autohet.io/", "ray.io/accelerator-type")
"""Labels that state facts of a node, wherever a chart can set them."""
_LABEL = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)"
UNBOUNDED = 2**31 - 1
"""Value that the API server writes for an absent `maxReplicas`."""


def is_kuberay(document: object) -> TypeGuard[Json]:
    if not isinstance(document, Mapping):
        return False
    version = str(document.get("apiVersion", ""))
    return version.startswith("ray.io/")


def as_launcher_document(document: Json, where: str, beside: Sequence[Json] = ()) -> Document:
    """Return the same cluster as `ray up` would have it.

    It has a name, and node types with resources, labels and bounds. `notes` says what of the
    document has no effect. beside: the other documents of the file.

    Raises:
        ConfigError: it is another kind of document, or groups lack what their nodes are known by;
        everything that is wrong is named at once.
    """
    spec = _cluster_spec(document, where)
    metadata = read_mapping(document.get("metadata") or {}, f"metadata of {where}")
    scales = bool(spec.get("enableInTreeAutoscaling"))
    head = read_mapping(spec.get("headGroupSpec") or {}, f"headGroupSpec of {where}")
    notes: list[str] = []
    errors: list[str] = []
    types: Document = {}
    around = OtherDocuments(beside, [*flavors_of(document, beside)])

    def add_head() -> None:
        types[HEAD] = _node_type(head, HEAD, (0, 0), notes, around)

    def add_group(group: Json) -> None:
        name = group.get("groupName")
        if not isinstance(name, str) or not name or name in types:
            raise ConfigError(
                f"a worker group of {where} has the groupName {name!r}; each needs one of its own"
            )
        if group.get("suspend"):
            notes.append(f"worker group '{name}' is suspended: it has no pods")
        types[name] = _node_type(group, name, _num_nodes(group, name, scales), notes, around)

    _collect(errors, add_head)
    for group in read_sections(spec, "workerGroupSpecs"):
        _collect(errors, partial(add_group, group))
    for name, kind in types.items():
        if scales and "CPU" not in kind["resources"]:
            errors.append(
                f"group '{name}' names no CPUs, without which Ray's autoscaler does not start; set"
                " cpu under its limits, or num-cpus in rayStartParams"
            )
    if errors:
        raise ConfigError("; ".join(errors))
    annotations = read_mapping(metadata.get("annotations") or {}, f"annotations of {where}")
    is_queued = QUEUE in read_section(metadata, "labels")
    if scales and is_queued and annotations.get(ELASTIC) != "true":
        notes.append(
            f"Kueue refuses a queued cluster with enableInTreeAutoscaling that lacks the annotation"
            f' {ELASTIC}: "true"'
        )
    if spec.get("suspend"):
        notes.append(f"{where} is suspended: it has no pods until `suspend` is false")
    groups = read_sections(spec, "workerGroupSpecs")
    with_gpus = [group for group in groups if types[group["groupName"]]["resources"]["GPU"]]
    notes += drain_notes(with_gpus, annotations)
    provider = {"type": "kuberay", "namespace": metadata.get("namespace", "default")}
    return {
        "cluster_name": str(metadata.get("name", "kuberay")),
        "max_workers": sum(kind["max_workers"] for kind in types.values()),
        "provider": provider,
        "available_node_types": types,
        "head_node_type": HEAD,
        "notes": notes,
        "metadata": _zone_links(metadata, where),
    }


def _zone_links(metadata: Json, where: str) -> Document:
    """The table of zones from an annotation, whose value is YAML text."""
    import yaml

    text = read_section(metadata, "annotations").get(ZONE_LINKS)
    if text is None:
        return {}
    try:
        return {ZONE_LINKS: yaml.safe_load(str(text))}
    except yaml.YAMLError as error:
        raise ConfigError(f"annotation '{ZONE_LINKS}' of {where} is not YAML: {error}") from None


def _collect(errors: list[str], read: Callable[[], None]) -> None:
    """Run `read`; add what is wrong to `errors`."""
    try:
        read()
    except ConfigError as error:
        errors.append(str(error))


def _cluster_spec(document: Json, where: str) -> Json:
    """The spec of the document's RayCluster."""
    kind = document.get("kind")
    spec = read_mapping(document.get("spec") or {}, f"spec of {where}")
    if kind == "RayCronJob":
        spec = read_mapping(spec.get("jobTemplate") or {}, f"jobTemplate of {where}")
    if kind in ("RayJob", "RayCronJob"):
        if "rayClusterSpec" not in spec:
            raise ConfigError(
                f"{where} is a {kind} for a cluster that it only selects; give the RayCluster's own"
                " file"
            )
        return read_mapping(spec["rayClusterSpec"], f"rayClusterSpec of {where}")
    if kind == "RayService":
        return read_mapping(spec.get("rayClusterConfig"), f"rayClusterConfig of {where}")
    if kind != "RayCluster":
        raise ConfigError(
            f"{where} is a {kind} of {document.get('apiVersion')}; a RayCluster, RayJob or"
            " RayService was expected"
        )
    return spec


def _num_nodes(group: Json, name: str, scales: bool) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes of a worker group.

    They are the autoscaler's bounds. Without one, both are the replicas that KubeRay makes.
    """
    if group.get("suspend"):
        return 0, 0
    hosts = _count(group, "numOfHosts", name, 1)
    least = _count(group, "minReplicas", name, 0)
    most = _count(group, "maxReplicas", name, None if scales else UNBOUNDED)
    if least > most:
        raise ConfigError(f"worker group '{name}' has minReplicas {least} above maxReplicas {most}")
    if not scales:
        replicas = max(_count(group, "replicas", name, 0), least)
        least = min(replicas, most)
        most = least
    if most * hosts >= UNBOUNDED:
        raise ConfigError(
            f"worker group '{name}' has no bound: maxReplicas is {most}, the API's default; set"
            " how many nodes of it there may be"
        )
    return least * hosts, most * hosts


def _count(group: Json, key: str, name: str, default: int | None) -> int:
    value = group.get(key, default)
    _refuse_placeholder(value, f"{key} of worker group '{name}'")
    if value is None:
        raise ConfigError(f"worker group '{name}' has no {key}: how many nodes of it there may be")
    if not is_integer(value) or value < 0:
        raise ConfigError(f"{key} of worker group '{name}' must be a count, not {value!r}")
    return value


def _node_type(
    group: Json,
    name: str,
    num_nodes: tuple[int, int],
    notes: list[str],
    beside: OtherDocuments,
) -> Document:
    template = read_mapping(group.get("template") or {}, f"template of group '{name}'")
    pod = read_mapping(template.get("spec") or {}, f"pod of group '{name}'")
    resources = _first_resources(pod)
    shape = _shape(group, resources, name, notes)
    labels = dict(read_section(group, "labels"))
    for key, value in labels.items():
        if not re.fullmatch(rf"({_LABEL}?(\.{_LABEL}?)*/)?{_LABEL}={_LABEL}?", f"{key}={value}"):
            raise ConfigError(
                f"label '{key}: {value}' of group '{name}' is none that Kubernetes and Ray take:"
                " letters, digits, '-', '_' and '.', at most 63, a letter or digit at both ends"
            )
    config, places = _placement(pod, group, shape["GPU"], name, num_nodes, beside)
    notes += filter(None, [places.note])
    found: Document = {
        "resources": shape,
        "labels": labels,
        "min_workers": min(num_nodes[0], places.num_nodes),
        "max_workers": min(num_nodes[1], places.num_nodes),
        "node_config": config,
    }
    reason = _uncounted_gpus(resources, shape["GPU"], name)
    if reason:
        found["node_config"][NOT_PLANNED] = reason
    for theirs, ours in (("priority", "priority"), ("idleTimeoutSeconds", "idle_timeout_s")):
        if group.get(theirs) is not None:
            found[ours] = group[theirs]
    return found


def _shape(group: Json, resources: Json, name: str, notes: list[str]) -> Document:
    """Return Ray's resources of a pod.

    They are the group's own `resources`, else its start parameters, else the first container's
    limits and requests.
    """
    own = read_section(group, "resources")
    start = read_section(group, "rayStartParams")
    limits = read_section(resources, "limits")
    requests = read_section(resources, "requests")
    # Where both are given, Ray's autoscaler reads the limit.
    given = {**requests, **limits}
    shape: Document = {"GPU": _num_gpus(own, start, [*limits.items(), *requests.items()], name)}
    claims = [str(claim.get("name")) for claim in read_sections(resources, "claims")]
    if claims and not shape["GPU"]:
        notes.append(
            f"group '{name}' has devices by resource claims ({', '.join(claims)}), of which Ray"
            " knows nothing: give their number as num-gpus in rayStartParams"
        )
    cpus = None
    if "CPU" in own:
        cpus = _round_up(own["CPU"], f"CPU of group '{name}'")
    elif "num-cpus" in start:
        cpus = _whole(start["num-cpus"], f"num-cpus of group '{name}'")
    elif "cpu" in given:
        cpus = _round_up(given["cpu"], f"cpu of group '{name}'")
    if cpus is not None:
        shape["CPU"] = cpus
    # No request names the memory, but it counts in the score by which Ray chooses a group.
    memory = own.get("memory", given.get("memory"))
    if "memory" in start and "memory" not in own:
        memory = _whole(start["memory"], f"memory in rayStartParams of group '{name}'")
    if quantity(memory) is not None:
        shape["memory"] = _round_up(memory, f"memory of group '{name}'")
    standard = {"CPU", "GPU", "TPU", "memory"}
    for key in own.keys() - standard:
        shape[key] = _round_up(own[key], f"{key} of group '{name}'")
    if not own and "resources" in start:
        shape |= _start_resources(start["resources"], name)
    return shape


def _num_gpus(own: Json, start: Json, given: list[tuple[str, Any]], name: str) -> int:
    """Return the GPUs that Ray counts, of whatever maker."""
    if "GPU" in own:
        return _round_up(own["GPU"], f"GPU of group '{name}'")
    if "num-gpus" in start:
        return _whole(start["num-gpus"], f"num-gpus of group '{name}'")
    for key, value in given:
        if key.endswith("gpu"):
            number = _round_up(value, f"{key} of group '{name}'")
            if number:
                return number
    return 0


def _start_resources(text: object, name: str) -> dict[str, int]:
    """Return the resources of `rayStartParams`: JSON within quotes for a shell, as Ray reads it."""
    try:
        found = json.loads(str(text)[1:-1].replace("\\", ""))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(map(is_integer, found.values())):
        raise ConfigError(
            f"resources in rayStartParams of group '{name}' is {text!r}; Ray's autoscaler reads"
            """ JSON within quotes there, as '"{\\"name\\": 1}"'"""
        )
    return found


def _uncounted_gpus(resources: Json, num_gpus: int, name: str) -> str:
    """Return why a pod's GPUs are not planned on; empty if they may be."""
    given = {**read_section(resources, "requests"), **read_section(resources, "limits")}
    gpus = [key for key, number in given.items() if key.endswith("gpu") and quantity(number)]
    if gpus and not num_gpus:
        return (
            f"group '{name}' tells Ray of no GPUs, though its pods have {gpus[0]}: not planned on"
        )
    if not gpus or GPU_RESOURCE in gpus:
        return ""
    return f"group '{name}' has other GPUs than NVIDIA's ({gpus[0]}): not planned on"


_PLACEHOLDER = re.compile(r"\$\{?\w+\}?")


def _round_up(value: object, what: str) -> int:
    """A quantity, rounded up as Ray does."""
    _refuse_placeholder(value, what)
    number = quantity(value)
    if number is None:
        raise ConfigError(f"{what} must be a quantity such as 8 or 500m, not {value!r}")
    return math.ceil(round(number, 9))


def _whole(value: object, what: str) -> int:
    """A start parameter, which Ray reads as an integer."""
    _refuse_placeholder(value, what)
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError(f"{what} must be a whole number, not {value!r}") from None


def _refuse_placeholder(value: object, what: str) -> None:
    if isinstance(value, str) and _PLACEHOLDER.fullmatch(value):
        raise ConfigError(
            f"{what} is {value}: the file is a template; render it first (`envsubst`)"
        )


def _placement(
    pod: Json,
    group: Json,
    num_gpus: int,
    name: str,
    num_nodes: tuple[int, int],
    beside: OtherDocuments,
) -> tuple[Document, Places]:
    """Instance type, zone and market of the pod's node, and labels derived from it."""
    found: Document = {}
    # Kubernetes reserves the limit of a container that requests none.
    requests = dict.fromkeys(("cpu", "memory", "gpu"), 0.0)
    for container in read_sections(pod, "containers"):
        resources = read_section(container, "resources")
        given = {**read_section(resources, "limits"), **read_section(resources, "requests")}
        for key in ("cpu", "memory", GPU_RESOURCE):
            requests[key.removeprefix("nvidia.com/")] += quantity(given.get(key, 0)) or 0.0
    what = f"group '{name}'"
    places = find_places(pod, beside, num_gpus, requests, num_nodes, what)
    needed = places.needed
    for label, values in needed.items():
        _refuse_placeholder(values[0], f"{label} of {what}")
    machines = possible_machines(needed, places.conditions, num_gpus, requests, what)
    if len(machines) == 1:
        found["InstanceType"] = machines[0]
    elif machines:
        found[ANY_INSTANCE] = list(machines)
    zones = _first(needed, ZONES)
    if len(zones) == 1:
        found["Placement"] = {"AvailabilityZone": zones[0]}
    for label, value in SPOT.items():
        if needed.get(label) == (value,):
            found["InstanceMarketOptions"] = {"MarketType": "spot"}
    products = _first(needed, GPU_LABELS)
    named = [key for key, no in SHARED.items() if key in needed and needed[key] != (no,)]
    shared = [f"{key}={needed[key][0]}" for key in named]
    metadata = read_section(read_section(group, "template"), "metadata")
    annotations = read_section(metadata, "annotations")
    shared += [key for key in SHARING_ANNOTATIONS if key in annotations]
    shared += [product for product in products if PART_OF_A_CARD.search(product)]
    resources = _first_resources(pod)
    limits = read_section(resources, "limits")
    shared += filter(SHARES.fullmatch, {**limits, **read_section(resources, "requests")})
    shared += [name for name in device_classes(pod, beside.documents) if name.startswith("mig.")]
    if shared:
        found[NOT_PLANNED] = f"{what} has parts of a GPU ({shared[0]}): not planned on"
    limits = {**limits, **read_section(group, "resources")}
    derived = {**_gpu_type(products), **_memory(limits), **_stated_facts(group)}
    if derived:
        found[DERIVED] = derived
    found[POD] = requests
    return found, places


def _first_resources(pod: Json) -> Json:
    """Return the resources of the pod's first container, which is Ray's."""
    containers = read_sections(pod, "containers")
    return read_section(containers[0], "resources") if containers else {}


def _stated_facts(group: Json) -> dict[str, str]:
    """Return facts in labels that Ray's autoscaler does not read: start parameters and the pod's.

    The Helm chart can set these, and not the group's own labels.
    """
    metadata = read_section(read_section(group, "template"), "metadata")
    found = dict(read_section(metadata, "labels"))
    text = str(read_section(group, "rayStartParams").get("labels") or "").strip("\"'")
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            found[key.strip()] = value.strip()
    return {key: str(value) for key, value in found.items() if key.startswith(FACTS)}


def _first(needed: Mapping[str, tuple[str, ...]], labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of the first of these labels that is needed; empty if none is."""
    for label in labels:
        if label in needed:
            return needed[label]
    return ()


def _gpu_type(names: tuple[str, ...]) -> dict[str, str]:
    if len(names) != 1:
        return {}
    return {"autohet.io/gpu-type": device_name(names[0])}


def _memory(limits: Json) -> dict[str, str]:
    """Return the host-memory label from a container's limit; empty if it has no limit.

    The container's tmpfs counts towards its limit.
    """
    num_bytes = quantity(limits.get("memory", "")) or 0.0
    gib = f"{num_bytes / 2**30:.3f}"
    return {"autohet.io/host-memory-gib": gib} if float(gib) else {}
