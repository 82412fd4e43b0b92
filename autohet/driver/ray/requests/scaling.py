"""Standing request for whole nodes to Ray's autoscaler, which brings replacements too.

Workers wait for nodes that are there, so without this request Ray sees no demand and starts no node
beyond `min_workers`. The request is for the nodes of the best plan of the largest fleet: a
node that no plan would use is not bought. It names shapes of whole nodes, and it is sent only after
Ray's own scheduler has launched exactly those nodes for it (`node_requests`).
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import ray
import yaml
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import RayError

from autohet.control.planning.buying import Market, completed, may_exist, usd_per_hour
from autohet.driver.loop.run_directories import run_id
from autohet.driver.ray.cluster_file import is_emulated
from autohet.driver.ray.requests.broker import put_request
from autohet.driver.ray.requests.node_requests import NodeRequest, node_request
from autohet.driver.sources.spot_prices import SpotType, spot_types
from autohet.runtime.job import Job
from planner.errors import ConfigError
from planner.inputs.autoscaling import autoscaling_config
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.documents import Document, Json

logger = logging.getLogger("autohet")
ANY_PRICE = (
    ", for the fastest plan at any price; parallelism.objective: cost asks for the least $ a token,"
    " max_usd_per_hour bounds them"
)
LAUNCHED_FROM = Path("~/ray_bootstrap_config.yaml")
"""Place where `ray up` leaves its file on the head node."""


def read_launch_file(path: Path = LAUNCHED_FROM) -> Document | None:
    """Return the cluster-launcher document that this head node was started from.

    None if there is none that can be used.
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
    """Check that the nodes that the job requests may exist.

    Raises:
        ConfigError: the request names a type that the cluster does not have, or more nodes of it
        than allowed.
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

    if not may_exist(wish, cluster):
        assert cluster.bound is not None
        raise ConfigError(
            f"elastic.request_nodes asks for {sum(wish.values())} nodes, but with those that stand"
            f" anyway cluster '{cluster.name}' may have {cluster.bound.most} with GPUs (its"
            " max_workers); ask for fewer, or raise max_workers"
        )


def check_min_workers(job: Job, cluster: Cluster) -> None:
    """Check that the cluster may grow to the job's minimum of workers."""
    most = cluster.most_gpus()
    if job.elastic.min_workers > most:
        raise ConfigError(
            f"elastic.min_workers is {job.elastic.min_workers}, but cluster '{cluster.name}' has"
            f" {most} GPUs at the most; lower it, or raise max_workers"
        )


def autoscaler_version() -> int:
    """Return the autoscaler version of the cluster that this process is connected to.

    Without a connection it is 2, the version that `ray up` starts.
    """
    if not ray.is_initialized():
        return 2
    try:
        return 2 if is_autoscaler_v2() else 1
    except (RayError, RuntimeError, AssertionError):
        return 2


def autoscaler_launches() -> bool:
    """Return true if an autoscaler may launch nodes here.

    That is one of version 2, one that `ray up` started on this head, or KubeRay's. A cluster of
    nodes that were started by hand has none.
    """
    on_kubernetes = "KUBERNETES_SERVICE_HOST" in os.environ
    return on_kubernetes or LAUNCHED_FROM.expanduser().exists() or autoscaler_version() == 2


def standing_nodes(cluster: Cluster, document: Json) -> dict[str, int]:
    """Return the nodes by type that stand without any request: the head, and `min_workers`."""
    if not document:
        return {}
    config = autoscaling_config(document)
    return config.standing(kind.name for kind in cluster.node_types)


class FleetRequest:
    """Standing request of one job; `withdraw` ends it.

    The autoscaler then takes idle nodes down after its own time-out. The broker adds the requests
    of all jobs on a cluster. counts: nodes by type; hint: text appended to the log message;
    run_id: run whose later driver replaces the request.
    ConfigError if no request names these nodes.
    """

    def __init__(
        self,
        cluster: Cluster,
        document: Json,
        counts: Mapping[str, int],
        hint: str = "",
        run_id: str = "",
    ) -> None:
        self.cluster = cluster
        self.counts = dict(counts)
        self.hint = hint
        self._run_id = run_id
        self._document = document
        self._request = self._request_for(self.counts)

    def _request_for(self, counts: Mapping[str, int]) -> NodeRequest:
        """Return a request that names these nodes; ConfigError if none does."""
        if not any(counts.values()):
            return NodeRequest()
        try:
            version = autoscaler_version()
            return node_request(self.cluster, self._document, counts, version=version)
        except ConfigError as error:
            # Nodes that were started by hand: nothing would answer a request, so none is needed.
            if ray.is_initialized() and not autoscaler_launches():
                logger.warning("no node is asked for: %s", error)
                return NodeRequest()
            raise

    @property
    def bundles(self) -> list[Mapping[str, float]]:
        return list(self._request.bundles)

    @property
    def selectors(self) -> list[Mapping[str, str]]:
        return list(self._request.selectors)

    @property
    def spot_types(self) -> dict[str, SpotType]:
        return spot_types(self.cluster, self._document)

    @property
    def market(self) -> Market:
        """Current market: the cluster, its standing nodes, and the counts requested now."""
        return Market(self.cluster, standing_nodes(self.cluster, self._document), dict(self.counts))

    def ask(self) -> None:
        if not self.bundles:
            return
        asked = dict(self.counts)
        head = autoscaling_config(self._document).head
        if asked.get(head or "", 0):
            # The head is there already.
            asked[head or ""] -= 1
        parts = [f"{count} {name}" for name, count in sorted(asked.items()) if count]
        logger.info(
            "Asking Ray's autoscaler for %s: $%.2f an hour by the file's prices%s",
            ", ".join(parts),
            usd_per_hour(asked, self.cluster),
            self.hint,
        )
        self._send(begins=True)

    def change(self, counts: Mapping[str, int]) -> None:
        """Request these counts from now on; keep the old request if no request names them."""
        try:
            self._request = self._request_for(counts)
        except ConfigError as error:
            logger.warning("the autoscaler is asked for the same nodes still: %s", error)
            return
        self.counts = dict(counts)
        self._send()

    def _send(self, *, begins: bool = False) -> None:
        selectors = self.selectors or [{}] * len(self.bundles)
        put_request(self.bundles, selectors, self._run_id, begins, wait=begins)

    def withdraw(self) -> None:
        try:
            if self.bundles:
                put_request((), (), self._run_id)
        except (RayError, RuntimeError) as error:
            logger.warning("the request for nodes was not withdrawn: %s", error)


def fleet_request(
    job: Job,
    cluster: Cluster | None,
    document: Json,
    address: str | None,
    best: Mapping[str, int] | None,
) -> FleetRequest:
    """Return the request to Ray's autoscaler for the nodes that the job names.

    If it names none, the request is for the nodes of the best plan of the largest fleet. A fleet
    emulated here has an empty request: its nodes are started at once.
    """
    if cluster is None or (is_emulated(document) and address is None):
        return FleetRequest(Cluster("", ()), {}, {})
    counts = job.elastic.request_nodes or {}
    wishes = job.parallelism
    if job.elastic.request_nodes is None and best is not None:
        counts = completed(
            best, cluster, standing_nodes(cluster, document), job.elastic.min_workers
        )
        if wishes.objective == "time" and wishes.max_usd_per_hour is None:
            return FleetRequest(cluster, document, counts, ANY_PRICE, run_id(job))
    return FleetRequest(cluster, document, counts, run_id=run_id(job))


def planned_launch(
    job: Job, cluster: Cluster, document: Json, best: Mapping[str, int]
) -> Document | None:
    """Return what Ray launches for a plan that uses `best` nodes, as `autohet train` asks for it.

    None for a document that Ray does not launch: an emulated fleet, a part of a file.

    Raises:
        ConfigError: `autohet train` would refuse the job on this cluster.
    """
    config = autoscaling_config(document)
    if is_emulated(document) or config.head is None:
        return None
    check_wish(cluster, job.elastic.request_nodes or {})
    check_min_workers(job, cluster)
    request = fleet_request(job, cluster, document, None, best)
    launched = config.workers(request.counts)
    nodes = {config.head: 1, **launched}
    nodes[config.head] = 1 + launched.get(config.head, 0)
    return {
        "head": config.head,
        "launched": launched,
        "usd_per_hour": usd_per_hour(nodes, cluster),
    }
