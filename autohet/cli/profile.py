"""Command `autohet profile`: measures this machine's devices for a job's layers.

It writes a profile table.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autohet.cli.plans.options import check_output
from autohet.runtime.job import Job
from autohet.runtime.step.precision import format_of
from planner.errors import ConfigError
from planner.inputs.documents import Document, refuse_unwritable
from planner.inputs.profile import Measurement, ProfileTable, write_profile

DESCRIPTION = (
    "Measures forward, backward and optimizer seconds of a job's embedding, blocks and head"
    " on this machine's devices, and writes the table that `autohet plan --profile` reads."
    " Of a pretrained mixture of experts it also measures how unequal the experts' loads"
    " are, on the job's data."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--job", required=True, metavar="JOB", help="job document (YAML)")
    add("--out", required=True, metavar="TABLE", help="profile table to write (.parquet or .csv)")
    add(
        "--links-out",
        metavar="TABLE",
        help="also measure the links between two devices of this machine (.csv)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: CUDA where there is a GPU",
    )
    add("--gpu-type", metavar="NAME", help="name in the table (default: this GPU's, or CPU)")
    add(
        "--microbatches",
        type=_counts,
        default=(1, 2, 4, 8, 16),
        metavar="1,2,...",
        help="sequences in a microbatch (default: 1,2,4,8,16)",
    )
    add(
        "--tp-degrees",
        type=_counts,
        metavar="1,2,...",
        help="default: powers of two up to the number of GPUs",
    )
    add(
        "--repeats",
        type=_repeats,
        default=5,
        metavar="N",
        help="measurements of each; their median is written (default: 5)",
    )


def _counts(text: str) -> tuple[int, ...]:
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        values = ()
    if not values or values[0] < 1:
        raise argparse.ArgumentTypeError(f"must be positive integers such as 1,2,4, not {text}")
    return values


def _repeats(text: str) -> int:
    number = 0
    if "," not in text:
        (number,) = _counts(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be one positive integer, not {text}")
    return number


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from autohet.runtime.profiling.device_processes import measure_tensor_parallel
    from autohet.runtime.profiling.device_profile import OutOfMemory, measure_layers

    check_output("--out", args.out, (".parquet", ".csv"))
    check_output("--links-out", args.links_out, (".csv",))
    job = Job.from_yaml(args.job)
    request, degrees = _request(args, job)
    products = _exact_products(request)
    rows: list[Measurement] = []
    too_large: list[OutOfMemory] = []
    for degree in degrees:
        found: Iterable[Any]
        if degree == 1:
            found = measure_layers(request)
        else:
            found = measure_tensor_parallel(request, degree)
        for item in found:
            _report(item)
            if isinstance(item, OutOfMemory):
                too_large.append(item)
            else:
                rows.append(item)
    if not rows:
        raise ConfigError(
            "nothing was measured: not even the smallest microbatch fits on this device"
        )

    spread = _load_spread(job, request)
    rows = _with_load_spread(rows, request.config, spread)
    loads = _largest_rank_loads(request.config, spread)
    with refuse_unwritable(args.out):
        write_profile(args.out, ProfileTable(rows))
    links = _links(args, request.device_type, request.gpu_type)
    facts = {"largest_rank_load_by_tp_degree": loads, "exact_products": products}
    _finish(args, request.gpu_type, rows, too_large, links, facts)
    return 0


def _exact_products(request: Any) -> dict[str, bool]:
    """Return whether each device of this machine computes products of integers to the known bits.

    It prints them, too.
    """
    import torch

    from autohet.runtime.models.family import COMPUTE_DTYPES
    from autohet.runtime.profiling.exact_products import has_exact_products

    names = ["cpu"]
    if request.device_type == "cuda":
        names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    found = {}
    for name in names:
        found[name] = has_exact_products(torch.device(name), COMPUTE_DTYPES[request.precision])
        outcome = "right" if found[name] else "WRONG, do not train on it"
        print(f"exact products on {name}: {outcome}", file=sys.stderr)
    return found
    return found


def _load_spread(job: Job, request: Any) -> float | None:
    """Return the spread of the experts' loads; None if it cannot be measured."""
    import torch

    from autohet.runtime.models.layers.experts import num_experts
    from autohet.runtime.profiling.routing import measure_load_spread, why_unmeasured

    reason = why_unmeasured(job, request.config)
    if reason is None:
        spread = measure_load_spread(job, request.config, torch.device(request.device_type))
        print(f"loads of experts: a spread of {spread:.0%} of their mean", file=sys.stderr)
        return spread
    if num_experts(request.config) is not None:
        print(f"loads of experts: not measured, since {reason}", file=sys.stderr)
    return None


def _largest_rank_loads(config: Any, spread: float | None) -> dict[str, float]:
    """Return the tokens of the fullest rank over the mean by TP degree; empty if not measured."""
    from autohet.runtime.models.layers.experts import num_experts
    from autohet.runtime.models.registry import family_of
    from planner.cost.layers.experts import largest_rank_loads

    experts = num_experts(config)
    if spread is None or experts is None:
        return {}
    most = family_of(config).max_tp_degree(config)
    degrees = [degree for degree in (2, 4, 8) if degree <= most]
    loads = largest_rank_loads(experts, spread, degrees)
    load_by_degree = {}
    for degree, load in zip(degrees, loads, strict=True):
        print(f"TP {degree}: the rank with most tokens has {load:.2f} of the mean", file=sys.stderr)
        load_by_degree[str(degree)] = load
    return load_by_degree


def _with_load_spread(
    rows: list[Measurement], config: Any, spread: float | None
) -> list[Measurement]:
    """Return the rows, those of blocks with experts with the spread of their loads."""
    from autohet.runtime.models.layers.experts import is_dense

    found = []
    for row in rows:
        kind, _, index = row.layer.partition(":")
        if kind == "block" and not is_dense(config, int(index or 0)):
            row = replace(row, expert_load_spread=spread)
        found.append(row)
    return found


def _request(args: argparse.Namespace, job: Job) -> tuple[Any, tuple[int, ...]]:
    """Return (profile request, TP degrees)."""
    import torch

    from autohet.runtime.models.config import load_config
    from autohet.runtime.models.family import COMPUTE_DTYPES
    from autohet.runtime.models.registry import family_of
    from autohet.runtime.profiling.device_profile import ProfileRequest
    from autohet.runtime.profiling.gpu_type import device_gpu_type

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but this machine has no CUDA device")

    section: Any = job.model
    config = load_config(section)
    count = torch.cuda.device_count() if device == "cuda" else 1
    limit = family_of(config).max_tp_degree(config)
    most = min(count, limit)
    degrees = args.tp_degrees or tuple(degree for degree in (1, 2, 4, 8) if degree <= most)
    for degree in degrees:
        if limit % degree or (device == "cuda" and degree > count):
            raise ConfigError(
                f"TP degree {degree} cannot be measured: the model's"
                f" {family_of(config).limit_of_parts(config)} allow {limit}, this machine has"
                f" {count}; choose other --tp-degrees"
            )
    if job.training.precision not in COMPUTE_DTYPES:
        raise ConfigError(f"precision '{job.training.precision}' cannot be measured")
    gpu_type = args.gpu_type or device_gpu_type(device)
    request = ProfileRequest(
        model=job.name,
        config=config,
        precision=measured_format(job, gpu_type),
        sequence_length=job.training.sequence_length,
        microbatches=args.microbatches,
        device_type=device,
        gpu_type=gpu_type,
        repeats=args.repeats,
        compile_blocks=job.training.compile_blocks,
    )
    return request, degrees


def measured_format(job: Job, gpu_type: str) -> str:
    """Return the format in which the GPU type computes the job; bf16 for fp8, made from its times.

    A type that the job leaves out is measured in the job's precision.
    """
    compute = format_of(job, gpu_type) or job.training.precision
    if compute == "fp8":
        print("measuring bf16, from which the times of fp8 are estimated", file=sys.stderr)
        return "bf16"
    return compute


def _report(item: Any) -> None:
    if isinstance(item, Measurement):
        forward_ms = item.forward_s * 1e3
        backward_ms = (item.backward_s or 0) * 1e3
        text = f"forward {forward_ms:.3f} ms, backward {backward_ms:.3f} ms"
    else:
        text = "does not fit"
    print(
        f"{item.layer}, TP {item.tp_degree}, microbatch {item.microbatch_sequences}: {text}",
        file=sys.stderr,
    )


def _links(args: argparse.Namespace, device: str, gpu_type: str) -> list[Document]:
    if not args.links_out:
        return []
    import torch

    from autohet.runtime.profiling.device_processes import measure_links

    if device == "cuda" and torch.cuda.device_count() < 2:
        raise ConfigError("--links-out needs two GPUs in this machine; leave it out")
    pair = {"scope": "intra", "gpu_type": gpu_type, "peer_gpu_type": gpu_type}
    rows: list[Document] = [pair | asdict(link) for link in measure_links(device)]
    with refuse_unwritable(args.links_out), Path(args.links_out).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def _finish(
    args: argparse.Namespace,
    gpu_type: str,
    rows: list[Measurement],
    too_large: list[Any],
    links: list[Document],
    facts: Document,
) -> None:
    if args.json:
        spreads = [row.expert_load_spread for row in rows if row.expert_load_spread is not None]
        document = {
            "profile": args.out,
            "gpu_type": gpu_type,
            "measurements": len(rows),
            "out_of_memory": [asdict(case) for case in too_large],
            "links": links,
            "expert_load_spread": max(spreads, default=None),
            **facts,
        }
        json.dump(document, sys.stdout)
        print()
        return
    print(f"{len(rows)} measurements of {gpu_type} -> {args.out}")
