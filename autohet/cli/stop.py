"""Command `autohet stop`: stops a running job, with or without a driver."""

import argparse
import json
from dataclasses import asdict

DESCRIPTION = (
    "Stops a job on a Ray cluster: its workers make the newest step durable, and all of its"
    " processes end, also if its driver is gone. Exit code 1: some still live."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--job", metavar="NAME", help="the job's name (default: the only job that runs)"
    )
    parser.add_argument(
        "--address",
        metavar="ADDR",
        help="address of the Ray cluster (default: RAY_ADDRESS, or the one of this machine)",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds to wait for the end of its processes (default: 900)",
    )


def run(arguments: argparse.Namespace) -> int:
    from autohet.driver.job.stop import stop_run

    stopped = stop_run(arguments.address, arguments.job, arguments.wait_s)
    if arguments.json:
        print(json.dumps(asdict(stopped)))
    elif stopped.num_left:
        print(f"{stopped.job}: {stopped.num_left} processes still live; they end by themselves")
    else:
        by = "its driver" if stopped.driven else "its workers, without a driver"
        print(f"{stopped.job}: stopped by {by}")
    return 1 if stopped.num_left else 0
