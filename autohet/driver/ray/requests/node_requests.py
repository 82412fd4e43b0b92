"""Requests that name node types to Ray's autoscaler, checked with the autoscaler's own scheduler.

A request is a list of resource shapes, with label selectors in version 2. Ray packs shapes on
whatever type scores best (`ray/autoscaler/v2/scheduler.py`,
`ray/autoscaler/_private/resource_demand_scheduler.py`): two nodes of one GPU may become one of two,
and eight GPUs without a label may become a dearer machine. So every request is first given to that
scheduler for the file at hand, and it is sent only if the scheduler's answer is exactly the wanted
nodes.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import ConfigError
from planner.inputs.autoscaling import AutoscaledType, AutoscalingConfig, autoscaling_config
from planner.inputs.cluster import Cluster
from planner.inputs.cluster_documents import provider_type
from planner.inputs.documents import Document, Json

Counts = Mapping[str, int]
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

    The head and the nodes of `min_workers` are among them: Ray has these in any case.

    Raises:
        ConfigError: no request names these types in this file; it says what Ray would launch
        instead, and which labels to add.
    """
    config = autoscaling_config(document)
    wanted = config.workers(counts, version)
    instead: dict[str, int] = {}
    for request in _candidates(config, counts, wanted, version):
        found = simulate_launches(config, request, version)
        if found == wanted:
            return request
        if not instead:
            instead = found
    prices = {kind.name: kind.usd_per_hour for kind in cluster.node_types}
    said = (
        f"Ray's autoscaler would launch {_words(instead, prices)} where {_words(wanted, prices)} is"
        " meant"
    )
    raise ConfigError(_refusal(said, config, wanted, provider_type(document), version))


def _candidates(
    config: AutoscalingConfig, counts: Counts, wanted: Counts, version: int
) -> Iterator[NodeRequest]:
    """Yield requests from simple to specific.

    They are by Ray's labels, by all labels of the file, and with the type's own resources too; each
    for `counts` alone, then with all nodes that stand.
    """
    workers = {name: counts.get(name, 0) - kind.is_head for name, kind in config.types.items()}
    if max(workers.values(), default=0) <= 0:
        yield NodeRequest()
        return
    # Version 1 knows no labels.
    prefixes = ("ray.io/", "") if version == 2 else (None,)
    for resources in ({"GPU", "CPU"}, None):
        for prefix in prefixes:
            for numbers in (workers, wanted):
                yield _request(config, numbers, resources, prefix)


def _request(
    config: AutoscalingConfig, workers: Counts, resources: set[str] | None, prefix: str | None
) -> NodeRequest:
    """Return a request for these workers and the head, which would else take a worker's place."""
    bundles: list[Mapping[str, float]] = []
    selectors: list[Mapping[str, str]] = []
    for name, kind in config.types.items():
        if kind.resources.get("GPU"):
            number = max(0, workers.get(name, 0)) + kind.is_head
            bundles += [_shape(kind.resources, resources)] * number
            selectors += [_selector(kind.labels, prefix)] * number
    return NodeRequest(tuple(bundles), tuple(selectors))


def _shape(stated: Mapping[str, float], resources: set[str] | None) -> dict[str, float]:
    """Return the resources to ask for: those named, or all that the type states for None."""
    if resources is None:
        names = stated.keys() - NOT_ASKED_FOR
    else:
        names = resources & stated.keys()

    shape: dict[str, float] = {"GPU": stated["GPU"]}
    for name in sorted(names):
        if stated[name]:
            shape[name] = stated[name]
    return shape


def _selector(labels: Mapping[str, str], prefix: str | None) -> dict[str, str]:
    if prefix is None:
        return {}
    return {name: value for name, value in labels.items() if name.startswith(prefix)}


def _refusal(
    said: str, config: AutoscalingConfig, wanted: Counts, provider: object, version: int
) -> str:
    """Return the message that Ray would launch other nodes (`said`), with the remedy."""
    if sum(wanted.values()) > config.max_workers:
        return (
            f"{said}: max_workers of the cluster file is {config.max_workers}; raise it, or ask for"
            " fewer"
        )
    if version != 2:
        resources = "; ".join(f"{name}: resources: {{{name}: 1}}" for name in sorted(wanted))
        return f"{said}, since version 1 knows no labels; give each type a resource ({resources})"
    labels = "; ".join(f"{name}: labels: {{node-type: {name}}}" for name in sorted(wanted))
    said = f"{said}, since no label tells their types apart; add one to each ({labels})"
    if provider != "kuberay":
        return said
    resources = "; ".join(
        f'{name}: resources: \'"{{\\"{name}\\": 1}}"\'' for name in sorted(wanted)
    )
    return f"{said}, or a resource in rayStartParams, as the Helm chart can ({resources})"


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


def simulate_launches(
    config: AutoscalingConfig, request: NodeRequest, version: int = 2
) -> dict[str, int]:
    """Return the worker nodes by type that Ray's own scheduler launches for a request.

    The cluster of this file starts from its head alone.
    """
    # The scheduler logs what it would launch; here nothing is launched.
    scheduler_logger = logging.getLogger("ray.autoscaler.v2.scheduler")
    level = scheduler_logger.level
    scheduler_logger.setLevel(logging.WARNING)
    try:
        scheduled = _schedule_v2 if version == 2 else _schedule_v1
        return scheduled(config, request)
    finally:
        scheduler_logger.setLevel(level)


def _schedule_v2(config: AutoscalingConfig, request: NodeRequest) -> dict[str, int]:
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.schema import AutoscalerInstance
    from ray.core.generated import instance_manager_pb2 as generated

    pb2: Any = generated

    configs = {}
    for name, kind in config.types.items():
        configs[name] = NodeTypeConfig(
            name=name,
            min_worker_nodes=kind.min_workers,
            # The head is a node of its type, but no worker.
            max_worker_nodes=kind.max_nodes,
            priority=kind.priority,
            resources=dict(kind.resources),
            labels=dict(kind.labels),
        )

    instances = []
    if config.head is not None:
        instance = pb2.Instance(
            instance_id="head",
            instance_type=config.head,
            status=pb2.Instance.ALLOCATED,
            node_kind=pb2.NodeKind.HEAD,
        )
        instances.append(AutoscalerInstance(im_instance=instance))

    scheduling_request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=configs,
        max_num_nodes=config.max_nodes,
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


def _schedule_v1(config: AutoscalingConfig, request: NodeRequest) -> dict[str, int]:
    from functools import partial

    from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
    from ray.autoscaler._private.resource_demand_scheduler import (
        _add_min_workers_nodes,
        _default_utilization_scorer,
    )

    availability = NodeAvailabilitySummary(node_availabilities={})
    scorer = partial(_default_utilization_scorer, node_availability_summary=availability)
    known = {name: _as_entry(kind) for name, kind in config.types.items()}
    counts = {}
    resources = []
    if config.head is not None:
        counts[config.head] = 1
        resources.append(dict(known[config.head]["resources"]))
    bundles: list[Any] = [dict(bundle) for bundle in request.bundles]
    _, _, found = _add_min_workers_nodes(
        resources,
        counts,
        known,
        config.max_workers,
        config.head or "",
        bundles,
        utilization_scorer=scorer,
    )
    return {str(name): int(count) for name, count in found.items() if count}


def _as_entry(kind: AutoscaledType) -> Document:
    return {
        "resources": dict(kind.resources),
        "labels": dict(kind.labels),
        "min_workers": kind.min_workers,
        "max_workers": kind.max_workers,
    }
