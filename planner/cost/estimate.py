"""Layer times where nothing was measured: the nearest measured layer, scaled by FLOPs and memory
bandwidth; always flagged.

A block's time is launch + FLOPs / rate. The reference is the measured block (any model) nearest in
FLOPs on the same device and dtype, else on the device nearest in peak rate and memory bandwidth,
whose time is scaled by COMPUTE_SHARE of the ratio of peak rates and the rest by that of memory
bandwidths. Embedding and head are matrix products at the block's rate plus their memory traffic.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

from planner.catalogue import GpuType, find_gpu_type
from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.model_spec import LayerSpec, ModelSpec
from planner.profile import ProfileTable
from planner.profile_models import measured_model

COMPUTE_SHARE = 0.7
# One large matrix product runs at a higher rate than a whole block (1.75 times in Sailor's GH200
# profile of OPT-350M).
HEAD_RATE = 1.5
_VALUE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one microbatch, and where they come from."""

    forward_s: float
    backward_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A measured block as a line in FLOPs: seconds = launch + FLOPs / rate, forward and backward
    (FLOPs of the forward in both).
    """

    model: str
    gpu_type: str
    dtype: str
    flops: float
    forward: tuple[float, float]
    backward: tuple[float, float]


def estimate_update_s(
    gpu_type: str, layer: LayerSpec, tp_degree: int, parameters: CostParameters
) -> float:
    """One AdamW update of a layer's share: memory traffic over reached memory bandwidth."""
    device = _device(gpu_type)
    traffic = layer.parameters_per_worker(tp_degree) * parameters.optimizer_bytes_per_parameter
    return traffic / (device.memory_bytes_per_s * parameters.memory_efficiency)


def estimate_layer(
    tables: tuple[ProfileTable, ...],
    gpu_type: str,
    dtype: str,
    kind: str,
    layer: LayerSpec,
    spec: ModelSpec,
    sequence_length: int,
    microbatch: int,
    tp_degree: int,
    parameters: CostParameters,
) -> Estimate:
    """Seconds of a layer that was not measured, without tensor-parallel communication.

    Never zero.
    """
    device = _device(gpu_type)
    flops = layer.forward_flops_per_worker(sequence_length, tp_degree) * microbatch
    wanted = spec.blocks[0].forward_flops_per_worker(sequence_length, tp_degree) * microbatch
    reference = _nearest(tables, device, dtype, wanted)
    scale = device_ratio(reference, device, dtype)
    reason = (
        f"estimated from {reference.model} on {reference.gpu_type} ({reference.dtype}) by FLOPs"
    )
    if reference.gpu_type != device.name or reference.dtype != dtype:
        reason += " and memory bandwidth"
    (launch_f, per_flop_f), (launch_b, per_flop_b) = reference.forward, reference.backward
    if kind == "block":
        return Estimate(
            scale * (launch_f + flops * per_flop_f), scale * (launch_b + flops * per_flop_b), reason
        )
    traffic = _memory_traffic_bytes(
        kind, layer, spec, sequence_length, microbatch, tp_degree, dtype
    )
    moved = traffic / (device.memory_bytes_per_s * parameters.memory_efficiency)
    small = 20e-6
    work = scale * flops / HEAD_RATE
    return Estimate(
        small + work * per_flop_f + moved, small + work * per_flop_b + 2 * moved, reason
    )


def _memory_traffic_bytes(
    kind: str,
    layer: LayerSpec,
    spec: ModelSpec,
    sequence_length: int,
    microbatch: int,
    tp_degree: int,
    dtype: str,
) -> float:
    """Embedding: rows read, summed with positions and written. Head: logits written, then read and
    written in fp32 by the loss.
    """
    tokens = microbatch * sequence_length
    if kind == "embedding":
        return 3.0 * tokens * spec.hidden_size * _VALUE_BYTES[dtype]
    return tokens * spec.vocab_size / tp_degree * (2 * _VALUE_BYTES[dtype] + 4)


def device_ratio(reference: Reference, device: GpuType, dtype: str) -> float:
    """How many times longer `device` takes at `dtype` than the reference's device at its dtype; 1
    for the same device and dtype.
    """
    other = _device(reference.gpu_type)
    rates = other.peak_flops(reference.dtype) / device.peak_flops(dtype)
    values = _VALUE_BYTES[dtype] / _VALUE_BYTES[reference.dtype]
    bandwidths = other.memory_bytes_per_s / device.memory_bytes_per_s * values
    return COMPUTE_SHARE * rates + (1 - COMPUTE_SHARE) * bandwidths


def _device(gpu_type: str) -> GpuType:
    device = find_gpu_type(gpu_type)
    if device is None:
        raise ConfigError(
            f"GPU type '{gpu_type}' was not measured and is not in the catalogue, so nothing can be"
            " estimated for it; give a profile that has it (--profile), or name a known type in"
            " the label 'autohet.io/gpu-type'"
        )
    return device


def _nearest(
    tables: tuple[ProfileTable, ...], device: GpuType, dtype: str, flops: float
) -> Reference:
    """The block nearest in FLOPs among those of the nearest device and dtype."""
    return min(
        _of_nearest_device(tables, device, dtype),
        key=lambda r: (abs(math.log(r.flops / flops)), r.model),
    )


@lru_cache(maxsize=64)
def _of_nearest_device(
    tables: tuple[ProfileTable, ...], device: GpuType, dtype: str
) -> tuple[Reference, ...]:
    def distance(reference: Reference) -> float:
        other = _device(reference.gpu_type)
        apart = (
            0.0
            if reference.dtype == dtype
            else (1.0 if _half(reference.dtype) == _half(dtype) else 4.0)
        )
        apart += 3 * abs(math.log(other.peak_flops(dtype) / device.peak_flops(dtype)))
        apart += abs(math.log(other.memory_bytes_per_s / device.memory_bytes_per_s))
        return round(apart, 9)

    found = [(distance(reference), reference) for reference in references(tables)]
    least = min(apart for apart, _ in found)
    return tuple(reference for apart, reference in found if apart == least)


def _half(dtype: str) -> bool:
    return dtype in ("fp16", "bf16")


def references(tables: tuple[ProfileTable, ...]) -> list[Reference]:
    """Every measured tp-1 block of a known model as a line in FLOPs."""
    return [reference for table in tables for reference in _table_references(table)]


@cache
def _table_references(table: ProfileTable) -> tuple[Reference, ...]:
    found = []
    for key in table.keys:
        facts = measured_model(key.model)
        points = table.layers(key).get("block", {})
        usable = {b: p for b, p in points.items() if p.backward_s is not None}
        if (
            facts is None
            or key.tp_degree != 1
            or len(usable) < 2
            or find_gpu_type(key.gpu_type) is None
        ):
            continue
        flops = facts.forward_flops(key.sequence_length)
        forward = _line([(b * flops, p.forward_s) for b, p in usable.items()])
        backward = _line([(b * flops, p.backward_s or 0.0) for b, p in usable.items()])
        found.append(Reference(key.model, key.gpu_type, key.dtype, flops, forward, backward))
    return tuple(found)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(intercept >= 0, slope > 0) of the line that minimises relative errors."""
    weights = [1.0 / (y * y) for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
        / spread
    )
    intercept = mean_y - slope * mean_x
    if intercept < 0 or slope <= 0:
        return 0.0, sum(y / x for x, y in points) / len(points)
    return intercept, slope
