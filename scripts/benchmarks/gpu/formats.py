"""Measure a model of 1 billion parameters in bf16, fp16 and fp8 on a GPU: seconds and losses."""

from __future__ import annotations

import gc
import statistics
from dataclasses import replace
from typing import Any

import torch

from autohet.bench.step.sides import one_worker_plan, our_trainer, random_rows
from autohet.runtime.job import Job
from autohet.runtime.models.layers.fp8 import check_fp8
from planner.errors import ConfigError
from planner.plans.plan import ComputeFormat, Plan
from scripts.benchmarks.gpu.measures import timed_step
from scripts.benchmarks.gpu.part import Failed, Machine, sized_job

STEPS = 8
TOLERANCE = 1e-2


def run(machine: Machine) -> dict[str, Any]:
    """Train the same steps in each format; losses must be those of bf16 within TOLERANCE."""
    job = sized_job(machine, "1B")
    if machine.device_type == "cuda":
        job = replace(job, training=replace(job.training, precision="bf16"))
    figures: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    formats: list[ComputeFormat] = ["bf16", "fp16"]
    try:
        check_fp8(machine.device)
        formats.append("fp8")
    except ConfigError as error:
        figures["fp8"] = {"why_not": str(error)}
    for compute in formats:
        figures[compute], losses[compute] = _steps(machine, job, compute)
        if machine.device_type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    worst = 0.0
    for name, found in losses.items():
        pairs = zip(found, losses["bf16"], strict=True)
        difference = max(abs(a - b) / b for a, b in pairs)
        figures[name]["worst_relative_loss_difference"] = difference
        figures[name]["vs_bf16"] = figures["bf16"]["step_s"] / figures[name]["step_s"]
        worst = max(worst, difference)
    if not worst <= TOLERANCE:
        raise Failed("a format does not train as bf16 does", figures)
    return figures


def _steps(
    machine: Machine, job: Job, compute: ComputeFormat
) -> tuple[dict[str, Any], list[float]]:
    """Return seconds, memory and scale of the steps in a format, and their losses."""
    on_gpu = machine.device_type == "cuda"
    rows = random_rows(job, machine.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = our_trainer(job, machine.device, plan=_plan_in(one_worker_plan(job), compute))
    seconds = []
    losses = []
    scales = []
    for _ in range(STEPS):
        result, step_s = timed_step(machine, trainer, rows)
        seconds.append(step_s)
        losses.append(result.loss)
        scales.append(None if result.loss_scale is None else result.loss_scale.factor)
    found: dict[str, Any] = {
        "first_s": seconds[0],
        "step_s": statistics.median(seconds[2:]),
        "losses": losses,
        "loss_scales": scales,
    }
    if on_gpu:
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    return found, losses


def _plan_in(plan: Plan, compute: ComputeFormat) -> Plan:
    """Return the plan with all stages in a format."""
    pipelines = tuple(
        replace(each, stages=tuple(replace(stage, compute=compute) for stage in each.stages))
        for each in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)
