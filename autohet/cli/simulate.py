"""`autohet simulate`: a spot trace through the real controller and planner, on a fake clock; beside it a trainer that restarts from S3."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from autohet.runtime.job import Job
from planner.cluster import cluster_from_yaml
from planner.errors import ConfigError

NOTICE_S = 120.0  # what EC2 gives


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="a spot trace through the real controller, on a fake clock",
        description="SIMULATED: a spot trace through the real controller, planner and transfer schedules, on a fake clock;"
        " steps take what the cost model predicts. Beside it the same trace with restarts from the newest checkpoint in S3.",
    )
    add = parser.add_argument
    add("--job", required=True, metavar="JOB", help="the job document (YAML)")
    add("--cluster", required=True, metavar="CLUSTER", help="Ray cluster-launcher YAML with the trace's node types")
    add("--trace", required=True, metavar="TRACE", help="CSV: time_s, node_type, num_nodes; or time_s, event, node")
    add("--hours", type=float, metavar="H", help="end after this time (default: an hour after the trace's last event)")
    add(
        "--notice-s",
        type=float,
        default=NOTICE_S,
        metavar="S",
        help="warning before a node leaves; 0: none (default 120)",
    )
    add("--policies", default="local_first,s3_only", metavar="A,B", help="default: local_first,s3_only")
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 where a policy's job ended before the trace did."""
    from autohet.driver.simulate.simulation import POLICIES, Scenario, horizon, simulate
    from autohet.driver.simulate.spot_trace import read_trace

    policies = arguments.policies.split(",")
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        raise ConfigError(f"--policies names '{unknown[0]}'; there are {', '.join(POLICIES)}")
    if not 0 <= arguments.notice_s < float("inf"):
        raise ConfigError(f"--notice-s is {arguments.notice_s:g}; it must be a number of seconds, at least 0")
    if arguments.hours is not None and not 0 < arguments.hours < float("inf"):
        raise ConfigError(f"--hours is {arguments.hours:g}; it must be a number above 0")
    cluster = cluster_from_yaml(arguments.cluster)
    trace = read_trace(arguments.trace, cluster, arguments.notice_s)
    scenario = Scenario(Job.from_yaml(arguments.job), cluster, trace, horizon(trace, arguments.hours))
    results = [simulate(scenario, policy, _progress(policy)) for policy in policies]
    document = {"simulated": True, "trace": arguments.trace, "seconds": scenario.end_s, "results": results}
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)
    return int(any(result["ended"] is not None for result in results))


def _progress(policy: str) -> Any:
    """A line a tenth on standard error."""
    said = [-1]

    def tell(share: float) -> None:
        if int(share * 10) > said[0]:
            said[0] = int(share * 10)
            print(f"simulate: {policy} {share:.0%}", file=sys.stderr, flush=True)

    return tell


def show(document: dict[str, Any]) -> None:
    """One column a policy."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    results = document["results"]
    hours = document["seconds"] / 3600
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for result in results:
        table.add_column(result["policy"], justify="right")
    for name, text in ROWS:
        table.add_row(name, *(text(result) for result in results))
    console = Console()
    console.print(
        f"SIMULATED: {hours:.1f} hours of {document['trace']}", soft_wrap=True, highlight=False, style="italic"
    )
    console.print(table)
    if len(results) == 2 and results[1]["tokens"]:
        ratio = results[0]["tokens"] / results[1]["tokens"]
        console.print(
            f"{results[0]['policy']} trained {ratio:.2f}x the tokens of {results[1]['policy']} on the same trace."
        )
    for result in results:
        if result["ended"]:
            console.print(f"{result['policy']} ended early: {result['ended']}", style="red", soft_wrap=True)
        elif not result["steps"]:
            why = (result["decisions"] or ["there were never the nodes that the job needs (elastic.min_workers)"])[-1]
            console.print(f"{result['policy']} made no step: {why}", style="red", soft_wrap=True)


def _causes(result: dict[str, Any]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(result["changes_by_cause"].items())) or "none"


def _moved(result: dict[str, Any]) -> str:
    return (
        ", ".join(f"{tier} {count / 1e9:.0f} GB" for tier, count in result["bytes_by_tier"].items() if count)
        or "nothing"
    )


def _part(name: str) -> Any:
    return lambda result: f"{result['seconds_by_part'].get(name, 0.0):,.0f} s"


ROWS: tuple[tuple[str, Any], ...] = (
    ("steps", lambda r: f"{r['steps']:,}"),
    ("steps lost", lambda r: f"{r['steps_lost']:,}"),
    ("tokens", lambda r: f"{r['tokens'] / 1e6:,.1f} M"),
    ("tokens a second", lambda r: f"{r['tokens_per_s']:,.0f}"),
    ("time in steps that count", lambda r: f"{r['useful_share']:.1%}"),
    ("changes", _causes),
    ("seconds of changes, in all", _part("total")),
    ("  of these restore", _part("restore")),
    ("moved", _moved),
    ("dollars, for every node alive", lambda r: f"{r['usd']:,.2f}"),
    (
        "dollars a million tokens",
        lambda r: "-" if r["usd_per_million_tokens"] is None else f"{r['usd_per_million_tokens']:.3f}",
    ),
)
