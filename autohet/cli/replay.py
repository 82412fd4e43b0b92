"""Command `autohet replay`: runs recorded observations through the same controller.

Its decisions must be the recorded ones.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from autohet.runtime.process.terminal import visible

DESCRIPTION = (
    "Feeds what a run's driver has seen (observations.jsonl, written where the job says"
    " elastic.record_observations: true) to the same controller, without Ray and without a"
    " search, and compares its decisions with the recorded ones, bit for bit. Exit code 1"
    " where they differ; the first difference is shown."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "run", metavar="RUN", help="observations.jsonl, or the directory that it lies in"
    )


def run(arguments: argparse.Namespace) -> int:
    from autohet.driver.loop.replay import replay_run

    path = Path(arguments.run)
    replayed = replay_run(path / "observations.jsonl" if path.is_dir() else path)
    if arguments.json:
        print(json.dumps(asdict(replayed)))
    elif replayed.difference is None:
        print(
            f"the same {replayed.decisions} events and {replayed.actions} actions from"
            f" {replayed.ticks}"
            f" observations{f' of {replayed.drivers} drivers' if replayed.drivers > 1 else ''}, bit"
            " for bit"
        )
    else:
        print(visible(f"another decision: {replayed.difference}"))
    return 0 if replayed.difference is None else 1
