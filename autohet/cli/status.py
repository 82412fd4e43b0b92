"""Command `autohet status`: shows what the jobs of a Ray cluster are doing."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from autohet.driver.events.event_log import failing_note, finite
from autohet.runtime.process.terminal import visible

SILENT_WORKER_S = 3.0
"""Seconds of a worker's silence that are worth a word (by default it counts as dead after 10 s)."""


DESCRIPTION = (
    "Prints state, step, loss, workers and generation of each job of a Ray cluster, and how"
    " long ago its driver said so."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--address",
        metavar="ADDR",
        help="address of the Ray cluster (default: RAY_ADDRESS, or the one of this machine)",
    )


def run(arguments: argparse.Namespace) -> int:
    from autohet.driver.job.status import read_status

    jobs = read_status(arguments.address)
    if arguments.json:
        print(json.dumps(finite({"jobs": jobs})))
        return 0
    for name, status in jobs.items():
        print(visible(describe_job(name, status)))
    if not jobs:
        print("no job of this cluster has left a status")
    return 0


def describe_job(name: str, status: Mapping[str, Any]) -> str:
    """Describe in one line what the job does, and how long ago its driver reported it."""
    loss = "-" if status["loss"] is None else f"{status['loss']:.4f}"
    age = "at an unknown time" if status["age_s"] is None else f"{status['age_s']:.0f} s ago"
    said = {
        "alive": f"alive, {age}",
        "ended": f"ended, {age}",
        "silent": f"SILENT: its driver last said this {age}",
    }
    silent = ""
    # What a driver that is silent itself said of its workers is too old to be of use.
    if status["liveness"] == "alive":
        for worker, seconds in sorted(status.get("silence_s", {}).items()):
            if seconds >= SILENT_WORKER_S:
                silent += f"; {worker} has said nothing for {seconds:.0f} s"
    return (
        f"{name}: {status['state']}, step {status['step']} of {status['steps']}, loss {loss},"
        f" {len(status['workers'])} workers, generation {status['generation']}"
        f" ({said[status['liveness']]}){silent}{failing_note(status)}"
    )
