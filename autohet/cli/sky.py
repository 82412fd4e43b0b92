"""Command `autohet sky`: trains a job under SkyPilot, and changes the region where one starves."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from autohet.runtime.process.terminal import visible
from planner.errors import ConfigError

DESCRIPTION = (
    "Write a SkyPilot task file for each region, launch the job in the first one, and stay"
    " as its supervisor: after elastic.region_patience_s without training, copy the newest"
    " checkpoint to the next region's storage, at a price that is logged before, and go on"
    " there. The command `sky` must be installed. A supervisor that is started again goes"
    " on from where the job is."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--job", required=True, metavar="JOB", help="the job document (YAML)")
    add(
        "--cluster",
        required=True,
        metavar="CLUSTER",
        help="Ray cluster-launcher YAML of AWS: its node types, and links between regions",
    )
    add(
        "--region",
        required=True,
        action="append",
        metavar="NAME=URI",
        help=(
            "a region and the storage of its checkpoints, for example us-east-1=s3://bucket/job;"
            " repeat it, the preferred region first"
        ),
    )
    add(
        "--image",
        action="append",
        default=[],
        metavar="NAME=AMI",
        help="machine image of a region (default: SkyPilot's own)",
    )
    add("--nodes", type=int, default=1, metavar="N", help="equal nodes of the cluster (default: 1)")
    add("--out", metavar="DIR", help="where task files go (default: runs/<job>/sky)")
    add("--dry-run", action="store_true", help="write the task files and launch nothing")


def run(arguments: argparse.Namespace) -> int:
    from autohet.cli.train import configure_logging
    from autohet.driver.sky.launch import SkyRequest, launch
    from recovery.errors import RecoveryError

    configure_logging()
    request = SkyRequest(
        Path(arguments.job),
        arguments.cluster,
        storage_by_region=_pairs("--region", arguments.region),
        image_by_region=_pairs("--image", arguments.image),
        num_nodes=arguments.nodes,
        folder=arguments.out,
        dry_run=arguments.dry_run,
    )
    try:
        answer = launch(request)
    except RecoveryError as error:
        print(visible(f"autohet sky: {error}"), file=sys.stderr)
        return 1
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
