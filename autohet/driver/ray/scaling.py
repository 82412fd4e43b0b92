"""Asking Ray's autoscaler for the fleet: a standing request for whole nodes, which brings replacements too.

Workers and agents reserve no resources, so without this request Ray sees no demand and starts no node beyond `min_workers`.
The request names shapes of whole nodes (their GPUs, and CPUs where the file states them), not node types: the autoscaler packs
large shapes first, so that asking for every type up to its `max_workers` brings exactly those.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from planner.cluster import Cluster, cluster_from_document
from planner.errors import ConfigError

logger = logging.getLogger("autohet")
LAUNCHED_FROM = Path("~/ray_bootstrap_config.yaml")  # where `ray up` leaves its file on the head node


def launched_from(path: Path = LAUNCHED_FROM) -> dict[str, Any] | None:
    """The cluster-launcher document that this head node was started from; None where there is none that can be used."""
    try:
        document = yaml.safe_load(path.expanduser().read_text())
        cluster_from_document(document)
    except (OSError, yaml.YAMLError):
        return None
    except ConfigError as error:
        logger.warning("%s, from which this cluster was started, is not used: %s", path, error)
        return None
    return dict(document)


def wanted_nodes(cluster: Cluster, wish: Mapping[str, int] | None) -> dict[str, int]:
    """Number of nodes by type: what the job wishes, else every type up to its `max_workers`.

    Raises:
        ConfigError: the wish names a type that the cluster has not, or more of it than there may be.
    """
    most = {kind.name: kind.max_nodes for kind in cluster.node_types}
    for name, count in (wish or {}).items():
        if name not in most:
            raise ConfigError(
                f"elastic.request_nodes names '{name}'; cluster '{cluster.name}' has {', '.join(sorted(most))}"
            )
        if count > most[name]:
            raise ConfigError(
                f"elastic.request_nodes asks for {count} of '{name}', whose max_workers is {most[name]}: raise that, or ask for fewer"
            )
    return dict(most if wish is None else wish)


def bundles_of(cluster: Cluster, document: Mapping[str, Any], counts: Mapping[str, int]) -> list[dict[str, float]]:
    """One resource shape for each node: all its GPUs, and its CPUs where the document states them."""
    found = []
    for kind in cluster.node_types:
        stated = document["available_node_types"][kind.name].get("resources") or {}
        shape = {"GPU": kind.num_gpus, **({"CPU": stated["CPU"]} if stated.get("CPU") else {})}
        found += [shape] * counts.get(kind.name, 0)
    return found


class FleetRequest:
    """The standing request of one job; `withdraw` lets the autoscaler take idle nodes down after its own time-out.

    A Ray cluster has one such request: two jobs with wishes of their own on one cluster overwrite each other's.
    """

    def __init__(self, bundles: Sequence[Mapping[str, float]]) -> None:
        self.bundles = [dict(bundle) for bundle in bundles]

    def ask(self) -> None:
        if self.bundles:
            logger.info("Asking Ray's autoscaler for %d nodes", len(self.bundles))
            request_resources(bundles=self.bundles)

    def withdraw(self) -> None:
        try:
            if self.bundles:
                request_resources(bundles=[])
        except (RayError, RuntimeError) as error:
            logger.warning("the request for nodes was not withdrawn: %s", error)
