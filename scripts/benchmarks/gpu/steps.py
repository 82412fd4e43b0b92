"""Steps of three sizes of model: this package and a plain loop, each eager and compiled."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autohet.bench.step.report import mfu
from autohet.bench.step.sides import Side, our_trainer, ours, plain, random_rows
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from scripts.benchmarks.gpu.part import Failed, Machine, job_of, sized_job

LOSS_TOLERANCE = 0.1
PRODUCT_SIZE = 8192


def small(machine: Machine) -> dict[str, Any]:
    """Measure a model of 0.3 billion parameters, where an H100 is bound by launches."""
    return _compare(job_of(machine, _precision(machine)), machine)


def medium(machine: Machine) -> dict[str, Any]:
    """Measure a model of 1 billion parameters, 8k tokens a microbatch.

    The plain loop also runs as one compiled graph.
    """
    return _compare(sized_job(machine, "1B"), machine, whole_model=True)


def chat(machine: Machine) -> dict[str, Any]:
    """Measure 1 billion parameters on rows of isolated documents, as chats are packed.

    The plain loop attends to whole rows, so losses differ and are not compared.
    """
    job = sized_job(machine, "1B")
    on_gpu = machine.device_type == "cuda"
    rows = random_rows(job, machine.device)
    length = job.training.sequence_length

    def begins(step: int, positions: range) -> Tensor:
        found = torch.zeros(len(positions), length, dtype=torch.bool)
        for place, position in enumerate(positions):
            # other lengths in each microbatch
            found[place, :: length // 4 - position % 7] = True
        return found

    def mine(*, compiled: bool) -> Side:
        training = replace(job.training, compile_blocks=compiled)
        trainer = our_trainer(replace(job, training=training), machine.device, begins=begins)
        return lambda: trainer.train_step(rows).loss

    sides: dict[str, Callable[[], Side]] = {"autohet": lambda: mine(compiled=False)}
    if on_gpu:
        sides["autohet_compiled"] = lambda: mine(compiled=True)
        sides["plain_compiled"] = lambda: plain(job, machine.device, rows, compiled="blocks")
    figures, _ = _measure_each(sides, job, on_gpu)
    return figures | _compared(figures)


def large(machine: Machine) -> dict[str, Any]:
    """Measure a model of 3 billion parameters, compiled only: each side takes half a minute to
    start.
    """
    return _compare(sized_job(machine, "3B"), machine, eager=False)


def _precision(machine: Machine) -> str:
    return "bf16" if machine.device_type == "cuda" else "fp32"


def _compare(
    job: Job, machine: Machine, *, whole_model: bool = False, eager: bool = True
) -> dict[str, Any]:
    """Measure one side after the other: two states of a large model do not fit at once."""
    on_gpu = machine.device_type == "cuda"
    flops = planning_inputs(job).training_flops * job.training.global_batch_sequences
    product = _product_flops_per_s(machine)
    sides = _sides(job, machine, whole_model=whole_model)
    if on_gpu and not eager:
        sides = {name: make for name, make in sides.items() if "compiled" in name}
    measured, losses = _measure_each(sides, job, on_gpu)
    for found in measured.values():
        if "step_s" in found:
            achieved = flops / found["step_s"]
            found["mfu"] = mfu(achieved, machine.device)
            found["of_product"] = achieved / product
    figures = {"product_flops_per_s": product, "step_flops": flops, **measured}
    figures |= _compared(figures)
    reference = next(iter(losses.values()), [])
    differences = [abs(a - b) for each in losses.values() for a, b in zip(each, reference)]
    figures["max_abs_loss_difference"] = max(differences, default=0.0)
    if figures["max_abs_loss_difference"] > LOSS_TOLERANCE:
        raise Failed("the sides do not train alike", figures)
    return figures


def _measure_each(
    sides: dict[str, Callable[[], Side]], job: Job, on_gpu: bool
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return figures and losses of each side; one that does not fit has the reason alone."""
    tokens = job.training.global_batch_sequences * job.training.sequence_length
    figures: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    for name, make in sides.items():
        try:
            found, losses[name] = _measure(make, on_gpu)
        except torch.OutOfMemoryError:
            figures[name] = {"why_not": "out of memory"}
        else:
            figures[name] = found | {"tokens_per_s": tokens / found["step_s"]}
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
    return figures, losses


def _compared(figures: dict[str, Any]) -> dict[str, float]:
    """Return our tokens per second over the plain loop's, eager to eager, compiled to compiled."""
    speed: dict[str, float] = {}
    for name, found in figures.items():
        if isinstance(found, dict) and "tokens_per_s" in found:
            speed[name] = found["tokens_per_s"]
    ratios = {}
    for suffix in ("", "_compiled"):
        if f"autohet{suffix}" in speed and f"plain{suffix}" in speed:
            ratios[f"vs_plain{suffix}"] = speed[f"autohet{suffix}"] / speed[f"plain{suffix}"]
    ours_best = max((speed[name] for name in speed if name.startswith("autohet")), default=None)
    plain_best = max((speed[name] for name in speed if name.startswith("plain")), default=None)
    if ours_best is not None and plain_best is not None:
        ratios["best_vs_best_plain"] = ours_best / plain_best
    return ratios


def _sides(job: Job, machine: Machine, *, whole_model: bool) -> dict[str, Callable[[], Side]]:
    device = machine.device
    on_gpu = machine.device_type == "cuda"
    rows = random_rows(job, device)

    def mine(*, compiled: bool) -> Side:
        training = replace(job.training, compile_blocks=compiled)
        return ours(replace(job, training=training), device, rows)

    sides: dict[str, Callable[[], Side]] = {
        "autohet": lambda: mine(compiled=False),
        "plain": lambda: plain(job, device, rows),
    }
    if on_gpu:  # compiling on a CPU measures nothing
        sides["autohet_compiled"] = lambda: mine(compiled=True)
        sides["plain_compiled"] = lambda: plain(job, device, rows, compiled="blocks")
        if whole_model:
            sides["plain_compiled_whole"] = lambda: plain(job, device, rows, compiled="model")
    return sides


def _measure(make: Callable[[], Side], on_gpu: bool) -> tuple[dict[str, Any], list[float]]:
    """Measure one side; return its figures and its losses."""
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    side = make()
    losses = [side()]
    _synchronize(on_gpu)
    first_s = time.perf_counter() - began
    losses.append(side())
    _synchronize(on_gpu)
    seconds = []
    for _ in range(6 if on_gpu else 1):
        began = time.perf_counter()
        losses.append(side())
        _synchronize(on_gpu)
        seconds.append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "step_s": statistics.median(seconds),
        "slowest_step_s": max(seconds),
        "start_and_first_step_s": first_s,
    }
    if on_gpu:
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    return found, losses


def _product_flops_per_s(machine: Machine) -> float:
    """Return the FLOP/s of a large bf16 matrix product on this device: the practical peak."""
    on_gpu = machine.device_type == "cuda"
    size, rounds = (PRODUCT_SIZE, 20) if on_gpu else (64, 1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left = torch.randn(size, size, device=machine.device, dtype=dtype)
    right = torch.randn(size, size, device=machine.device, dtype=dtype)
    for _ in range(3):
        left @ right
    _synchronize(on_gpu)
    began = time.perf_counter()
    for _ in range(rounds):
        left @ right
    _synchronize(on_gpu)
    return float(rounds * 2 * size**3 / (time.perf_counter() - began))


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
