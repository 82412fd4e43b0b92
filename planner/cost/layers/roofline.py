"""Seconds of a layer from measured rates of its parts, for devices on which no block was measured.

A block takes `matrix products / measured rate + attention / its rate + element-wise traffic /
reached memory bandwidth` (a roofline whose parts follow each other, Williams et al. 2009). Rates of
matrix products are public measurements (data/matmul_rates.csv), not data sheets. ELEMENTWISE_PASSES
is the one constant that was fitted, on the bundled fp16 blocks of A100; blocks of ten other devices
follow with it (`tests/planner/test_roofline.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median

from planner.cost.layers.experts import padded_share
from planner.cost.memory.training_bytes import VALUE_BYTES
from planner.cost.parameters import CostParameters
from planner.inputs.catalogue import GpuType, canonical_gpu_type, find_gpu_type, read_rows
from planner.plans.model_spec import LayerSpec

SIXTEEN_BITS = ("fp16", "bf16")
ELEMENTWISE_PASSES = 6.0
"""Times that an eager forward pass reads or writes each value that a block keeps."""
FUSED_PASSES = 2.0
"""Passes over each value if a compiler fuses element-wise kernels: written once and read once."""
ATTENTION_SHARE = 0.6
"""Rate of a fused attention over that of matrix products, if it was not measured."""
ATTENTION_BACKWARD = 3.0
"""Seconds of a fused attention's backward over its forward's: 2.5 times the FLOPs, since scores are
made again, at 0.83 times the rate (Dao 2023, figures 5 and 6)."""
EXTRA_PRODUCTS = 0.4
"""Products of this project's backward kernels beyond those of PyTorch's, relative to the latter."""
FLOPS_PER_OPERATION = 4.0
"""fp32's FLOPs in the time of one integer operation: half as many units, each of one operation.

A100 has as many units of both, so it takes half of that time.
"""
WEIGHT_GRADIENT_BYTES = 16.0
"""Memory traffic of one weight's gradient in each backward pass, as measured on every device."""
FP8_CAST_BYTES = 5.0
"""Memory traffic of one value's cast to fp8: read in bf16 for its maximum, read again, written."""
FP8_INPUTS = 0.5
"""Inputs of a block's products per token, over its weights per unit of width: Llama's and GPT-2's
0.47 and 0.58."""
UNKNOWN_KEPT_VALUES = 18.0
"""Values that a block keeps per token and unit of width, if its spec does not say."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Reached rates of one device at one format.

    is_measured: whether the rate of matrix products was measured, or is the usual share of a data
    sheet's peak.
    """

    matmul_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    is_measured: bool

    @property
    def description(self) -> str:
        """Rates as a phrase."""
        source = "measured" if self.is_measured else "the usual share of its data sheet's"
        return (
            f"matrix products at {self.matmul_flops / 1e12:.0f} TFLOP/s ({source}), attention and"
            f" memory traffic ({self.memory_bytes_per_s / 1e9:.0f} GB/s) added"
        )


@cache
def _rows() -> Mapping[str, Mapping[str, str]]:
    return {canonical_gpu_type(row["gpu_type"]): row for row in read_rows("matmul_rates.csv")}


def measured_matmul_flops(gpu_type: str, dtype: str) -> float | None:
    """Return the measured rate of matrix products of a device at a format, in FLOP/s, or None.

    If one 16-bit format was measured, the other has its rate on devices that compute both alike.
    """
    row = _rows().get(canonical_gpu_type(gpu_type))
    device = find_gpu_type(gpu_type)
    if row is None or device is None:
        return None
    formats = [dtype]
    if dtype in SIXTEEN_BITS and device.fp16_flops == device.bf16_flops:
        formats += [other for other in SIXTEEN_BITS if other != dtype]
    for name in formats:
        tflops = row.get(f"{name}_tflops")
        if tflops:
            return float(tflops) * 1e12
    return None


@cache
def usual_share_of_peak(dtype: str) -> float:
    """Median over the measured devices of the measured rate over the data sheet's.

    fp8 was measured on none; it takes bf16's.
    """
    if dtype == "fp8":
        return usual_share_of_peak("bf16")
    shares = []
    for name in _rows():
        rate = measured_matmul_flops(name, dtype)
        device = find_gpu_type(name)
        if rate is not None and device is not None:
            shares.append(min(1.0, rate / device.peak_flops(dtype)))
    return median(shares)


def device_rates(device: GpuType, dtype: str, parameters: CostParameters) -> DeviceRates:
    """Rates that the device reaches at a format."""
    measured = measured_matmul_flops(device.name, dtype)
    matmul = measured or device.peak_flops(dtype) * usual_share_of_peak(dtype)
    attention = ATTENTION_SHARE * matmul
    # few devices have a measured rate of attention, and only in 16 bits
    row = _rows().get(device.name)
    if row is not None and row["attention_tflops"] and dtype in SIXTEEN_BITS:
        attention = float(row["attention_tflops"]) * 1e12
    memory = device.memory_bytes_per_s * parameters.memory_efficiency
    return DeviceRates(matmul, attention, memory, measured is not None)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of a single microbatch through a layer on one of `tp_degree` workers.

    kind: `embedding`, `block` or `head`.
    """

    kind: str
    layer: LayerSpec
    dtype: str
    sequence_length: int
    microbatch: int
    tp_degree: int

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.microbatch * self.sequence_length

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass, S x S products whole."""
        each = self.layer.forward_flops_per_worker(self.sequence_length, self.tp_degree)
        return each * self.microbatch

    @property
    def score_flops(self) -> float:
        """FLOPs of the attention's products among them."""
        each = self.layer.score_flops(self.sequence_length) / self.tp_degree
        return each * self.microbatch

    @property
    def product_flops(self) -> float:
        """FLOPs of the products with weights."""
        return self.flops - self.score_flops

    @property
    def kept_bytes(self) -> float:
        """Bytes of the values that the forward pass leaves for the backward pass."""
        layer = self.layer
        values = layer.replicated_activation_values
        values += layer.split_activation_values / self.tp_degree
        if values == 0.0:
            values = UNKNOWN_KEPT_VALUES * layer.attention_width / self.tp_degree
        return values * self.tokens * VALUE_BYTES[self.dtype]


def block_seconds(
    device: GpuType, work: LayerWork, parameters: CostParameters
) -> tuple[float, float]:
    """Forward and backward seconds of a block, without tensor-parallel communication.

    Attention is causal: half of the S x S products are computed.
    """
    rates = device_rates(device, work.dtype, parameters)
    products_s = work.product_flops / rates.matmul_flops
    attention_s = work.score_flops / 2 / rates.attention_flops
    attention_backward = ATTENTION_BACKWARD
    if work.layer.slides(work.sequence_length) and work.layer.explicit_scores is None:
        attention_backward *= 1 + EXTRA_PRODUCTS
    is_fused = parameters.fuses_block
    passes = FUSED_PASSES if is_fused else ELEMENTWISE_PASSES
    traffic_s = passes * work.kept_bytes / rates.memory_bytes_per_s

    forward_s = products_s + attention_s + traffic_s
    backward_s = 2 * products_s + attention_backward * attention_s + 2 * traffic_s
    weights = work.layer.parameters_per_worker(work.tp_degree)
    backward_s += WEIGHT_GRADIENT_BYTES * weights / rates.memory_bytes_per_s
    more_forward_s, more_backward_s = seconds_beyond_flops(device, work, parameters)
    return forward_s + more_forward_s, backward_s + more_backward_s


def seconds_beyond_flops(
    device: GpuType, work: LayerWork, parameters: CostParameters
) -> tuple[float, float]:
    """Forward and backward seconds that a plain dense block with the same FLOPs does not take."""
    forward_s, backward_s = explicit_seconds(device, work, parameters)
    grouped_forward_s, grouped_backward_s = grouped_seconds(device, work, parameters)
    bytes_per_s = device_rates(device, work.dtype, parameters).memory_bytes_per_s
    dequantization_s = dequantized_bytes(work.layer, work.tp_degree, work.dtype) / bytes_per_s
    forward_s += grouped_forward_s + dequantization_s
    # The caller multiplies a backward pass by this share, but all of it is dequantized again.
    return forward_s, backward_s + grouped_backward_s + dequantization_s / work.layer.backward_share


def dequantized_bytes(layer: LayerSpec, tp_degree: float, dtype: str) -> float:
    """Return the memory traffic of dequantizing a layer's weights once on each worker.

    Of each quantized weight the held bytes are read and a value of `dtype` is written. The product
    that reads it is counted with its FLOPs.
    """
    written = layer.quantized_per_worker(tp_degree) * VALUE_BYTES[dtype]
    return layer.quantized_bytes_per_worker(tp_degree) + written


def grouped_seconds(
    device: GpuType, work: LayerWork, parameters: CostParameters
) -> tuple[float, float]:
    """Forward and backward seconds of experts' grouped products beyond those of their FLOPs.

    Rows are padded to tiles, and a pass reads the weights of all experts: it takes the longer of
    the two. The backward pass has a product for the inputs and one for the weights, whose traffic
    `block_seconds` counts. Zero for a dense layer.
    """
    experts = work.layer.experts
    if experts is None:
        return 0.0, 0.0
    rates = device_rates(device, work.dtype, parameters)
    weights = experts.parameters / work.tp_degree
    used = weights * experts.per_token / experts.number
    products_s = 2.0 * used * work.tokens / rates.matmul_flops
    padded_s = products_s * padded_share(experts, work.tokens)
    read_s = weights * VALUE_BYTES[work.dtype] / rates.memory_bytes_per_s
    # a product with the weights, and in the backward pass one for their gradients
    with_weights_s = max(padded_s, read_s) - products_s
    return with_weights_s, with_weights_s + padded_s - products_s


def fp8_ratios(device: GpuType, work: LayerWork, parameters: CostParameters) -> tuple[float, float]:
    """Return forward and backward seconds of a block in fp8 over those in bf16, by its parts.

    work: in bf16. Products take the ratio of the two peak rates. Weights and inputs are cast ahead
    of the forward's products, and again, with the outputs' gradients, ahead of the backward's.
    """
    forward_s, backward_s = block_seconds(device, work, parameters)
    rates = device_rates(device, "bf16", parameters)
    speedup = device.peak_flops("fp8") / device.peak_flops("bf16")
    products_s = work.product_flops / rates.matmul_flops
    saved_s = products_s * (1.0 - 1.0 / speedup)
    weights = work.layer.parameters_per_worker(work.tp_degree)
    values = FP8_INPUTS * work.tokens * weights / max(1, work.layer.attention_width)
    cast_s = FP8_CAST_BYTES * (weights + values) / rates.memory_bytes_per_s
    forward_ratio = (forward_s - saved_s + cast_s) / forward_s
    backward_ratio = (backward_s - 2 * saved_s + 2 * cast_s) / backward_s
    return forward_ratio, backward_ratio


def explicit_seconds(
    device: GpuType, work: LayerWork, parameters: CostParameters
) -> tuple[float, float]:
    """Forward and backward seconds of scores beyond those of a fused attention; 0 if it is fused.

    Attention is causal: half of the scores are computed. The backward pass of `fused_attention`
    goes over them twice, with seven products for PyTorch's five, since it adds nothing atomically.
    Operations are added in full, though they may run beside the products. A GPU older than Ampere
    cannot run it, and moves scores through memory.
    """
    explicit = work.layer.explicit_scores
    if explicit is None:
        return 0.0, 0.0
    keys = work.layer.keys_per_query(work.sequence_length) / 2
    scores = explicit.heads / work.tp_degree * work.tokens * keys
    rates = device_rates(device, work.dtype, parameters)
    if device.bf16_flops is None:
        forward_s = scores * explicit.forward_traffic / rates.memory_bytes_per_s
        backward_s = scores * explicit.backward_traffic / rates.memory_bytes_per_s
        return forward_s, backward_s
    pass_s = scores * explicit.operations * FLOPS_PER_OPERATION / device.fp32_flops
    attention_s = work.score_flops / 2 / rates.attention_flops
    return pass_s, 2 * pass_s + EXTRA_PRODUCTS * ATTENTION_BACKWARD * attention_s


def replicated_seconds(device: GpuType, work: LayerWork, parameters: CostParameters) -> float:
    """Return forward seconds of norms and residual sums that tensor parallelism does not cut.

    They are those beyond the share that a division of the whole block by the TP degree includes.
    """
    values = work.layer.replicated_activation_values * work.tokens
    beyond_share = 1.0 - 1.0 / work.tp_degree
    moved_bytes = FUSED_PASSES * values * VALUE_BYTES[work.dtype] * beyond_share
    return moved_bytes / device_rates(device, work.dtype, parameters).memory_bytes_per_s
