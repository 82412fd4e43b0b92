"""Launch of a job under SkyPilot: its task files, and the supervisor of its regions.

The one module of this package that `autohet sky` imports.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autohet.driver.sky.choice import choose_kinds, require_links
from autohet.driver.sky.command import SkyCommand, find_sky
from autohet.driver.sky.supervisor import LaunchableRegions, Limits, Supervisor
from autohet.driver.sky.task_file import (
    Region,
    require_aws,
    require_checkout,
    task_of,
    write_task,
)
from autohet.runtime.job import Job
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.cluster_documents import read_cluster_yaml
from planner.inputs.documents import Document
from recovery.storage.address import S3Address, parse_address
from recovery.storage.errors import StorageUriError

logger = logging.getLogger("autohet")


@dataclass(frozen=True)
class SkyRequest:
    """Options of `autohet sky`.

    storage_by_region: the preferred region first. image_by_region: machine images. folder: where
    task files go; None: `runs/<job>/sky`. dry_run: launch nothing.
    """

    job: Path
    cluster: str
    storage_by_region: Mapping[str, str]
    image_by_region: Mapping[str, str]
    num_nodes: int
    folder: str | None
    dry_run: bool


def launch(request: SkyRequest) -> Document:
    """Write the task files, launch the job and supervise it to its end; return the answer.

    Raises:
        ConfigError: the user's input is wrong. RecoveryError: a checkpoint cannot be copied.
    """
    job = Job.from_yaml(request.job)
    document = read_cluster_yaml(request.cluster)
    where = f"cluster '{request.cluster}'"
    cluster = cluster_from_document(document, where)
    assert isinstance(document, dict), "a cluster was read from it"
    require_aws(document, where)
    require_checkout(Path.cwd())
    regions = _regions(request)
    require_links(cluster, [region.name for region in regions])
    if request.num_nodes < 1:
        raise ConfigError(f"--nodes is {request.num_nodes}, but must be at least 1")

    chosen = choose_kinds(job, cluster, request.num_nodes)
    for name, reason in chosen.left_out:
        logger.warning("Node type '%s' is left out: %s", name, reason)

    folder = Path(request.folder or f"runs/{job.name}/sky")
    tasks = {region.name: folder / f"{region.name}.yaml" for region in regions}
    for region in regions:
        task = task_of(
            job, request.job, document, chosen.kinds, region=region, num_nodes=request.num_nodes
        )
        write_task(task, tasks[region.name])

    answer = {
        "tasks": {name: str(path) for name, path in tasks.items()},
        "left_out": dict(chosen.left_out),
        "usd_per_gb": _prices(cluster, regions),
    }
    if request.dry_run:
        return {"ok": True, "reason": "dry run", **answer}
    ok, reason = _supervise(job, cluster, regions, tasks)
    return {"ok": ok, "reason": reason, **answer}


def _regions(request: SkyRequest) -> list[Region]:
    for name in request.image_by_region:
        if name not in request.storage_by_region:
            raise ConfigError(f"--image names region '{name}', which no --region names")
    regions = []
    for name, uri in request.storage_by_region.items():
        try:
            address = parse_address(uri)
        except StorageUriError as error:
            raise ConfigError(f"--region: {error}") from None
        if not isinstance(address, S3Address):
            raise ConfigError(
                f"--region names the storage '{uri}', which the region's nodes cannot see; name an"
                " s3:// URI"
            )
        regions.append(Region(name, uri, request.image_by_region.get(name, "")))
    return regions


def _prices(cluster: Cluster, regions: Sequence[Region]) -> list[Document]:
    """Return dollars a gigabyte between each two regions, as copies of checkpoints pay them."""
    prices: list[Document] = []
    for one, other in itertools.combinations(regions, 2):
        usd_per_gb = cluster.zones.usd_per_gb(one.name, other.name)
        prices.append({"regions": [one.name, other.name], "usd_per_gb": usd_per_gb})
    return prices


def _supervise(
    job: Job, cluster: Cluster, regions: Sequence[Region], tasks: dict[str, Path]
) -> tuple[bool, str]:
    limits = Limits(
        job.training.steps, job.elastic.region_patience_s, job.elastic.max_failures_in_a_row
    )
    sky = SkyCommand(find_sky())
    launchable = LaunchableRegions(regions, tasks, cluster.zones)
    supervisor = Supervisor(job.name, launchable, limits, sky=sky)
    try:
        ended = supervisor.run()
    except KeyboardInterrupt:
        logger.warning(
            "The supervisor ends and its cluster stays; start the same command again to go on, or"
            " end the cluster by `sky down 'autohet-%s-*'`",
            job.name,
        )
        raise
    finally:
        supervisor.close()
    return ended.action == "finish", ended.reason
