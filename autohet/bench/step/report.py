"""`autohet bench step`: a training step of this package, on one worker, against a plain loop.

Both train the same model, in one run. On the home ground of symmetric trainers, two equal pipelines
of two stages, it is also compared with PyTorch's own pipelining and DDP.

Both sides do the same steps of the same job on random tokens in the same precision, with the same
attention and the same setting of TF32; rounds alternate, so that a machine's load falls on both.
"""

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace

import torch
from rich.table import Table

from autohet.bench.step import pipelining
from autohet.bench.step.sides import ours, plain, random_rows
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.process.terminal import PlainConsole
from planner.errors import ConfigError
from planner.inputs.documents import Document

WARM_UP_STEPS = 1
# Dense peak of the tensor cores for bf16, FLOP/s, by the device's name (NVIDIA's data sheets).
PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "T4": 65e12,
}
DEFAULT_JOB = {
    "name": "bench-step",
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "vocab_size": 2048,
            "max_position_embeddings": 256,
        }
    },
    "training": {
        "global_batch_sequences": 8,
        "sequence_length": 128,
        "steps": 100,
        "precision": "fp32",
    },
}


def run(args: argparse.Namespace) -> int:
    """Print the figures; return exit code 0 once both sides were measured."""
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}; it must be at least 1")
    job = Job.from_yaml(args.job) if args.job else Job.from_document(DEFAULT_JOB)
    document = step_document(job, args.steps, compiled=args.compile)
    if not args.no_pipelining:
        document["pipelining"] = pipelining_document(job, args.steps)
    if args.json:
        print(json.dumps(document))
    else:
        _show(document)
    return 0


def step_document(job: Job, steps: int, *, compiled: bool = False) -> Document:
    """Compare a step of this package with one of a plain loop.

    Figures: seconds, tokens per second, model FLOPs utilisation. `compiled`: both sides' blocks by
    torch.compile.
    """
    on_cuda = torch.cuda.is_available() and job.training.device != "cpu"
    device = torch.device("cuda" if on_cuda else "cpu")
    rows = random_rows(job, device)
    mine = replace(job, training=replace(job.training, compile_blocks=compiled))
    sides = (
        ("autohet", ours(mine, device, rows)),
        ("plain", plain(job, device, rows, compiled="blocks" if compiled else "no")),
    )
    loads = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {"autohet": [], "plain": []}
    losses: dict[str, list[float]] = {"autohet": [], "plain": []}
    for _ in range(WARM_UP_STEPS + steps):
        for name, step in sides:
            began = time.perf_counter()
            losses[name].append(step())
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    medians = {
        name: statistics.median(measured[WARM_UP_STEPS:]) for name, measured in seconds.items()
    }
    return _document(job, device, medians, losses, loads)


def _document(
    job: Job,
    device: torch.device,
    medians: dict[str, float],
    losses: dict[str, list[float]],
    load: float,
) -> Document:
    tokens = job.training.global_batch_sequences * job.training.sequence_length
    flops = planning_inputs(job).training_flops * job.training.global_batch_sequences
    return {
        "job": job.name,
        "precision": {"autohet": job.training.precision, "plain": job.training.precision},
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32,
        "attention": "torch scaled_dot_product_attention, both",
        "device": (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"CPU ({torch.get_num_threads()} threads)"
        ),
        "step_s": medians,
        "ratio_vs_plain": medians["autohet"] / medians["plain"],
        "tokens_per_s_vs_plain": medians["plain"] / medians["autohet"],
        "tokens_per_s": {name: tokens / seconds for name, seconds in medians.items()},
        "mfu": {name: mfu(flops / seconds, device) for name, seconds in medians.items()},
        "max_abs_loss_difference": max(
            abs(a - b) for a, b in zip(losses["autohet"], losses["plain"], strict=True)
        ),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average_1min": load,
    }


def pipelining_document(job: Job, steps: int) -> Document:
    """Compare with stock pipelining with DDP on an equal plan, four processes of this machine.

    `why_not` says why it was not measured.
    """
    on_cuda = torch.cuda.device_count() >= pipelining.NUM_PIPELINES * pipelining.NUM_STAGES
    config = load_config(job.model, job.training)
    if config.model_type != "llama" or config.tie_word_embeddings:
        return {"why_not": "the stock stages are of a Llama with untied embeddings"}
    if torch.cuda.is_available() and job.training.device != "cpu" and not on_cuda:
        return {
            "why_not": (
                f"four processes need four GPUs; this machine has {torch.cuda.device_count()}"
            )
        }
    measured = pipelining.measure(
        job, steps, "cuda" if on_cuda and job.training.device != "cpu" else "cpu"
    )
    medians = pipelining.medians(measured.seconds)
    cpu_s = pipelining.medians(measured.cpu_s)
    tokens = job.training.global_batch_sequences * job.training.sequence_length
    losses = zip(measured.losses["autohet"], measured.losses["pipelining"], strict=True)
    return {
        "plan": (
            f"{pipelining.NUM_PIPELINES} pipelines of {pipelining.NUM_STAGES} stages, one process"
            " each"
        ),
        "step_s": medians,
        "tokens_per_s": {name: tokens / seconds for name, seconds in medians.items()},
        "tokens_per_s_vs_pipelining": medians["pipelining"] / medians["autohet"],
        "cpu_s": cpu_s,
        "cpu_s_vs_pipelining": cpu_s["autohet"] / cpu_s["pipelining"],
        "max_abs_loss_difference": max(abs(one - other) for one, other in losses),
    }


def mfu(flops_per_s: float, device: torch.device) -> float | None:
    """Return the model's FLOPs over a known CUDA device's peak; None on any other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((flops_per_s / peak for kind, peak in PEAK_FLOPS.items() if kind in name), None)


def _show(document: Document) -> None:
    table = Table(
        title=f"A step of {document['job']} on {document['device']}", title_justify="left"
    )
    for column in ("", "step s", "tokens/s", "MFU"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("autohet", "plain"):
        mfu = document["mfu"][name]
        table.add_row(
            f"{name} ({document['precision'][name]})",
            f"{document['step_s'][name]:.4f}",
            f"{document['tokens_per_s'][name]:,.0f}",
            "-" if mfu is None else f"{mfu:.1%}",
        )
    console = PlainConsole()
    console.print(table)
    console.print(
        f"ratio {document['ratio_vs_plain']:.3f}; largest loss difference"
        f" {document['max_abs_loss_difference']:.1e}; load {document['load_average_1min']:.1f}"
    )
    stock = document.get("pipelining", {})
    if "why_not" in stock:
        console.print(f"stock pipelining with DDP was not measured: {stock['why_not']}")
    elif stock:
        seconds = stock["step_s"]
        console.print(
            f"{stock['plan']}: autohet {seconds['autohet']:.4f} s, torch.distributed.pipelining"
            f" with DDP {seconds['pipelining']:.4f} s: {stock['tokens_per_s_vs_pipelining']:.3f} of"
            " its tokens per second"
        )
