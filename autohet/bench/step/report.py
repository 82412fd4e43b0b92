"""`autohet bench step`: a training step of this package, one worker, against a plain loop of the same model, in one run.

Both do the same steps of the same job on random tokens; rounds alternate, so that a machine's load falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from autohet.runtime.groups import GenerationGroups
from autohet.runtime.job import Job
from autohet.runtime.layout import STATE_KINDS, layout_of_plan, state_name
from autohet.runtime.models import family_of, load_config
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.planning import planning_inputs
from autohet.runtime.reference import reference_model, train_reference
from autohet.runtime.trainer import StageTrainer
from planner.errors import ConfigError
from planner.plan import Plan

WORKER = "here/0"
WARM_UP_STEPS = 1
# Dense peak of the tensor cores for bf16, FLOP/s, by the device's name (NVIDIA's data sheets).
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "A10G": 70e12, "L40S": 362e12, "T4": 65e12}
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
    "training": {"global_batch_sequences": 8, "sequence_length": 128, "steps": 100, "precision": "fp32"},
}


def run(args: argparse.Namespace) -> int:
    """Prints the figures; exit code 0 once both were measured."""
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}; it must be at least 1")
    job = Job.from_yaml(args.job) if args.job else Job.from_document(DEFAULT_JOB)
    document = step_document(job, args.steps)
    if args.json:
        print(json.dumps(document))
    else:
        _show(document)
    return 0


def step_document(job: Job, steps: int) -> dict[str, Any]:
    """Median seconds of a step of both, their ratio, tokens per second and, on CUDA, model FLOPs utilisation."""
    device = torch.device("cuda" if torch.cuda.is_available() and job.training.device != "cpu" else "cpu")
    rows = random_rows(job, device)
    ours, plain = _ours(job, device, rows), _plain(job, device, rows)
    loads = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {"autohet": [], "plain": []}
    losses: dict[str, list[float]] = {"autohet": [], "plain": []}
    for _ in range(WARM_UP_STEPS + steps):
        for name, step in (("autohet", ours), ("plain", plain)):
            began = time.perf_counter()
            losses[name].append(step())
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(measured[WARM_UP_STEPS:]) for name, measured in seconds.items()}
    return _document(job, device, medians, losses, loads)


def _document(
    job: Job, device: torch.device, medians: dict[str, float], losses: dict[str, list[float]], load: float
) -> dict[str, Any]:
    tokens = job.training.global_batch_sequences * job.training.sequence_length
    flops = planning_inputs(job).training_flops * job.training.global_batch_sequences
    return {
        "job": job.name,
        "precision": {"autohet": job.training.precision, "plain": "fp32"},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)",
        "step_s": medians,
        "ratio_vs_plain": medians["autohet"] / medians["plain"],
        "tokens_per_s": {name: tokens / seconds for name, seconds in medians.items()},
        "mfu": {name: _mfu(flops / seconds, device) for name, seconds in medians.items()},
        "max_abs_loss_difference": max(abs(a - b) for a, b in zip(losses["autohet"], losses["plain"], strict=True)),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average_1min": load,
    }


def _mfu(flops_per_s: float, device: torch.device) -> float | None:
    """On a known CUDA device: the model's FLOPs over its peak; None elsewhere."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((flops_per_s / peak for kind, peak in PEAK_FLOPS.items() if kind in name), None)


def random_rows(job: Job, device: torch.device) -> Callable[[int, range], tuple[Tensor, Tensor]]:
    """Batches of random tokens, a function of the step alone."""
    config = load_config(job.model)
    batch, length = job.training.global_batch_sequences, job.training.sequence_length

    def rows(step: int, sequences: range) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        whole = torch.randint(int(config.vocab_size), (batch, length + 1), generator=generator)
        part = whole[sequences.start : sequences.stop].to(device)
        return part[:, :-1].contiguous(), part[:, 1:].contiguous()

    return rows


def _plan(job: Job) -> Plan:
    config = load_config(job.model)
    size = job.parallelism.microbatch_sequences or min(8, job.training.global_batch_sequences)
    stage = {"first_layer": 0, "num_layers": family_of(config).num_layers(config), "workers": [WORKER]}
    return Plan.from_document(
        {
            "version": 1,
            "model": job.name,
            "global_batch_sequences": job.training.global_batch_sequences,
            "microbatch_sequences": size,
            "sequence_length": job.training.sequence_length,
            "pipelines": [{"num_microbatches": job.training.global_batch_sequences // size, "stages": [stage]}],
        }
    )


def _ours(job: Job, device: torch.device, rows: Any) -> Callable[[], float]:
    """A step by the trainer that workers run, on a plan of one worker; returns its loss."""
    config, plan = load_config(job.model), _plan(job)
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    groups = GenerationGroups(store, 0, WORKER, device, 60.0, 60.0)
    names = list(family_of(config).parameter_specs(config))
    assert layout_of_plan(plan, config).workers == (WORKER,)
    state: dict[str, Tensor] = {}
    for name, tensor in initial_parameters(config, names, job.training.seed):
        for kind in STATE_KINDS:
            whole = tensor.to(device, copy=True) if kind == "param" else torch.zeros_like(tensor, device=device)
            state[state_name(kind, name)] = whole
    trainer = StageTrainer(config, plan, WORKER, groups, job.training, device, state, 0)
    return lambda: trainer.train_step(rows).loss


def _plain(job: Job, device: torch.device, rows: Any) -> Callable[[], float]:
    """A step by transformers' whole model and torch.optim.AdamW, in fp32; returns its loss."""
    config = load_config(job.model)
    names = list(family_of(config).parameter_specs(config))
    model: Any = reference_model(config, initial_parameters(config, names, job.training.seed))
    model.to(device)
    size = job.parallelism.microbatch_sequences or min(8, job.training.global_batch_sequences)
    steps = train_reference(model, job.training, rows, 1_000_000, size)
    return lambda: next(steps)


def _show(document: dict[str, Any]) -> None:
    table = Table(title=f"A step of {document['job']} on {document['device']}", title_justify="left")
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
    console = Console()
    console.print(table)
    console.print(
        f"ratio {document['ratio_vs_plain']:.3f}; largest loss difference {document['max_abs_loss_difference']:.1e};"
        f" load {document['load_average_1min']:.1f}"
    )
