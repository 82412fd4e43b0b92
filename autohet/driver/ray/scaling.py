"""Asking Ray's autoscaler for the fleet: a standing request for whole nodes, which brings
replacements too.

Workers and agents reserve no resources, so without this request Ray sees no demand and starts no
node beyond `min_workers`. What is asked for is what the best plan of the largest fleet uses: a node
that no plan would use is not bought. The request names shapes of whole nodes (their GPUs, and CPUs
where the file states them), with the labels of their type where the file gives Ray's own: without
them the autoscaler would put the shapes of two small nodes on one large one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from autohet.driver.control.buying import Market, completed, usd_per_hour
from autohet.driver.emulate.fleet import is_emulated
from autohet.driver.sources.spot_prices import SpotType, spot_types
from autohet.runtime.job import Job
from planner.cluster import Cluster, cluster_from_document
from planner.errors import ConfigError

logger = logging.getLogger("autohet")
ANY_PRICE = (
    ", for the fastest plan at any price; parallelism.objective: cost asks for the least $ a token,"
    " max_usd_per_hour bounds them"
)
LAUNCHED_FROM = Path(
    "~/ray_bootstrap_config.yaml"
)  # where `ray up` leaves its file on the head node


def launched_from(path: Path = LAUNCHED_FROM) -> dict[str, Any] | None:
    """The cluster-launcher document that this head node was started from; None where there is none
    that can be used.
    """
    try:
        document = yaml.safe_load(path.expanduser().read_text())
        cluster_from_document(document)
    except (OSError, yaml.YAMLError):
        return None
    except ConfigError as error:
        logger.warning("%s, from which this cluster was started, is not used: %s", path, error)
        return None
    return dict(document)


def check_wish(cluster: Cluster, wish: Mapping[str, int]) -> None:
    """The nodes that the job wishes may exist.

    Raises:
        ConfigError: the wish names a type that the cluster has not, or more of it than there may
        be.
    """
    most = {kind.name: kind.max_nodes for kind in cluster.node_types}
    for name, count in wish.items():
        if name not in most:
            raise ConfigError(
                f"elastic.request_nodes names '{name}'; cluster '{cluster.name}' has"
                f" {', '.join(sorted(most))}"
            )
        if count > most[name]:
            raise ConfigError(
                f"elastic.request_nodes asks for {count} of '{name}', whose max_workers is"
                f" {most[name]}: raise that, or ask for fewer"
            )


def bundles_of(
    cluster: Cluster, document: Mapping[str, Any], counts: Mapping[str, int]
) -> list[dict[str, float]]:
    """One resource shape for each node: all its GPUs, and its CPUs where the document states
    them.
    """
    found = []
    for kind in cluster.node_types:
        stated = document["available_node_types"][kind.name].get("resources") or {}
        shape = {"GPU": kind.num_gpus, **({"CPU": stated["CPU"]} if stated.get("CPU") else {})}
        found += [shape] * counts.get(kind.name, 0)
    return found


def selectors_of(
    cluster: Cluster, document: Mapping[str, Any], counts: Mapping[str, int]
) -> list[dict[str, str]]:
    """For each of `bundles_of`, the labels that a node must have: Ray's own of its type in the
    document, which is where the autoscaler looks before a node exists. A request has selectors for
    all of its bundles or for none.
    """
    found = []
    for kind in cluster.node_types:
        labels = document["available_node_types"][kind.name].get("labels") or {}
        own = {name: value for name, value in labels.items() if name.startswith("ray.io/")}
        found += [own] * counts.get(kind.name, 0)
    return found if all(found) else []


def standing_nodes(cluster: Cluster, document: Mapping[str, Any]) -> dict[str, int]:
    """Nodes by type that stand whatever is asked for."""
    types = document.get("available_node_types", {})
    return {
        kind.name: types.get(kind.name, {}).get("min_workers", 0) for kind in cluster.node_types
    }


class FleetRequest:
    """The standing request of one job; `withdraw` lets the autoscaler take idle nodes down after
    its own time-out.

    A Ray cluster has one such request: two jobs with wishes of their own on one cluster overwrite
    each other's. counts: nodes by type; hint: what is said of them besides.
    """

    def __init__(
        self,
        cluster: Cluster,
        document: Mapping[str, Any],
        counts: Mapping[str, int],
        hint: str = "",
    ) -> None:
        self.cluster, self.counts, self.hint = cluster, dict(counts), hint
        self._document = document

    @property
    def bundles(self) -> list[dict[str, float]]:
        return bundles_of(self.cluster, self._document, self.counts)

    @property
    def selectors(self) -> list[dict[str, str]]:
        return selectors_of(self.cluster, self._document, self.counts)

    @property
    def spot_types(self) -> dict[str, SpotType]:
        return spot_types(self.cluster, self._document)

    @property
    def market(self) -> Market:
        """As it stands now."""
        return Market(self.cluster, standing_nodes(self.cluster, self._document), dict(self.counts))

    def ask(self) -> None:
        if bundles := self.bundles:
            what = ", ".join(
                f"{count} {name}" for name, count in sorted(self.counts.items()) if count
            )
            usd = usd_per_hour(self.counts, self.cluster)
            logger.info(
                "Asking Ray's autoscaler for %s: $%.2f an hour by the file's prices%s",
                what,
                usd,
                self.hint,
            )
            request_resources(bundles=bundles, bundle_label_selectors=self.selectors or None)

    def change(self, counts: Mapping[str, int]) -> None:
        """Ask for these from now on."""
        self.counts = dict(counts)
        request_resources(bundles=self.bundles, bundle_label_selectors=self.selectors or None)

    def withdraw(self) -> None:
        try:
            if self.bundles:
                request_resources(bundles=[])
        except (RayError, RuntimeError) as error:
            logger.warning("the request for nodes was not withdrawn: %s", error)


def fleet_request(
    job: Job,
    cluster: Cluster | None,
    document: Mapping[str, Any],
    address: str | None,
    best: Mapping[str, int] | None,
) -> FleetRequest:
    """What to ask Ray's autoscaler for: the nodes that the job wishes, else those that the best
    plan of the largest fleet uses. Nothing of a fleet that is emulated here: its nodes are started
    at once.
    """
    if cluster is None or (is_emulated(document) and address is None):
        return FleetRequest(Cluster("", ()), {}, {})
    counts, wishes = job.elastic.request_nodes or {}, job.parallelism
    if job.elastic.request_nodes is None and best is not None:
        counts = completed(
            best, cluster, standing_nodes(cluster, document), job.elastic.min_workers
        )
        if wishes.objective == "time" and wishes.max_usd_per_hour is None:
            return FleetRequest(cluster, document, counts, ANY_PRICE)
    return FleetRequest(cluster, document, counts)
