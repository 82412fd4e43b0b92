"""Measure optimizer state in host memory on a GPU: losses, device memory and the price in time."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from autohet.bench.step.sides import WORKER, one_worker_plan, our_trainer, random_rows
from autohet.runtime.job import Job
from autohet.runtime.parallel.host_staging import HostStaging
from planner.cost.parameters import CostParameters
from scripts.benchmarks.gpu.measures import predict_here, timed_step
from scripts.benchmarks.gpu.part import Failed, Machine, sized_job

STEPS = 4
TOLERANCE = 2e-2
COPIED_BYTES = 1 << 30


def run(machine: Machine) -> dict[str, Any]:
    """Train 1 billion parameters with masters and moments on the device, then in host memory."""
    job = sized_job(machine, "1B")
    figures: dict[str, Any] = _link(machine)
    figures["planned_link_bytes_per_s"] = CostParameters().host_link_bytes_per_s
    losses: dict[str, list[float]] = {}
    for name in ("on_device", "offloaded"):
        figures[name], losses[name] = _steps(machine, job, offload=name == "offloaded")
        # the second run needs the memory of the first
        if machine.device_type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    errors = []
    for on_device, offloaded in zip(losses["on_device"], losses["offloaded"], strict=True):
        errors.append(abs(on_device - offloaded) / offloaded)
    worst = max(errors)
    figures["worst_relative_loss_error"] = worst
    if worst > TOLERANCE:
        raise Failed("an offloaded state does not train as one on the device", figures)
    return figures


def _steps(machine: Machine, job: Job, *, offload: bool) -> tuple[dict[str, Any], list[float]]:
    """Return the median seconds of step and update, kept bytes, the prediction, and losses."""
    on_gpu = machine.device_type == "cuda"
    rows = random_rows(job, machine.device)
    plan = one_worker_plan(job)
    if offload:
        plan = plan.with_offloading()
    trainer = our_trainer(job, machine.device, plan=plan)
    seconds = []
    updates = []
    losses = []
    for _ in range(STEPS):
        result, step_s = timed_step(machine, trainer, rows)
        seconds.append(step_s)
        updates.append(result.parts_s["optimizer"])
        losses.append(result.loss)
    prediction = predict_here(machine, job, plan)
    found: dict[str, Any] = {
        "step_s": statistics.median(seconds[1:]),
        "update_s": statistics.median(updates[1:]),
        "predicted_update_s": prediction.breakdown_s["optimizer"],
        "predicted_peak_bytes": prediction.memory_bytes_by_worker[WORKER],
        "state_is_on_host": all(each.device.type == "cpu" for each in trainer.state.values()),
    }
    if on_gpu:
        found["allocated_bytes"] = torch.cuda.memory_allocated()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    return found, losses


def _link(machine: Machine) -> dict[str, Any]:
    """Return bytes per second down to the host and up again through the staging buffers."""
    on_gpu = machine.device_type == "cuda"
    num_bytes = COPIED_BYTES if on_gpu else 1 << 16
    count = num_bytes // 4
    device = torch.ones(count, device=machine.device)
    host = torch.ones(count)
    staging = HostStaging(machine.device)

    def down() -> None:
        for _ in staging.down(device):
            pass

    def up() -> None:
        staging.up(host, device)

    found = {}
    for name, copy in (("down", down), ("up", up)):
        copy()
        began = time.perf_counter()
        copy()
        if on_gpu:
            torch.cuda.synchronize()
        found[f"{name}_bytes_per_s"] = 4 * count / (time.perf_counter() - began)
    return found
