"""Command `autohet bench planner|recovery|step`: measures parts of AutoHet and their baselines.

Both are measured in the same run.
"""

import argparse
import importlib

from autohet.cli.plans.options import check_output

BENCHMARKS = {
    "planner": "accuracy of the cost model; the searches against bounds and other planners",
    "recovery": (
        "restores by the real code, over real or throttled links, policies side by side; published"
        " scale, simulated"
    ),
    "step": (
        "a plan's step on this machine against a plain loop of the same model, and against stock"
        " pipelining"
    ),
}


DESCRIPTION = (
    "Benchmarks: what the parts achieve, measured in one run beside what they are held against."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="planner|recovery|step")
    for name, summary in BENCHMARKS.items():
        of_kind = kinds.add_parser(name, help=summary, description=summary)
        of_kind.add_argument("--json", action="store_true", help="print one JSON document")
        if name == "planner":
            of_kind.add_argument(
                "--full", action="store_true", help="all rows: some minutes instead of one"
            )
        elif name == "recovery":
            _recovery_options(of_kind)
        elif name == "step":
            _step_options(of_kind)


def _recovery_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--state-mb",
        type=float,
        default=1000.0,
        metavar="N",
        help="one copy of the state, in MB (default 1000)",
    )
    add(
        "--scale",
        type=float,
        metavar="N",
        help=(
            "1: links at their own speed, between network namespaces (needs root; the default where"
            " they can be made); else links are emulated in software, a cloud node's divided by"
            " this (default 40)"
        ),
    )
    add(
        "--step-s",
        type=float,
        default=1.0,
        metavar="N",
        help="seconds that each lost step is charged with (default 1)",
    )
    add(
        "--network-gbps",
        type=float,
        default=25.0,
        metavar="N",
        help="a cloud node's network card (default 25 Gb/s)",
    )
    add(
        "--s3-gbytes-per-s",
        type=float,
        default=1.0,
        metavar="N",
        help="a cloud node's way to S3 (default 1 GB/s)",
    )
    add("--scenarios", metavar="a,b,...", help="only these (default: all)")
    add(
        "--minutes",
        type=float,
        default=5.0,
        metavar="N",
        help="begin nothing that would take longer than this in all (default 5)",
    )
    add(
        "--quick",
        action="store_true",
        help=(
            "without the run on an emulated fleet: detect, replan, rebuild and first step stay"
            " unmeasured"
        ),
    )
    add(
        "--duel",
        action="store_true",
        help=(
            "instead: Ray Train, transformers' Trainer, torchft and AutoHet under the same notices"
            " and kills (some minutes)"
        ),
    )
    add("--no-simulation", action="store_true", help="without the simulated part")
    add("--picture", metavar="FILE", help="bars of seconds by part (needs matplotlib)")
    add("--out", metavar="FILE", help="also write the document")


def _step_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--job", metavar="JOB", help="whose model, batch and length (default: a small Llama)")
    add(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="measured steps of each; their median counts (default 5)",
    )
    add(
        "--no-pipelining",
        action="store_true",
        help="without the four processes of PyTorch's own pipelining and DDP",
    )
    add("--compile", action="store_true", help="compile both sides' blocks by torch.compile")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark's own module."""
    if args.benchmark == "recovery":
        check_output("--out", args.out)
        check_output("--picture", args.picture, (".png", ".svg", ".pdf"))
        if args.duel:
            return int(importlib.import_module("autohet.bench.duel.report").run(args))
    return int(importlib.import_module(f"autohet.bench.{args.benchmark}.report").run(args))
