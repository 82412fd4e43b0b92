"""Model FLOPs utilisation and peak memory by GPU type, measured and predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from autohet.driver.control.planning import Proposal
from planner.catalogue import find_gpu_type
from planner.cost.model import CostModel
from planner.plan import Pipeline, Plan, Stage


def utilisation_by_gpu_type(
    proposal: Proposal, step_s: float | None, peak_bytes: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Return the utilisation by GPU type of the plan.

    Each entry has `gpus`, `mfu` and `predicted_mfu`, `peak_memory_bytes` and
    `predicted_memory_bytes` (of the fullest GPU). A value is None where it is not measured, or
    where the catalogue has no peak rate of the type.

    step_s: measured seconds of a step. peak_bytes: measured by worker.
    """
    plan, cost = proposal.plan, proposal.cost
    if cost is None or plan.spmd is not None:
        return {}
    workers: dict[str, list[str]] = defaultdict(list)
    for worker in plan.workers:
        workers[cost.fleet.gpu_type(worker)].append(worker)
    flops = _flops_by_gpu_type(plan, cost)
    predicted = proposal.prediction.memory_bytes_by_worker
    found = {}
    for gpu_type, mine in sorted(workers.items()):
        known = find_gpu_type(gpu_type)
        rate = None if known is None else len(mine) * known.peak_flops(cost.precision)
        measured = [peak_bytes[worker] for worker in mine if worker in peak_bytes]
        found[gpu_type] = {
            "gpus": len(mine),
            "mfu": _share(flops[gpu_type], step_s, rate),
            "predicted_mfu": _share(flops[gpu_type], proposal.predicted_step_s, rate),
            "peak_memory_bytes": max(measured, default=None),
            "predicted_memory_bytes": max(predicted[worker] for worker in mine),
        }
    return found


def _share(flops: float, seconds: float | None, rate: float | None) -> float | None:
    """Return the part of the peak rate that a step of this number of FLOPs reaches."""
    if not seconds or not rate:
        return None
    return round(flops / (seconds * rate), 5)


def _flops_by_gpu_type(plan: Plan, cost: CostModel) -> dict[str, float]:
    """Return the model FLOPs of a step by GPU type."""
    found: dict[str, float] = defaultdict(float)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            gpu_type = cost.fleet.gpu_type(stage.workers[0])
            found[gpu_type] += _stage_flops(pipeline, stage, cost)
    return found


def _stage_flops(pipeline: Pipeline, stage: Stage, cost: CostModel) -> float:
    """Return the model FLOPs of a stage in a step.

    MFU counts no recomputation (Chowdhery et al., PaLM, appendix B).
    """
    spec = cost.spec
    layers = list(spec.blocks[stage.first_layer : stage.end_layer])
    if stage.first_layer == 0:
        layers.append(spec.embedding)
    if stage.end_layer == spec.num_layers:
        layers.append(spec.head)
    each = sum(layer.training_flops(cost.sequence_length) for layer in layers)
    return each * pipeline.num_sequences


__all__ = ["utilisation_by_gpu_type"]
