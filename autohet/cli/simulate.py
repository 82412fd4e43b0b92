"""Command `autohet simulate`: runs a spot trace through the real controller and planner.

The clock is a fake one. Baselines, as people run them, are simulated for comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

from autohet.runtime.job import Job
from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document
from planner.inputs.cluster_documents import read_cluster_yaml

if TYPE_CHECKING:
    from autohet.simulate.simulation import Scenario

NOTICE_S = 120.0  # what EC2 gives


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="a spot trace through the real controller, on a fake clock",
        description=(
            "SIMULATED: a spot trace through the real controller, planner and transfer schedules,"
            " on a fake clock; steps take what the cost model predicts. Beside it the same trace"
            " for trainers that restart: with a checkpoint on notice and at the best interval, on"
            " all GPUs or on one type, on demand; and one (s3_only) that ignores notices."
        ),
    )
    _add_inputs(parser)
    _add_choices(parser)
    _add_prices(parser)
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="write a picture of the run over time (.png or .svg; needs matplotlib)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_inputs(parser: argparse.ArgumentParser) -> None:
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


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose what is simulated."""
    add = parser.add_argument
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


def _add_prices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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


def run(arguments: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a policy's job ended before the trace did."""
    from autohet.simulate.comparison import compare
    from autohet.simulate.dollars.price_file import price_sources
    from autohet.simulate.simulation import BASELINES, POLICIES, TraceSimulation

    policies = _names(arguments.policies, "--policies", POLICIES)
    if arguments.baselines == "all":
        baselines = list(BASELINES)
    elif arguments.baselines in ("none", ""):
        baselines = []
    else:
        baselines = _names(arguments.baselines, "--baselines", BASELINES)

    described = read_cluster_yaml(arguments.cluster)
    given = _scenario(arguments, described)
    simulation = TraceSimulation(given)
    scenario = simulation.scenario
    results = [simulation.run(policy, _progress(policy)) for policy in policies]
    others = [simulation.run(name) for name in baselines]

    prices = {}
    sources = price_sources(scenario.cluster, described, scenario.prices)
    for name, source in sources.items():
        steps = simulation.prices.steps(name, scenario.end_s)
        prices[name] = {"source": source, "usd_per_hour": steps}
    document = {
        "simulated": True,
        "trace": arguments.trace,
        "seconds": scenario.end_s,
        "left_out": sorted(given.kinds.keys() - scenario.kinds.keys()),
        "results": results,
        "baselines": others,
        "comparison": compare(results[0], others),
        "costs": scenario.costs.to_document(),
        "prices": prices,
        "simulator": {
            "searches": simulation.memory.num_searches,
            "fleets": len(simulation.memory.plans),
        },
    }
    if arguments.picture:
        from autohet.cli.simulate_picture import draw

        draw(document, scenario, arguments.picture)
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)
    return int(any(result["ended"] is not None for result in results))


def _scenario(arguments: argparse.Namespace, described: object) -> Scenario:
    """Build the scenario from the options; `described` is the cluster file's document."""
    from autohet.driver.sources.instance_types import with_described_types
    from autohet.simulate.dollars.price_file import RecordedPrices, read_prices
    from autohet.simulate.simulation import Scenario, horizon
    from autohet.simulate.spot_trace import read_trace

    if not 0 <= arguments.notice_s < float("inf"):
        raise ConfigError(
            f"--notice-s is {arguments.notice_s:g}; it must be a number of seconds, at least 0"
        )
    if arguments.hours is not None and not 0 < arguments.hours < float("inf"):
        raise ConfigError(f"--hours is {arguments.hours:g}; it must be a number above 0")
    if arguments.prices_from and not arguments.prices:
        raise ConfigError("--prices-from needs --prices")

    known = with_described_types(described)
    cluster = cluster_from_document(known, f"cluster '{arguments.cluster}'")
    trace = read_trace(arguments.trace, cluster, arguments.notice_s)
    prices = RecordedPrices()
    if arguments.prices:
        begin = _moment(arguments.prices_from)
        prices = read_prices(arguments.prices, cluster, described, begin)
    job = Job.from_yaml(arguments.job)
    return Scenario(job, cluster, trace, horizon(trace, arguments.hours), prices=prices)


def _moment(given: str | None) -> datetime | None:
    try:
        return None if given is None else datetime.fromisoformat(given)
    except ValueError:
        raise ConfigError(
            f"--prices-from is '{given}'; it must be a moment such as 2026-11-24T05:00:00Z"
        ) from None


def _names(given: str, option: str, known: tuple[str, ...]) -> list[str]:
    names = given.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{option} names '{unknown[0]}'; there are {', '.join(known)}")
    return names


def _progress(policy: str) -> Any:
    """Print a line for each tenth of the work to standard error."""
    last_tenth = -1

    def report(share: float) -> None:
        nonlocal last_tenth
        tenth = int(share * 10)
        if tenth > last_tenth:
            last_tenth = tenth
            print(f"simulate: {policy} {share:.0%}", file=sys.stderr, flush=True)

    return report


def show(document: dict[str, Any]) -> None:
    """Print a table with one column for each policy."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from autohet.runtime.process.terminal import PlainConsole

    trained = [found for found in document["baselines"] if found["tokens"]]
    results = document["results"] + trained
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for result in results:
        table.add_column(result["policy"], justify="right")
    for name, text in ROWS:
        table.add_row(name, *[text(result) for result in results])

    hours = document["seconds"] / 3600
    console = PlainConsole()
    console.print(
        f"SIMULATED: {hours:.1f} hours of {document['trace']}",
        soft_wrap=True,
        highlight=False,
        style="italic",
    )
    console.print(table)
    for name, price in document["prices"].items():
        console.print(_price(name, price), soft_wrap=True, highlight=False)
    if document["comparison"] is not None:
        sentence = _sentence(document["results"][0]["policy"], document["comparison"])
        console.print(sentence, soft_wrap=True, highlight=False)
    for result in results:
        problem = _problem(result)
        if problem is not None:
            console.print(f"{result['policy']} {problem}", style="red", soft_wrap=True)


def _problem(result: dict[str, Any]) -> str | None:
    """Say why a policy's job ended early or made no step, if it did."""
    if result["ended"]:
        return f"ended early: {result['ended']}"
    if result["steps"]:
        return None
    if result["decisions"]:
        return f"made no step: {result['decisions'][-1]}"
    return "made no step: there were never the nodes that the job needs (elastic.min_workers)"


def _price(name: str, price: dict[str, Any]) -> str:
    values = [usd for _, usd in price["usd_per_hour"]]
    spread = f"{values[0]:g}"
    if len(values) > 1:
        spread = f"{min(values):g} to {max(values):g}"
    return f"price of {name}: {spread} $/h, {price['source']}"


def _sentence(policy: str, comparison: dict[str, Any]) -> str:
    factors = []
    for name, ratio in comparison["parts"].items():
        factors.append(f"{name.replace('_', ' ')} {ratio:.2f}x")
    parts = ", ".join(factors)
    why = f" Why not more: {comparison['why']}." if comparison["why"] else ""
    best = comparison["best_baseline"]
    cheapest = comparison["cheapest_baseline"]
    dollars = 1 / comparison["usd_per_million_tokens_ratio"]
    return (
        f"SIMULATED: {policy} trained {comparison['tokens_ratio']:.2f}x the tokens of the best"
        f" baseline, {best} ({parts}), at {dollars:.2f}x the dollars a token of {cheapest}.{why}"
    )


def _causes(result: dict[str, Any]) -> str:
    counts = sorted(result["changes_by_cause"].items())
    causes = ", ".join(f"{count} {cause}" for cause, count in counts)
    return causes or "none"


def _moved(result: dict[str, Any]) -> str:
    counts = result["bytes_by_tier"].items()
    moved = [f"{tier} {count / 1e9:.0f} GB" for tier, count in counts if count]
    return ", ".join(moved) or "nothing"


def _part(name: str) -> Any:
    return lambda result: f"{result['seconds_by_part'].get(name, 0.0):,.0f} s"


def _use(result: dict[str, Any], use: str) -> str:
    """Return the dollars of a run for one use; baselines have only those of nodes."""
    dollars = result.get("usd_by_use")
    if dollars is None:
        return "-"
    return f"{dollars[use]:,.2f}"


def _usd_per_million(result: dict[str, Any]) -> str:
    usd = result["usd_per_million_tokens"]
    if usd is None:
        return "-"
    return f"{usd:.3f}"


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
    ("dollars for data between zones", lambda r: _use(r, "between_zones")),
    ("dollars for requests to S3", lambda r: _use(r, "s3_requests")),
    ("dollars a million tokens", _usd_per_million),
)
