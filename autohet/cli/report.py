"""Command `autohet report`: writes a run's events as an HTML page and a Perfetto timeline."""

import argparse
import json
from pathlib import Path

DESCRIPTION = (
    "Writes the report of a run (one HTML page that needs nothing else) and its timeline"
    " (for ui.perfetto.dev) from the run's events. `autohet train` writes both beside its"
    " events when it ends."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--events", required=True, metavar="FILE", help="events.jsonl of the run")
    add(
        "--out",
        metavar="DIR",
        help="where report.html and timeline.json go (default: beside the events)",
    )


def run(arguments: argparse.Namespace) -> int:
    from autohet.driver.report import write_report

    page, trace = write_report(
        arguments.events, None if arguments.out is None else Path(arguments.out)
    )
    if arguments.json:
        print(json.dumps({"report": str(page), "timeline": str(trace)}))
    else:
        print(f"report: {page}\ntimeline (open in ui.perfetto.dev): {trace}")
    return 0
