"""Command `autohet simulate`: runs a spot trace through the real controller and planner.

The clock is a fake one. Baselines, as people run them, are simulated for comparison.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields

from autohet.cli.plans.options import check_output
from planner.inputs.documents import Document

NOTICE_S = 120.0  # what EC2 gives


DESCRIPTION = (
    "SIMULATED: a spot trace through the real controller, planner and transfer schedules,"
    " on a fake clock; steps take what the cost model predicts. Beside it the same trace"
    " for trainers that restart: with a checkpoint on notice and at the best interval, on"
    " all GPUs or on one type, on demand; and one (s3_only) that ignores notices."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--job", required=True, metavar="JOB", help="the job document (YAML)")
    add(
        "--cluster",
        required=True,
        metavar="CLUSTER",
        help="Ray cluster-launcher YAML with the trace's node types",
    )
    add(
        "--trace",
        required=True,
        metavar="TRACE",
        help="CSV: time_s, node_type, num_nodes; or time_s, event, node",
    )
    add(
        "--hours",
        type=float,
        metavar="H",
        help="end after this time (default: an hour after the trace's last event)",
    )
    add(
        "--notice-s",
        type=float,
        default=NOTICE_S,
        metavar="S",
        help="warning before a node leaves; 0: none (default 120)",
    )
    add(
        "--policies",
        default="local_first,s3_only",
        metavar="A,B",
        help="default: local_first,s3_only",
    )
    add(
        "--baselines",
        default="all",
        metavar="A,B",
        help="honest baselines to compare with: all (default), none, or names",
    )
    add(
        "--prices",
        metavar="FILE",
        help=(
            "spot prices over time: JSON of `aws ec2 describe-spot-price-history`, or CSV: time_s,"
            " node_type, usd_per_hour (default: the cluster file's constant ones)"
        ),
    )
    add(
        "--prices-from",
        metavar="TIME",
        help=(
            "moment (ISO 8601) of the JSON's prices at which the trace begins (default: its first)"
        ),
    )
    add(
        "--picture",
        metavar="FILE",
        help="write a picture of the run over time (.png or .svg; needs matplotlib)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a policy's job ended before the trace did."""
    from autohet.simulate.trace_report import TraceOptions, report_trace

    names = [each.name for each in fields(TraceOptions)]
    check_output("--picture", arguments.picture, (".png", ".svg"))
    options = TraceOptions(**{name: getattr(arguments, name) for name in names})
    document = report_trace(options, _Progress())
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)
    return int(any(result["ended"] is not None for result in document["results"]))


class _Progress:
    """Prints a line for each tenth of a policy's work to standard error."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def __call__(self, policy: str, share: float) -> None:
        tenth = (policy, int(share * 10))
        if tenth != self._last:
            self._last = tenth
            print(f"simulate: {policy} {share:.0%}", file=sys.stderr, flush=True)


def show(document: Document) -> None:
    """Print tables with one row for each policy: steps, changes, dollars."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from autohet.runtime.process.terminal import PlainConsole

    trained = [found for found in document["baselines"] if found["tokens"]]
    results = document["results"] + trained
    hours = document["seconds"] / 3600
    console = PlainConsole()
    console.print(
        f"SIMULATED: {hours:.1f} hours of {document['trace']}",
        soft_wrap=True,
        highlight=False,
        style="italic",
    )
    for columns in TABLES:
        table = Table(box=SIMPLE_HEAD)
        table.add_column("policy")
        for name, _ in columns:
            table.add_column(name, justify="right")
        for result in results:
            # A long name breaks between its words.
            policy = result["policy"].replace("_", " ")
            table.add_row(policy, *[text(result) for _, text in columns])
        console.print(table)
    for name, price in document["prices"].items():
        values = [usd for _, usd in price["usd_per_hour"]]
        spread = f"{values[0]:g}"
        if len(values) > 1:
            spread = f"{min(values):g} to {max(values):g}"
        console.print(
            f"price of {name}: {spread} $/h, {price['source']}", soft_wrap=True, highlight=False
        )
    if document["comparison"] is not None:
        sentence = _sentence(document["results"][0]["policy"], document["comparison"])
        console.print(sentence, soft_wrap=True, highlight=False)
    for result in results:
        problem = _problem(result)
        if problem is not None:
            console.print(f"{result['policy']} {problem}", style="red", soft_wrap=True)


def _problem(result: Document) -> str | None:
    """Say why a policy's job ended early or made no step, if it did."""
    if result["ended"]:
        return f"ended early: {result['ended']}"
    if result["steps"]:
        return None
    if result["decisions"]:
        return f"made no step: {result['decisions'][-1]}"
    return "made no step: there were never the nodes that the job needs (elastic.min_workers)"


def _sentence(policy: str, comparison: Document) -> str:
    factors = [
        f"{name.replace('_', ' ')} {ratio:.2f}x" for name, ratio in comparison["parts"].items()
    ]
    parts = ", ".join(factors)
    why = f" Why not more: {comparison['why']}." if comparison["why"] else ""
    best = comparison["best_baseline"]
    cheapest = comparison["cheapest_baseline"]
    dollars = 1 / comparison["usd_per_million_tokens_ratio"]
    return (
        f"SIMULATED: {policy} trained {comparison['tokens_ratio']:.2f}x the tokens of the best"
        f" baseline, {best} ({parts}), at {dollars:.2f}x the dollars a token of {cheapest}.{why}"
    )


def _causes(result: Document) -> str:
    counts = sorted(result["changes_by_cause"].items())
    causes = ", ".join(f"{count} {cause}" for cause, count in counts)
    return causes or "none"


def _moved(result: Document) -> str:
    counts = result["bytes_by_tier"].items()
    moved = [f"{tier} {count / 1e9:.0f} GB" for tier, count in counts if count]
    return ", ".join(moved) or "nothing"


def _part(name: str) -> Callable[[Document], str]:
    return lambda result: f"{result['seconds_by_part'].get(name, 0.0):,.0f}"


def _use(result: Document, use: str) -> str:
    """Return the dollars of a run for one use; baselines have only those of nodes."""
    dollars = result.get("usd_by_use")
    if dollars is None:
        return "-"
    return f"{dollars[use]:,.2f}"


def _number(result: Document, name: str) -> str:
    """Return a number that only runs of jobs that decide by price have."""
    value = result.get(name)
    return "-" if value is None else f"{value:.2f}"


def _usd_per_million(result: Document) -> str:
    usd = result["usd_per_million_tokens"]
    if usd is None:
        return "-"
    return f"{usd:.3f}"


Columns = tuple[tuple[str, Callable[[Document], str]], ...]
TRAINED: Columns = (
    ("steps", lambda r: f"{r['steps']:,}"),
    ("steps lost", lambda r: f"{r['steps_lost']:,}"),
    ("tokens, M", lambda r: f"{r['tokens'] / 1e6:,.1f}"),
    ("tokens a second", lambda r: f"{r['tokens_per_s']:,.0f}"),
    ("time in steps that count", lambda r: f"{r['useful_share']:.1%}"),
)
CHANGED: Columns = (
    ("changes", _causes),
    ("seconds of changes, in all", _part("total")),
    ("of these restore", _part("restore")),
    ("moved", _moved),
)
PAID: Columns = (
    ("dollars, for every node alive", lambda r: f"{r['usd']:,.2f}"),
    ("for data between zones", lambda r: _use(r, "between_zones")),
    ("for requests to S3", lambda r: _use(r, "s3_requests")),
    ("dollars a million tokens", _usd_per_million),
    ("  over the best fleet at each moment", lambda r: _number(r, "usd_per_token_over_hindsight")),
    ("longest time beyond the bound, s", lambda r: _number(r, "longest_beyond_bound_s")),
)
TABLES = (TRAINED, CHANGED, PAID)
