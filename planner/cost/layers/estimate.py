"""Estimates of layer times that were not measured; always flagged.

On a device on which blocks of other models were measured at this width of values, a block's time is
launch + FLOPs / rate of the measured block nearest in FLOPs. On any other device it is made of
measured rates of its parts (`roofline.py`); no device is scaled from another. Embedding and head
are matrix products plus their memory traffic.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from planner.cost.layers.roofline import (
    SIXTEEN_BITS,
    LayerWork,
    block_seconds,
    device_rates,
    replicated_seconds,
    seconds_beyond_flops,
)
from planner.cost.memory.training_bytes import VALUE_BYTES
from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.inputs.catalogue import GpuType, canonical_gpu_type, find_gpu_type, read_rows
from planner.inputs.profile import ProfileTable
from planner.plans.model_spec import LayerSpec, ModelSpec

# One large matrix product runs at a higher rate than a whole block (1.75 times in Sailor's GH200
# profile of OPT-350M).
HEAD_RATE = 1.5
SMALL_LAYER_S = 20e-6  # launches of an embedding or a head


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one microbatch, and their source."""

    forward_s: float
    backward_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Measured block as a line in FLOPs: seconds = constant + FLOPs / rate.

    There is one line for forward and one for backward (FLOPs of the forward in both).

    The forward's constant is launches. The backward's is launches and the traffic of the weights'
    gradients, which grows with the parameters: 16 bytes each on every device that was measured.
    """

    model: str
    gpu_type: str
    dtype: str
    sequence_length: int
    layer: LayerSpec
    flops: float
    forward: tuple[float, float]
    backward: tuple[float, float]

    def seconds(self, flops: float, parameters: float) -> tuple[float, float]:
        """Return forward and backward seconds of so much work on a worker.

        flops: FLOPs of the forward; parameters: weights on the worker.
        """
        launch_s = min(self.forward[0], self.backward[0])
        gradients_s = (self.backward[0] - launch_s) * parameters / self.layer.parameters
        forward_s = self.forward[0] + flops * self.forward[1]
        return forward_s, launch_s + gradients_s + flops * self.backward[1]

    @property
    def reason(self) -> str:
        """Source of an estimate made from this reference."""
        return f"estimated from {self.model} on {self.gpu_type} ({self.dtype}) by FLOPs"


def estimate_update_s(
    gpu_type: str, layer: LayerSpec, tp_degree: int, parameters: CostParameters
) -> float:
    """Return seconds of an AdamW update of a layer's share: memory traffic / reached bandwidth."""
    device = _device(gpu_type)
    traffic = layer.parameters_per_worker(tp_degree) * parameters.optimizer_bytes_per_parameter
    return traffic / (device.memory_bytes_per_s * parameters.memory_efficiency)


def estimate_muon_s(
    gpu_type: str, layer: LayerSpec, tp_degree: int, parameters: CostParameters
) -> float:
    """Return seconds in which a worker orthogonalizes its part of a layer's matrices, in bf16.

    They are counted FLOPs at the rate of matrix products that the device reaches; 0 without Muon.
    """
    if layer.matrices is None:
        return 0.0
    rates = device_rates(_device(gpu_type), "bf16", parameters)
    return layer.matrices.flops / tp_degree / rates.matmul_flops


def estimate_layer(
    tables: tuple[ProfileTable, ...],
    gpu_type: str,
    work: LayerWork,
    spec: ModelSpec,
    parameters: CostParameters,
) -> Estimate:
    """Seconds of a layer that was not measured, without tensor-parallel communication.

    Never zero.
    """
    device = _device(gpu_type)
    reference = _nearest(tables, device, work, spec)
    if work.kind == "block":
        return _estimate_block(device, reference, work, parameters)
    if reference is None:
        rates = device_rates(device, work.dtype, parameters)
        products_s = work.flops / rates.matmul_flops
        forward_s = products_s
        backward_s = 2 * products_s
        reason = f"estimated, not measured: {rates.description}"
    else:
        forward_s = work.flops * reference.forward[1] / HEAD_RATE
        backward_s = work.flops * reference.backward[1] / HEAD_RATE
        reason = reference.reason
    moved_bytes = _memory_traffic_bytes(work, spec, parameters)
    moved_s = moved_bytes / (device.memory_bytes_per_s * parameters.memory_efficiency)
    forward_s = SMALL_LAYER_S + forward_s + moved_s
    backward_s = SMALL_LAYER_S + backward_s + 2 * moved_s
    return Estimate(forward_s, backward_s, reason)


def _estimate_block(
    device: GpuType, reference: Reference | None, work: LayerWork, parameters: CostParameters
) -> Estimate:
    """Estimate a block from the measured block on the same device, else from its parts."""
    if reference is None:
        rates = device_rates(device, work.dtype, parameters)
        forward_s, backward_s = block_seconds(device, work, parameters)
        return Estimate(forward_s, backward_s, f"estimated, not measured: {rates.description}")
    if parameters.fuses_block:
        forward_s, backward_s = _fused_seconds(device, reference, work, parameters)
        return Estimate(forward_s, backward_s, reference.reason)

    weights = work.layer.parameters_per_worker(work.tp_degree)
    forward_s, backward_s = reference.seconds(work.flops, weights)
    # the reference is a dense block with a fused attention on a group of one GPU
    whole_s = replicated_seconds(device, work, parameters)
    more_forward_s, more_backward_s = seconds_beyond_flops(device, work, parameters)
    return Estimate(
        forward_s + whole_s + more_forward_s,
        backward_s + 2 * whole_s + more_backward_s,
        reference.reason,
    )


def _fused_seconds(
    device: GpuType, reference: Reference, work: LayerWork, parameters: CostParameters
) -> tuple[float, float]:
    """Return forward and backward seconds of a block with fused kernels.

    They are the seconds of its parts, scaled by the ratio of the measured (eager) block to its own
    parts.
    """
    length = reference.sequence_length
    sequences = max(1, round(work.tokens / length))
    same = LayerWork("block", reference.layer, reference.dtype, length, sequences, 1)
    measured_s = sum(reference.seconds(same.flops, reference.layer.parameters))
    eager = replace(parameters, fuses_elementwise=False, compiles_blocks=False)
    eager_s = sum(block_seconds(device, same, eager))
    ratio = measured_s / eager_s
    forward_s, backward_s = block_seconds(device, work, parameters)
    return ratio * forward_s, ratio * backward_s


def _memory_traffic_bytes(work: LayerWork, spec: ModelSpec, parameters: CostParameters) -> float:
    """Return the memory traffic of an embedding or a head, in bytes.

    Embedding: rows read, summed with positions and written. Head: logits written and read, and,
    unless the loss is fused, written and read once more in fp32.
    """
    width = VALUE_BYTES[work.dtype]
    if work.kind == "embedding":
        return 3.0 * work.tokens * spec.hidden_size * width
    is_fused = parameters.fuses_loss or parameters.fused_head_elements is not None
    fp32_bytes = 0 if is_fused else 4
    logits = work.tokens * spec.vocab_size / work.tp_degree
    return logits * (2 * width + fp32_bytes)


def is_measured(tables: tuple[ProfileTable, ...], gpu_type: str, dtype: str) -> bool:
    """Return True if blocks were measured on a device at `dtype`.

    A format of the same rate counts as well.
    """
    device = find_gpu_type(gpu_type)
    return device is not None and bool(_references_on(tables, device, dtype))


def rates_of(gpu_type: str, dtype: str, parameters: CostParameters) -> str:
    """Describe the rates from which estimates on a device are made.

    ConfigError for an unknown device.
    """
    return device_rates(_device(gpu_type), dtype, parameters).description


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
    tables: tuple[ProfileTable, ...], device: GpuType, work: LayerWork, spec: ModelSpec
) -> Reference | None:
    """The measured block on this device that is nearest in FLOPs to the model's first one."""
    own = _references_on(tables, device, work.dtype)
    if not own:
        return None
    block = spec.blocks[0]
    flops = block.forward_flops_per_worker(work.sequence_length, work.tp_degree) * work.microbatch

    def distance(reference: Reference) -> tuple[float, str]:
        return abs(math.log(reference.flops / flops)), reference.model

    return min(own, key=distance)


@lru_cache(maxsize=256)
def _references_on(
    tables: tuple[ProfileTable, ...], device: GpuType, dtype: str
) -> tuple[Reference, ...]:
    """Blocks measured on this device at `dtype`, else at a 16-bit format of the same rate."""
    here = [r for r in references(tables) if canonical_gpu_type(r.gpu_type) == device.name]
    same = tuple(r for r in here if r.dtype == dtype)
    if same:
        return same

    computes_alike = device.fp16_flops == device.bf16_flops
    if dtype in SIXTEEN_BITS and computes_alike:
        return tuple(r for r in here if r.dtype in SIXTEEN_BITS)
    return ()


@cache
def _measured_models() -> dict[str, LayerSpec]:
    """Return one block of each model of the bundled measurements."""
    models = {}
    for row in read_rows("profile_models.csv"):
        num_parameters = int(row["parameters_per_layer"])
        models[row["model"]] = LayerSpec(
            parameters=num_parameters,
            matmul_parameters=num_parameters,
            attention_width=int(row["hidden_size"]),
        )
    return models


def references(tables: tuple[ProfileTable, ...]) -> list[Reference]:
    """Every measured tp-1 block of a known model as a line in FLOPs."""
    found = list[Reference]()
    for table in tables:
        found += _table_references(table)
    return found


@cache
def _table_references(table: ProfileTable) -> tuple[Reference, ...]:
    found = []
    for key in table.keys:
        layer = _measured_models().get(key.model)
        if layer is None or key.tp_degree != 1 or find_gpu_type(key.gpu_type) is None:
            continue

        flops = layer.forward_flops(key.sequence_length)
        forward_points = []
        backward_points = []
        for microbatch, point in table.layers(key).get("block", {}).items():
            if point.backward_s is not None:
                forward_points.append((microbatch * flops, point.forward_s))
                backward_points.append((microbatch * flops, point.backward_s))
        # a line needs two points
        if len(forward_points) < 2:
            continue

        found.append(
            Reference(
                model=key.model,
                gpu_type=key.gpu_type,
                dtype=key.dtype,
                sequence_length=key.sequence_length,
                layer=layer,
                flops=flops,
                forward=_line(forward_points),
                backward=_line(backward_points),
            )
        )
    return tuple(found)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(intercept >= 0, slope > 0) of the line that minimises relative errors."""
    total = 0.0
    sum_x = 0.0
    sum_y = 0.0
    for x, y in points:
        weight = 1.0 / (y * y)
        total += weight
        sum_x += weight * x
        sum_y += weight * y
    mean_x = sum_x / total
    mean_y = sum_y / total

    spread = 0.0
    covariance = 0.0
    for x, y in points:
        weight = 1.0 / (y * y)
        spread += weight * (x - mean_x) ** 2
        covariance += weight * (x - mean_x) * (y - mean_y)
    slope = covariance / spread
    intercept = mean_y - slope * mean_x

    # launches take no negative time, and more work is no faster: then all of it is work
    if intercept < 0 or slope <= 0:
        rates = [y / x for x, y in points]
        return 0.0, sum(rates) / len(points)
    return intercept, slope
