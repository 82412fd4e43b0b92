"""Command `autohet quote`: the price of a job by a deadline, and how likely it is."""

import argparse
import json
import sys
from dataclasses import fields
from typing import Any

from autohet.cli.simulate import NOTICE_S

DESCRIPTION = (
    "SIMULATED: the real controller runs the job along many stretches of spot traces and"
    " price histories, by its deadline and within its budget. Answers with the probability,"
    " the price and the time, and the reasons of draws that fail."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--job", required=True, metavar="JOB", help="the job document (YAML)")
    add("--cluster", required=True, metavar="CLUSTER", help="Ray cluster-launcher YAML")
    add(
        "--by",
        metavar="T",
        help=(
            "the deadline: ISO 8601 (UTC if it names no zone), or a duration from now (36h);"
            " default: elastic.deadline"
        ),
    )
    add("--usd", type=float, metavar="X", help="the budget; default: elastic.budget_usd")
    add(
        "--trace",
        action="append",
        default=[],
        dest="traces",
        metavar="TRACE",
        help="a spot trace, as `autohet simulate` takes it; may be given several times",
    )
    add(
        "--prices",
        metavar="FILE",
        help="spot prices over time, as `autohet simulate` takes them",
    )
    add("--prices-from", metavar="TIME", help="moment of the prices at which the traces begin")
    add(
        "--notice-s",
        type=float,
        default=NOTICE_S,
        metavar="S",
        help="warning before a node leaves; 0: none (default 120)",
    )
    add("--draws", type=int, default=200, metavar="N", help="simulated runs (default 200)")


def run(arguments: argparse.Namespace) -> int:
    from autohet.simulate.quote import QuoteOptions, report_quote

    names = [each.name for each in fields(QuoteOptions)]
    options = QuoteOptions(**{name: getattr(arguments, name) for name in names})
    document = report_quote(options, _show_progress)
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)
    return 0


def _show_progress(share: float) -> None:
    print(f"\rquote: {share:.0%}", end="\n" if share >= 1.0 else "", file=sys.stderr, flush=True)


def show(document: dict[str, Any]) -> None:
    """Print the answer, the fleets that it chooses from, reasons and assumptions."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from autohet.runtime.process.terminal import PlainConsole

    console = PlainConsole()
    console.print(answer(document), soft_wrap=True, highlight=False)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("fleets, undisturbed")
    for name in ("hours", "$", "$ an hour"):
        table.add_column(name, justify="right")
    for fleet in document["fleets"]:
        nodes = ", ".join(f"{number} {name}" for name, number in sorted(fleet["nodes"].items()))
        values = [f"{fleet[name]:,.2f}" for name in ("hours", "usd", "usd_per_hour")]
        table.add_row(nodes, *values)
    console.print(table)
    for sentence in (*document["reasons"], *document["assumptions"]):
        console.print(sentence, soft_wrap=True, highlight=False)


def answer(document: dict[str, Any]) -> str:
    """Return the quote as a sentence."""
    goals = []
    if document["by_hours"] is not None:
        goals.append(f" within {document['by_hours']:,.1f} h")
    if document["budget_usd"] is not None:
        goals.append(f" for at most {document['budget_usd']:,.2f} $")
    usd = document["usd"]
    hours = ""
    if document["hours"] is not None:
        hours = ", {median:,.1f} h ({low:,.1f} to {high:,.1f})".format(**document["hours"])
    return (
        f"SIMULATED: {document['job']} trains {document['steps']:,} steps{''.join(goals)} with"
        f" probability {document['probability']:.1%}. It takes {usd['median']:,.2f} $"
        f" ({usd['low']:,.2f} to {usd['high']:,.2f} in 9 of 10 runs){hours}, by"
        f" {document['draws']} draws."
    )
