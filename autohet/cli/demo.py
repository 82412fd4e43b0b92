"""Command `autohet demo`: trains on an emulated mixed spot fleet with changes.

The run has a notice, a death and an arrival, and the command shows what each cost.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autohet.cli.train import configure_logging
from autohet.runtime.job import Job
from autohet.runtime.process.terminal import PlainConsole
from planner.errors import ConfigError

JOB = "cluster_configs/jobs/demo.yaml"
CHAT_JOB = "cluster_configs/jobs/demo-chat.yaml"

BANNER = (
    "EMULATED: nodes are processes of this machine; their GPU types are labels, their speeds paced"
    " by sleeping, their memories scaled"
)


DESCRIPTION = (
    "Trains on an emulated mixed spot fleet of this machine (no GPU needed), takes a"
    " preemption notice, a sudden death and an arrival, and holds the loss against the same"
    " job undisturbed in one process. About three minutes."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "--chat",
        action="store_true",
        help=(
            "fine-tune adapters on conversations instead: evaluation, best checkpoint, and an"
            " export that peft loads (needs the package peft)"
        ),
    )
    add("--job", metavar="JOB", help=f"job document (default: {JOB}; with --chat {CHAT_JOB})")
    add(
        "--cluster",
        default="cluster_configs/local-emulated.yaml",
        metavar="CLUSTER",
        help="cluster of provider fake_multinode (default: %(default)s)",
    )
    add(
        "--out",
        metavar="DIR",
        help=(
            "events and checkpoints; what is there is replaced (default: runs/demo; with --chat"
            " runs/demo-chat)"
        ),
    )
    add("--json", metavar="FILE", help="also write the summary document")


def run(arguments: argparse.Namespace) -> int:
    job = Job.from_yaml(arguments.job or (CHAT_JOB if arguments.chat else JOB))
    job.require_training()
    _check_adapter(job)
    directory = arguments.out or ("runs/demo-chat" if arguments.chat else "runs/demo")
    configure_logging()
    from autohet.emulate.demo import demonstrate

    console = PlainConsole()
    console.print(Text("AutoHet demonstration   ", "bold") + Text(BANNER, "not bold yellow"))
    found = demonstrate(
        job, arguments.cluster, Path(directory), lambda part, what: tell(console, part, what)
    )
    conclude(console, found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found.to_document(), indent=1))
    return 0 if found.is_right else 1


def _check_adapter(job: Job) -> None:
    """Raise ConfigError if the demonstration of an adapter lacks what it compares."""
    if job.model.adapter is None:
        return
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "the demonstration of adapters compares with the package peft, which is not installed;"
            " install it with `pip install peft`"
        )
    if job.data is None or job.data.kind != "chat" or job.evaluation is None:
        raise ConfigError(
            "the demonstration of adapters needs data.kind: chat and a section evaluation, as"
            f" {CHAT_JOB} has them"
        )


def tell(console: Console, part: str, what: Any) -> None:
    """Print one part's result."""
    if part == "plans":
        chosen, symmetric = what
        console.print("\nThe plan for this fleet", style="bold")
        console.print(chosen)
        console.print("The symmetric plan (megatron) for the same fleet", style="bold")
        console.print(symmetric)
    elif part == "symmetric":
        plan = what.summary["plans"][0]
        console.print(
            f"Symmetric plan measured: {plan['measured_step_s']:.3f} s a step (predicted"
            f" {plan['predicted_step_s']:.3f} s)",
            highlight=False,
        )
    elif part == "outcome":
        for change in what.summary["reconfigurations"]:
            describe_change(console, change)


def describe_change(console: Console, change: dict[str, Any]) -> None:
    """Print a change: what happened, plan before and after, and its costs."""
    happened = Text(f"\n{change['cause'].capitalize()}", "bold")
    happened.append(f" at step {change['step']}: {change['reason']}", "not bold")
    console.print(happened)
    console.print(f"  plan before: {outline(change['plan_before'])}", highlight=False)
    console.print(f"  plan after:  {outline(change['plan_after'])}", highlight=False)
    bytes_by_tier = change["bytes_by_tier"]
    tiers = ", ".join(f"{tier} {count / 1e6:.2f} MB" for tier, count in bytes_by_tier.items())
    seconds = ", ".join(f"{part} {value:.2f} s" for part, value in change["seconds"].items())
    console.print(f"  steps lost: {change['steps_lost']};  bytes from {tiers}", highlight=False)
    console.print(f"  time: {seconds}", highlight=False)


def outline(plan: dict[str, Any]) -> str:
    """Describe a plan in one line: layers and workers of each stage, pipelines apart."""
    pipelines = []
    for pipeline in plan["pipelines"]:
        stages = []
        for stage in pipeline["stages"]:
            workers = "+".join(stage["workers"])
            stages.append(f"{stage['num_layers']} on {workers}")
        pipelines.append(f"{pipeline['num_microbatches']}x[{' > '.join(stages)}]")
    return "  ".join(pipelines)


def conclude(console: Console, found: Any) -> None:
    """Print the comparisons at the end."""
    table = Table(title="Result (EMULATED speeds)", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    summary = found.outcome.summary
    plan = summary["plans"][0]
    error = plan["measured_step_s"] / plan["predicted_step_s"] - 1
    changes = summary["reconfigurations"]
    bytes_from_s3 = sum(change["bytes_by_tier"]["s3"] for change in changes)
    rows = [
        ("steps trained, steps lost", f"{summary['steps']}, {summary['steps_lost']}"),
        (
            "final loss; the same job undisturbed in one process",
            f"{summary['final_loss']:.6f}; {found.reference_losses[-1]:.6f}",
        ),
        (
            "largest relative difference of the loss at any step",
            f"{found.max_relative_loss_difference:.1e}",
        ),
        (
            "step time measured, predicted",
            f"{plan['measured_step_s']:.3f} s, {plan['predicted_step_s']:.3f} s ({error:+.1%})",
        ),
        *_symmetric_rows(found),
        ("bytes from S3 in all recoveries", str(bytes_from_s3)),
        *_adapter_rows(found),
        ("whole demonstration", f"{found.seconds:.0f} s"),
    ]
    for what, figure in rows:
        table.add_row(what, figure)
    console.print()
    console.print(table)


def _symmetric_rows(found: Any) -> list[tuple[str, str]]:
    """Return the rows that compare with the symmetric plan, if it was run."""
    if found.symmetric is None:
        return []
    symmetric_s = found.symmetric.measured_step_s
    return [
        ("symmetric plan (megatron) on the same fleet", f"{symmetric_s:.3f} s"),
        ("speed-up of the asymmetric plan", f"{symmetric_s / found.asymmetric_step_s:.2f}x"),
    ]


def _adapter_rows(found: Any) -> list[tuple[str, str]]:
    """Return the rows about evaluation and export of a demonstration of adapters."""
    adapter = found.adapter
    if adapter is None:
        return []
    losses = [each["loss"] for each in found.outcome.summary["evaluations"]]
    return [
        ("evaluation loss, first and last", f"{losses[0]:.4f}, {losses[-1]:.4f}"),
        (
            f"best checkpoint, of step {adapter.step}; the same by stock peft",
            f"{adapter.evaluation_loss:.6f}; {adapter.peft_loss:.6f}",
        ),
        ("adapter that peft loads", adapter.directory),
    ]
