"""Requests that name node types to Ray's autoscaler, checked with the autoscaler's own scheduler.

A request is a list of resource shapes, with label selectors in version 2. Ray packs shapes on
whatever type scores best (`ray/autoscaler/v2/scheduler.py`,
`ray/autoscaler/_private/resource_demand_scheduler.py`): two nodes of one GPU may become one of two,
and eight GPUs without a label may become a dearer machine. So every request is first given to that
scheduler for the file at hand, and it is sent only if the scheduler's answer is exactly the wanted
nodes.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import ConfigError
from planner.inputs.catalogue import find_instance_type
from planner.inputs.cluster import Cluster
from planner.inputs.cluster_documents import instance_type_of

Counts = Mapping[str, int]
Json = Mapping[str, Any]
NOT_ASKED_FOR = frozenset({"memory", "object_store_memory"})
"""Resources that are never requested, since a live node finds out their exact size itself."""


@dataclass(frozen=True)
class NodeRequest:
    """Arguments of `ray.autoscaler.sdk.request_resources`.

    Each node has a shape and a label selector.
    """

    bundles: tuple[Mapping[str, float], ...] = ()
    selectors: tuple[Mapping[str, str], ...] = ()

    @property
    def labelled(self) -> bool:
        return any(self.selectors)


def node_request(
    cluster: Cluster, document: Json, counts: Counts, *, version: int = 2
) -> NodeRequest:
    """Return the simplest request for which Ray launches `counts` nodes by type.

    These nodes come in addition to those that stand already.

    Raises:
        ConfigError: no request names these types in this file; it says what Ray would launch
        instead, and which labels to add.
    """
    types = prepare_types(document)
    limit = max_workers_of(document, types)
    wanted: dict[str, int] = {}
    for name, entry in types.items():
        # Ray launches `min_workers` in any case, and counts them towards a request.
        number = max(counts.get(name, 0), entry["min_workers"])
        if number:
            wanted[name] = number

    instead: dict[str, int] = {}
    for request in _candidates(cluster, types, counts, version):
        found = schedule_launches(document, request, version=version)
        if found == wanted:
            return request
        if not instead:
            instead = found
    prices = {kind.name: kind.usd_per_hour for kind in cluster.node_types}
    raise ConfigError(_refusal(counts, (wanted, instead), limit, version, prices))


def _candidates(
    cluster: Cluster, types: Mapping[str, Json], counts: Counts, version: int
) -> Iterator[NodeRequest]:
    """Yield requests from simple to specific.

    They are by Ray's labels, by all labels of the file, and with the type's own resources too.
    """
    if not any(counts.values()):
        yield NodeRequest()
        return
    # Version 1 knows no labels.
    prefixes = ("ray.io/", "") if version == 2 else (None,)
    for resources in ({"GPU", "CPU"}, None):
        for prefix in prefixes:
            bundles: list[Mapping[str, float]] = []
            selectors: list[Mapping[str, str]] = []
            for kind in cluster.node_types:
                entry = types[kind.name]
                count = counts.get(kind.name, 0)
                bundles += [_shape(entry, kind.num_gpus, resources)] * count
                selectors += [_selector(entry, prefix)] * count
            yield NodeRequest(tuple(bundles), tuple(selectors))


def _shape(entry: Json, num_gpus: int, resources: set[str] | None) -> dict[str, float]:
    """Return the resources to ask for: those named, or all that the type states for None."""
    stated = entry["resources"]
    if resources is None:
        names = stated.keys() - NOT_ASKED_FOR
    else:
        names = resources & stated.keys()

    shape: dict[str, float] = {"GPU": num_gpus}
    for name in sorted(names):
        if stated[name]:
            shape[name] = stated[name]
    return shape


def _selector(entry: Json, prefix: str | None) -> dict[str, str]:
    if prefix is None:
        return {}
    labels = entry.get("labels") or {}
    return {name: value for name, value in labels.items() if name.startswith(prefix)}


def _refusal(
    counts: Counts,
    meant_and_launched: tuple[Counts, Counts],
    limit: int,
    version: int,
    prices: Mapping[str, float | None],
) -> str:
    meant, instead = meant_and_launched
    said = (
        f"Ray's autoscaler would launch {_words(instead, prices)} where {_words(meant, prices)} is"
        " meant"
    )
    if sum(meant.values()) > limit:
        return f"{said}: max_workers of the cluster file is {limit}; raise it, or ask for fewer"
    named = sorted(name for name in counts if counts[name])
    if version != 2:
        resources = "; ".join(f"{name}: resources: {{{name}: 1}}" for name in named)
        return f"{said}, since version 1 knows no labels; give each type a resource ({resources})"
    labels = "; ".join(f"{name}: labels: {{node-type: {name}}}" for name in named)
    return f"{said}, since no label tells their types apart; add one to each ({labels})"


def _words(counts: Counts, prices: Mapping[str, float | None]) -> str:
    """Describe nodes by type, and their price if all have one."""
    present = {name: number for name, number in counts.items() if number}
    if not present:
        return "no node"

    words = ", ".join(f"{number} {name}" for name, number in sorted(present.items()))
    amounts = []
    for name, number in present.items():
        usd_per_hour = prices.get(name)
        if usd_per_hour is None:
            return words
        amounts.append(usd_per_hour * number)
    return f"{words} ({sum(amounts):.2f} $/h)"


def schedule_launches(document: Json, request: NodeRequest, *, version: int = 2) -> dict[str, int]:
    """Return the worker nodes by type that Ray's own scheduler launches for a request.

    The cluster of this file starts from its head alone.
    """
    types = prepare_types(document)
    limit = max_workers_of(document, types)
    head = str(document.get("head_node_type"))

    # The scheduler logs what it would launch; here nothing is launched.
    scheduler_logger = logging.getLogger("ray.autoscaler.v2.scheduler")
    level = scheduler_logger.level
    scheduler_logger.setLevel(logging.WARNING)
    try:
        scheduled = _schedule_v2 if version == 2 else _schedule_v1
        return scheduled(types, head, limit, request)
    finally:
        scheduler_logger.setLevel(level)


def _schedule_v2(
    types: Mapping[str, Json], head: str, limit: int, request: NodeRequest
) -> dict[str, int]:
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.schema import AutoscalerInstance
    from ray.core.generated import instance_manager_pb2 as generated

    pb2: Any = generated

    configs = {}
    for name, entry in types.items():
        most = entry["max_workers"]
        if name == head:
            # The head is a node of its type, but no worker.
            most += 1
        configs[name] = NodeTypeConfig(
            name=name,
            min_worker_nodes=entry["min_workers"],
            max_worker_nodes=most,
            priority=entry.get("priority", 0),
            resources=entry["resources"],
            labels=entry.get("labels") or {},
        )

    instances = []
    if head in types:
        instance = pb2.Instance(
            instance_id="head",
            instance_type=head,
            status=pb2.Instance.ALLOCATED,
            node_kind=pb2.NodeKind.HEAD,
        )
        instances.append(AutoscalerInstance(im_instance=instance))

    scheduling_request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=configs,
        max_num_nodes=limit + 1,
        cluster_resource_constraints=resource_constraints(request),
        current_instances=instances,
    )
    reply = ResourceDemandScheduler().schedule(scheduling_request)
    found = Counter[str]()
    for launch in reply.to_launch:
        found[launch.instance_type] += launch.count
    return dict(found)


def resource_constraints(request: NodeRequest) -> list[Any]:
    """Build the resource constraints that Ray's SDK and GCS would build for this request.

    Ray's own code for it is in `ray.autoscaler.v2.sdk.request_cluster_resources` and in the GCS.
    """
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated import autoscaler_pb2, common_pb2

    demand: Any = autoscaler_pb2
    common: Any = common_pb2

    if not request.bundles:
        return []
    equal = common.LabelSelectorOperator.LABEL_OPERATOR_IN
    made = []
    for bundle, selector in zip(request.bundles, request.selectors, strict=True):
        terms = [(name, equal, [value]) for name, value in sorted(selector.items())]
        selectors = [terms] if terms else None
        made.append(ResourceRequestUtil.make(dict(bundle), label_selectors=selectors))
    grouped = ResourceRequestUtil.group_by_count(made)
    return [demand.ClusterResourceConstraint(resource_requests=grouped)]


def _schedule_v1(
    types: Mapping[str, Json], head: str, limit: int, request: NodeRequest
) -> dict[str, int]:
    from functools import partial

    from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
    from ray.autoscaler._private.resource_demand_scheduler import (
        _add_min_workers_nodes,
        _default_utilization_scorer,
    )

    availability = NodeAvailabilitySummary(node_availabilities={})
    scorer = partial(_default_utilization_scorer, node_availability_summary=availability)
    # Ray's function changes what it is given.
    known = copy.deepcopy({name: dict(entry) for name, entry in types.items()})
    counts = {}
    resources = []
    if head in types:
        counts[head] = 1
        resources.append(dict(known[head]["resources"]))
    bundles: list[Any] = [dict(bundle) for bundle in request.bundles]
    _, _, found = _add_min_workers_nodes(
        resources, counts, known, limit, head, bundles, utilization_scorer=scorer
    )
    return {str(name): int(count) for name, count in found.items() if count}


def prepare_types(document: Json) -> dict[str, dict[str, Any]]:
    """Return a document's node types with bounds and resources as Ray fills them in.

    `ray up` asks EC2 for the resources of an instance type
    (`ray/autoscaler/_private/aws/node_provider.py`); here the catalogue replaces that call.
    """
    head = document.get("head_node_type")
    limit = int(document.get("max_workers", 2))
    found = {}
    for name, entry in document["available_node_types"].items():
        instance_type = instance_type_of(entry.get("node_config") or {})
        row = find_instance_type(instance_type or "")
        stated = dict(entry.get("resources") or {})
        if row is not None and "GPU" not in stated:
            stated["GPU"] = row.num_gpus
        # Ray's default: no further node of the head's type, any number of the others'.
        most = 0 if name == head else limit
        found[name] = {
            **entry,
            "resources": stated,
            "min_workers": entry.get("min_workers", 0),
            "max_workers": entry.get("max_workers", most),
        }
    return found


def max_workers_of(document: Json, types: Mapping[str, Json]) -> int:
    """Return Ray's bound on all workers; for a document without a head, that of its types."""
    if "max_workers" in document or "head_node_type" in document:
        return int(document.get("max_workers", 2))
    return sum(entry["max_workers"] for entry in types.values())
