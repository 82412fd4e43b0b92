"""Node labels that pods need and how many of them may start.

Selector and affinity say it, and of the same file Karpenter's pools and Kueue's queue.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from planner.errors import ConfigError
from planner.inputs.catalogue import find_instance_type, may_have_gpus
from planner.inputs.documents import Json, quantity, read_list, read_section, read_sections
from planner.inputs.machines import Conditions, Needed, pods_on, possible_machines

LabelTerm = list[tuple[str, str, tuple[str, ...]]]
"""Expressions that hold together: label, operator and values."""
WELL_KNOWN = re.compile(
    r"((beta\.|node\.|topology\.)?kubernetes\.io|failure-domain\.beta\.kubernetes\.io"
    r"|karpenter\.(sh|k8s\.aws|azure\.com)|eks\.amazonaws\.com)/"
)
"""Labels that Karpenter gives nodes itself, whether or not a pool names them."""
POOLS = ("NodePool", "Provisioner")
GPU_RESOURCE = "nvidia.com/gpu"
QUEUE = "kueue.x-k8s.io/queue-name"
ELASTIC = "kueue.x-k8s.io/elastic-job"
MEMORY_SEEN = 0.925
"""Part of a machine's memory that Karpenter counts (setting `VM_MEMORY_OVERHEAD_PERCENT`)."""


@dataclass(frozen=True)
class Flavor:
    """Nodes for which a ClusterQueue of Kueue has a quota of GPUs."""

    queue: str
    labels: LabelTerm
    tolerations: Sequence[Json]
    num_gpus: float


@dataclass(frozen=True)
class OtherDocuments:
    """Documents beside a cluster's, and the flavors of its queue in the order of preference."""

    documents: Sequence[Json] = ()
    flavors: Sequence[Flavor] = ()


@dataclass(frozen=True)
class Places:
    """Nodes for the pods of a group: labels, conditions, how many, and why not more."""

    needed: Needed
    conditions: Conditions
    num_nodes: int
    note: str


def is_pool(document: Json) -> bool:
    """Return True for a NodePool of Karpenter, or a Provisioner as it was called before."""
    is_karpenters = str(document.get("apiVersion", "")).startswith("karpenter.sh/")
    return is_karpenters and document.get("kind") in POOLS


def flavors_of(cluster: Json, documents: Sequence[Json]) -> Iterator[Flavor]:
    """Yield what the queue of a cluster has for GPUs; nothing where the file lacks that queue."""
    metadata = read_section(cluster, "metadata")
    specs = {}
    for document in documents:
        own = read_section(document, "metadata")
        is_kueues = str(document.get("apiVersion")).startswith("kueue.x-k8s.io/")
        if is_kueues and own.get("namespace") in (None, metadata.get("namespace", "default")):
            specs[str(document.get("kind")), str(own.get("name"))] = read_section(document, "spec")
    local = specs.get(("LocalQueue", str(read_section(metadata, "labels").get(QUEUE))), {})
    queue = str(local.get("clusterQueue"))
    spec = specs.get(("ClusterQueue", queue), {})
    for group in read_sections(spec, "resourceGroups"):
        for entry in read_sections(group, "flavors"):
            flavor = specs.get(("ResourceFlavor", str(entry.get("name"))), {})
            labels = read_section(flavor, "nodeLabels").items()
            for quota in read_sections(entry, "resources"):
                number = quantity(quota.get("nominalQuota")) or 0.0
                if "cohort" in spec or "cohortName" in spec:
                    borrowed = quantity(quota.get("borrowingLimit"))
                    number += math.inf if borrowed is None else borrowed
                if quota.get("name") == GPU_RESOURCE:
                    yield Flavor(
                        queue,
                        [(key, "In", (str(value),)) for key, value in labels],
                        read_sections(flavor, "tolerations"),
                        number,
                    )


def find_places(
    pod: Json,
    beside: OtherDocuments,
    num_gpus: int,
    requests: Mapping[str, float],
    num_nodes: tuple[int, int],
    what: str,
) -> Places:
    """Return the values that each node label may have, and the conditions by other operators.

    The node selector and the required node affinity say them, whose terms are alternatives, the
    flavor of the queue that admits the pods, and the pools on whose nodes they may be: those of the
    highest weight, and of lower ones while limits leave pods over.

    Raises:
        ConfigError: the queue has no room for the least number of pods.
    """
    found: dict[str, tuple[str, ...]] = {
        key: (str(value),) for key, value in read_section(pod, "nodeSelector").items()
    }
    affinity = read_section(read_section(pod, "affinity"), "nodeAffinity")
    needed = read_section(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    terms = [
        list(_expressions(term, "matchExpressions", "a node affinity"))
        for term in read_sections(needed, "nodeSelectorTerms")
    ]
    conditions = _add_alternatives(found, terms)
    least, most = map(partial(max, 1), num_nodes)
    if not num_gpus:
        return Places(found, conditions, most, "")

    tolerations = [*read_sections(pod, "tolerations")]
    room = math.inf
    limiter = ""
    if beside.flavors:
        flavor = _admitting(beside.flavors, found, num_gpus * least)
        if flavor is None:
            raise ConfigError(
                f"{what}: no flavor of ClusterQueue '{beside.flavors[0].queue}' has room for its"
                f" {least} nodes, so that Kueue starts none; raise nominalQuota"
            )
        room = flavor.num_gpus / num_gpus
        limiter = f"the quota of ClusterQueue '{flavor.queue}'"
        conditions += _add_alternatives(found, [flavor.labels])
        tolerations += flavor.tolerations

    hosts: list[tuple[float, LabelTerm]] = []
    last = 0.0
    for pool in sorted(filter(is_pool, beside.documents), key=_weight, reverse=True):
        if sum(number for number, _ in hosts) >= most and _weight(pool) < last:
            break
        term = _term_of(pool, tolerations, found)
        number = term and _most_pods(pool, [*conditions, *term], found, num_gpus, requests)
        if term and number:
            hosts.append((number, term))
            last = _weight(pool)
    if hosts:
        conditions += _add_alternatives(found, [term for _, term in hosts])
        in_pools = sum(number for number, _ in hosts)
        if in_pools < room:
            room = in_pools
            limiter = f"limits of NodePool {', '.join(term[0][2][0] for _, term in hosts)}"
    if room >= most:
        return Places(found, conditions, most, "")
    note = f"{what}: {limiter} allows {int(room)} of its {most} nodes"
    return Places(found, conditions, int(room), note)


def _weight(pool: Json) -> float:
    return quantity(read_section(pool, "spec").get("weight")) or 0.0


def _admitting(flavors: Sequence[Flavor], found: Needed, num_gpus: int) -> Flavor | None:
    """Return the first flavor with this quota whose labels the pod's own do not exclude."""
    for flavor in flavors:
        agrees = all({*values} & {*found.get(key, values)} for key, _, values in flavor.labels)
        if agrees and flavor.num_gpus >= num_gpus:
            return flavor
    return None


def _expressions(document: Json, key: str, what: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for expression in read_sections(document, key):
        operator = str(expression.get("operator"))
        values: list[object] = []
        if operator not in ("Exists", "DoesNotExist"):
            values = read_list({"values": None, **expression}, "values", what)
        yield str(expression.get("key")), operator, tuple(map(str, values))


def _add_alternatives(found: dict[str, tuple[str, ...]], terms: list[LabelTerm]) -> Conditions:
    """Add to `found` what all of these terms say; return the conditions that all have."""
    if not terms:
        return []
    for key, operator, _ in terms[0]:
        named = [[each[2] for each in term if each[:2] == (key, "In")] for term in terms]
        if operator != "In" or not all(named):
            continue
        values = dict.fromkeys(value for lists in named for value in lists[0])
        # what was known holds too
        found[key] = tuple(v for v in found.get(key, values) if v in values) or found[key]
    return [
        each for each in terms[0] if each[1] != "In" and all(each in term for term in terms[1:])
    ]


def _term_of(pool: Json, tolerations: Sequence[Json], needed: Needed) -> LabelTerm | None:
    """Return what holds for the nodes of a pool; None if the pod cannot be on them."""
    spec = read_section(pool, "spec")
    template = read_section(spec, "template")
    template = template or {"metadata": {"labels": spec.get("labels")}, "spec": spec}
    inner = read_section(template, "spec")
    name = str(read_section(pool, "metadata").get("name"))
    labels = {
        "karpenter.sh/nodepool": name,
        "karpenter.sh/provisioner-name": name,
        **read_section(read_section(template, "metadata"), "labels"),
    }
    term: LabelTerm = [(key, "In", (str(value),)) for key, value in labels.items()]
    term += _expressions(inner, "requirements", f"NodePool '{name}'")
    allowed = {key: values for key, operator, values in term if operator == "In"}
    known = {key for key, operator, _ in term if operator != "DoesNotExist"}
    for key, values in needed.items():
        if key in allowed and not {*values} & {*allowed[key]}:
            return None
        if key not in known and not WELL_KNOWN.match(key):
            return None
    for taint in read_sections(inner, "taints"):
        is_hard = taint.get("effect") != "PreferNoSchedule"
        if is_hard and not any(_tolerates(each, taint) for each in tolerations):
            return None
    return term


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    is_any = toleration.get("operator") == "Exists"
    return is_any or (toleration.get("value") or "") == (taint.get("value") or "")


def _most_pods(
    pool: Json,
    conditions: Conditions,
    found: Needed,
    num_gpus: int,
    requests: Mapping[str, float],
) -> float:
    """Return how many such pods fit into the limits of a pool; 0 if none of its machines has room.

    Karpenter counts whole machines, whatever is used of them.
    """
    needed = dict(found)
    _add_alternatives(needed, [conditions])
    try:
        machines = possible_machines(needed, conditions, num_gpus, requests, "")
    except ConfigError:
        return 0
    if machines and not any(map(may_have_gpus, machines)):
        return 0
    limits = read_section(read_section(pool, "spec"), "limits")
    limits = limits.get("resources") or limits
    fits = []
    for row in map(find_instance_type, machines):
        if row is not None:
            memory = row.host_memory_bytes * MEMORY_SEEN
            sizes = {"cpu": row.vcpus, "memory": memory, GPU_RESOURCE: row.num_gpus, "nodes": 1}
            fits.append(_num_within(limits, sizes) * max(1, pods_on(row, num_gpus, requests)))
    if not fits:
        fits.append(_num_within(limits, {**requests, GPU_RESOURCE: num_gpus}))
    return max(fits)


def _num_within(limits: Json, sizes: Mapping[str, float | None]) -> float:
    number = math.inf
    for key, size in sizes.items():
        limit = quantity(limits.get(key))
        if limit is not None and size:
            number = min(number, limit // size)
    return number


def device_classes(pod: Json, beside: Sequence[Json]) -> Iterator[str]:
    """Return the classes of devices that a pod claims by templates in the file."""
    claims = [
        claim.get("resourceClaimTemplateName") for claim in read_sections(pod, "resourceClaims")
    ]
    for document in beside:
        name = read_section(document, "metadata").get("name")
        if document.get("kind") == "ResourceClaimTemplate" and name in claims:
            devices = read_section(read_section(read_section(document, "spec"), "spec"), "devices")
            for request in read_sections(devices, "requests"):
                exact = read_section(request, "exactly") or request
                yield str(exact.get("deviceClassName"))
