"""Command `autohet sky`: trains a job under SkyPilot, and changes the region where one starves."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autohet.runtime.job import Job
from autohet.runtime.process.terminal import visible
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.cluster_documents import read_cluster_yaml

if TYPE_CHECKING:
    from autohet.driver.sky.task_file import Region

logger = logging.getLogger("autohet")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sky",
        help="train a job under SkyPilot, in the next region where one starves",
        description=(
            "Write a SkyPilot task file for each region, launch the job in the first one, and stay"
            " as its supervisor: after elastic.region_patience_s without training, copy the newest"
            " checkpoint to the next region's storage, at a price that is logged before, and go on"
            " there. The command `sky` must be installed. A supervisor that is started again goes"
            " on from where the job is."
        ),
    )
    parser.add_argument("--job", required=True, metavar="JOB", help="the job document (YAML)")
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="CLUSTER",
        help="Ray cluster-launcher YAML of AWS: its node types, and links between regions",
    )
    parser.add_argument(
        "--region",
        required=True,
        action="append",
        metavar="NAME=URI",
        help=(
            "a region and the storage of its checkpoints, for example us-east-1=s3://bucket/job;"
            " repeat it, the preferred region first"
        ),
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME=AMI",
        help="machine image of a region (default: SkyPilot's own)",
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="equal nodes of the cluster (default: 1)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where task files go (default: runs/<job>/sky)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="write the task files and launch nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    from autohet.cli.train import configure_logging
    from autohet.driver.sky import choice, task_file
    from recovery.errors import RecoveryError

    configure_logging()
    job_path = Path(arguments.job)
    job = Job.from_yaml(job_path)
    document = read_cluster_yaml(arguments.cluster)
    where = f"cluster '{arguments.cluster}'"
    cluster = cluster_from_document(document, where)
    assert isinstance(document, dict), "a cluster was read from it"
    task_file.require_aws(document, where)
    task_file.require_checkout(Path.cwd())
    regions = _regions(arguments.region, arguments.image)
    choice.require_links(cluster, [region.name for region in regions])
    if arguments.nodes < 1:
        raise ConfigError(f"--nodes is {arguments.nodes}, but must be at least 1")

    chosen = choice.choose_kinds(job, cluster, arguments.nodes)
    for name, reason in chosen.left_out:
        logger.warning("Node type '%s' is left out: %s", name, reason)

    folder = Path(arguments.out or f"runs/{job.name}/sky")
    tasks = {region.name: folder / f"{region.name}.yaml" for region in regions}
    for region in regions:
        task = task_file.task_of(
            job, job_path, document, chosen.kinds, region=region, num_nodes=arguments.nodes
        )
        task_file.write_task(task, tasks[region.name])

    answer = {
        "tasks": {name: str(path) for name, path in tasks.items()},
        "left_out": dict(chosen.left_out),
        "usd_per_gb": _prices(cluster, regions),
    }
    if arguments.dry_run:
        return _report(arguments, {"ok": True, "reason": "dry run", **answer})
    try:
        ok, reason = _supervise(job, cluster, regions, tasks)
    except RecoveryError as error:
        print(visible(f"autohet sky: {error}"), file=sys.stderr)
        return 1
    return _report(arguments, {"ok": ok, "reason": reason, **answer})


def _regions(given: Sequence[str], images: Sequence[str]) -> list[Region]:
    from autohet.driver.sky.task_file import Region

    storages = _pairs("--region", given)
    image_by_region = _pairs("--image", images)
    for name in image_by_region:
        if name not in storages:
            raise ConfigError(f"--image names region '{name}', which no --region names")
    for uri in storages.values():
        _require_reachable(uri)
    return [Region(name, uri, image_by_region.get(name, "")) for name, uri in storages.items()]


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError(f"{option} is '{text}', but must be NAME=VALUE")
        if name in found:
            raise ConfigError(f"{option} names region '{name}' twice")
        found[name] = value
    return found


def _require_reachable(uri: str) -> None:
    """Raise ConfigError for a directory that the region's nodes cannot see."""
    from recovery.storage.address import S3Address, parse_address
    from recovery.storage.errors import StorageUriError

    try:
        address = parse_address(uri)
    except StorageUriError as error:
        raise ConfigError(f"--region: {error}") from None
    if not isinstance(address, S3Address):
        raise ConfigError(
            f"--region names the storage '{uri}', which the region's nodes cannot see; name an"
            " s3:// URI"
        )


def _prices(cluster: Cluster, regions: Sequence[Region]) -> list[dict[str, Any]]:
    """Return dollars a gigabyte between each two regions, as copies of checkpoints pay them."""
    prices: list[dict[str, Any]] = []
    for one, other in itertools.combinations(regions, 2):
        usd_per_gb = cluster.zones.usd_per_gb(one.name, other.name)
        prices.append({"regions": [one.name, other.name], "usd_per_gb": usd_per_gb})
    return prices


def _supervise(
    job: Job, cluster: Cluster, regions: Sequence[Region], tasks: dict[str, Path]
) -> tuple[bool, str]:
    from autohet.driver.sky.command import SkyCommand, find_sky
    from autohet.driver.sky.supervisor import LaunchableRegions, Limits, Supervisor

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


def _report(arguments: argparse.Namespace, answer: dict[str, Any]) -> int:
    if arguments.json:
        print(json.dumps(answer))
    else:
        for region, path in answer["tasks"].items():
            print(visible(f"{region}: {path}"))
        for price in answer["usd_per_gb"]:
            one, other = price["regions"]
            print(visible(f"a copy from {one} to {other} costs {price['usd_per_gb']} $/GB"))
        print(visible(answer["reason"]))
    return 0 if answer["ok"] else 1
