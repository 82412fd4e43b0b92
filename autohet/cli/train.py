"""Command `autohet train`: runs a job on this process's Ray cluster, or on an emulated fleet."""

import argparse
import json
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autohet.driver.events.event_log import finite
from autohet.driver.job.submission import is_submitted, warn_of_short_stop
from autohet.driver.job.supervise import (
    MAY_PASS,
    RESTARTS,
    is_restart,
    supervise_child,
    will_restart,
)
from autohet.runtime.job import Job
from autohet.runtime.process.terminal import PlainFormatter, visible

DESCRIPTION = (
    "Train a job on a Ray cluster. Resumes from the newest committed checkpoint of the"
    " job's storage. Ctrl-C and SIGTERM leave one."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--job", required=True, metavar="JOB", help="the job document (YAML)")
    add(
        "--cluster",
        metavar="CLUSTER",
        help=(
            "Ray cluster-launcher YAML; with provider fake_multinode an emulated fleet is started"
            " here"
        ),
    )
    add(
        "--address",
        metavar="ADDR",
        help="address of the Ray cluster (default: RAY_ADDRESS, or the one of this machine)",
    )
    add(
        "--storage",
        metavar="URI",
        help=(
            "where checkpoints go (s3://bucket/prefix or a directory that every machine sees),"
            " before the job's checkpoint.storage"
        ),
    )
    add(
        "--restarts",
        type=int,
        metavar="N",
        help=(
            "start a driver again that is killed, or fails for a cause that may pass, up to N times"
            f" in a row (default: {RESTARTS} in a job of `ray job submit`, else 0)"
        ),
    )
    add(
        "--fresh",
        action="store_true",
        help=(
            "begin at step 0, whatever steps nodes still hold of an earlier run; refused where the"
            " storage holds a checkpoint"
        ),
    )
    add("--events", metavar="FILE", help="where events go (default: runs/<job>/events.jsonl)")


def run(arguments: argparse.Namespace) -> int:
    job = Job.from_yaml(arguments.job)
    if arguments.storage is not None:
        job = replace(job, checkpoint=replace(job.checkpoint, storage=arguments.storage))
    events = Path(arguments.events or f"runs/{job.name}/events.jsonl")
    configure_logging()
    if is_submitted():
        warn_of_short_stop()

    restarts = arguments.restarts
    if restarts is None:
        # Nobody watches a submitted job; on a terminal the user does.
        restarts = RESTARTS if is_submitted() else 0
    train = partial(_train, job, arguments, events)
    if not restarts:
        return train()
    return supervise_child(restarts, train)


def _train(job: Job, arguments: argparse.Namespace, events: Path) -> int:
    from autohet.driver.checkpoints.fresh import begin_fresh_run
    from autohet.driver.job.run import train
    from autohet.driver.job.view import View

    if arguments.fresh and not is_restart():
        begin_fresh_run(job)
    with View(emulated=job.emulation is not None) as view:
        outcome = train(
            job,
            cluster_path=arguments.cluster,
            address=arguments.address,
            events_path=events,
            show=view,
        )
    if outcome.may_pass and will_restart():
        # The summary is printed by the last driver alone.
        return MAY_PASS
    summary = outcome.summary | {"ok": outcome.ok, "reason": outcome.reason}
    if arguments.json:
        print(json.dumps(finite(summary)))
    else:
        print(visible(describe_summary(summary)))
    return 0 if outcome.ok else 1


def configure_logging() -> None:
    """Log the driver's sentences to standard error; libraries only if something is wrong."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("autohet").setLevel(logging.INFO)


def describe_summary(summary: dict[str, Any]) -> str:
    """Describe a run's summary for a person."""
    loss = "-" if summary["final_loss"] is None else f"{summary['final_loss']:.4f}"
    lines = [
        f"{summary['reason']}: {summary['steps']} steps in {summary['generations']} generations,"
        f" loss {loss}, {summary['steps_lost']} steps lost{_goodput(summary)}"
    ]
    for change in summary["reconfigurations"]:
        bytes_by_tier = change["bytes_by_tier"]
        tiers = ", ".join(f"{tier} {count / 1e6:.1f} MB" for tier, count in bytes_by_tier.items())
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in change["seconds"].items())
        lines.append(
            f"  {change['cause']} at step {change['step']}: {change['steps_lost']} steps lost;"
            f" {tiers}; seconds: {parts}"
        )
    goal = summary.get("goal")
    if goal is not None:
        of = "" if goal["budget_usd"] is None else f" of {goal['budget_usd']:,.2f}"
        ended = {True: ", before the deadline", False: ", after the deadline", None: ""}
        lines.append(f"nodes: {goal['spent_usd']:,.2f}{of} USD{ended[goal['in_time']]}")
    lines.append(f"checkpoint: {summary['checkpoint']}\nevents: {summary['events']}")
    return "\n".join(lines)


def _goodput(summary: dict[str, Any]) -> str:
    """Return the run's goodput, and the dollars that changes cost, as far as they are known."""
    if summary.get("goodput") is None:
        return ""
    prices = [change["usd_lost"] for change in summary["reconfigurations"]]
    known = [price for price in prices if price is not None]
    dollars = f" (changes cost {sum(known):,.2f} USD)" if known else ""
    return f", goodput {summary['goodput']:.1%}{dollars}"
