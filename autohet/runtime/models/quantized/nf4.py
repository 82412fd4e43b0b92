"""Frozen linear maps in four bits: NF4 with double quantization (Dettmers et al. 2023, QLoRA).

A weight [out, in] is read row by row in blocks of BLOCK values. Each block has its largest
magnitude as scale, and for each value the index of the nearest quotient in NF4. The scales, less
their mean, are quantized alike: in groups of GROUP, to the dynamic 8-bit values of Dettmers et al.
2022 (8-bit optimizers, section 1.3). Codes and values are those of bitsandbytes' `quantize_4bit`
with `compress_statistics`.

Blocks are those of the whole weight, so that its values depend on no plan. A rank holds its part of
the codes, and of the scales if tensor parallelism cuts no block in two, else all of them.
"""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autohet.runtime.models.layers.row_chunks import row_chunks
from autohet.runtime.models.parameter_spec import ParameterSpec, take_units
from autohet.runtime.models.quantized.base_format import CHUNK_ELEMENTS, CODES, SCALES, BaseFormat

BLOCK = 64
GROUP = 256
FACTORS = ".factors"
"""Suffix of the third part that a weight is held as.

Codes: uint8 [out, in / 2], the first of two in the higher bits, or [out, in] where an odd number of
columns is cut. Scales: uint8 [out, in / BLOCK], or [blocks] where blocks are cut. Factors: fp32,
one for each group of scales, then the scales' mean.
"""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of NF4 (Dettmers et al. 2023, appendix E)."""


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return NF4's values [16] and those of scales [256], ascending."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        means = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(NF4, device=device), torch.tensor(sorted(values), device=device)


@cache
def _value_pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte [256, 2], the higher bits' first."""
    nf4, _ = _tables(device)
    return torch.stack([nf4.repeat_interleave(16), nf4.repeat(16)], dim=1)


def _nearest(values: Tensor, size: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize blocks of values: return indices in a table, uint8 [blocks, size], and fp32 scales.

    values: [n]; zeros fill up the last block.
    """
    blocks = F.pad(values, (0, -len(values) % size)).view(-1, size)
    bounds = (table[:-1] + table[1:]) / 2
    indices = torch.empty(blocks.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(len(blocks), device=values.device)
    for rows in row_chunks(blocks, CHUNK_ELEMENTS):
        part = blocks[rows].float()
        scales[rows] = part.abs().amax(1)
        inverse = 1.0 / scales[rows].clamp(min=1e-38)
        quotients = part * inverse.unsqueeze(1)
        indices[rows] = torch.bucketize(quotients, bounds, out_int32=True).to(torch.uint8)
    return indices, scales


@cache
def _has_kernel(device_type: str) -> bool:
    """Return True if bitsandbytes dequantizes on this device; on a CPU this file does."""
    if device_type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        return False
    importlib.import_module("bitsandbytes")
    return True


@torch.library.custom_op("autohet::dequantize_nf4", mutates_args=())
def dequantize_nf4(
    codes: Tensor,
    scales: Tensor,
    factors: Tensor,
    starts: Tensor,
    columns: Tensor,
    like: Tensor,
) -> Tensor:
    """Return a rank's part [m, n] of a weight: values in fp32, rounded once to the dtype of `like`.

    starts: int64 [m], the place in the whole weight of the first value of each own row. columns:
    int64, the first own column of each own block [n / BLOCK], or all own columns [n].

    An operator of its own, so that a compiler fuses no sum and product into other bits. `like` is
    the input or the gradient of a product: a compiler then cannot keep the values of the forward
    pass for the backward pass.
    """
    nf4, dynamic = _tables(codes.device)
    shape = _shape(codes, columns)
    size = shape[1] // len(columns)

    def scale(rows: slice) -> Tensor:
        places = starts[rows].unsqueeze(1) + columns
        indices = scales[rows] if scales.dim() == 2 else scales[places // BLOCK]
        found: Tensor = dynamic[indices.int()] * factors[places // (BLOCK * GROUP)] + factors[-1]
        return found

    if size == BLOCK and _has_kernel(codes.device.type):
        kernel = torch.ops.bitsandbytes.dequantize_4bit
        weight: Tensor = kernel(
            codes.contiguous(), scale(slice(None)), BLOCK, "nf4", shape, like.dtype
        )
        return weight
    values_of = nf4.unsqueeze(1) if shape == codes.shape else _value_pairs(codes.device)
    weight = torch.empty(shape, dtype=like.dtype, device=codes.device)
    for rows in row_chunks(weight, CHUNK_ELEMENTS):
        values = F.embedding(codes[rows].int(), values_of).flatten(1).unflatten(1, (-1, size))
        weight[rows] = (values * scale(rows).unsqueeze(-1)).flatten(1)
    return weight


@dequantize_nf4.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    factors: Tensor,
    starts: Tensor,
    columns: Tensor,
    like: Tensor,
) -> Tensor:
    return codes.new_empty(_shape(codes, columns), dtype=like.dtype)


def _shape(codes: Tensor, columns: Tensor) -> tuple[int, int]:
    """Return the shape of the values: two in each byte of the codes, or one for each column."""
    width = 1 if codes.shape[1] == len(columns) else 2
    return len(codes), width * codes.shape[1]


class Nf4(BaseFormat):
    """NF4 with double quantization."""

    def held_as(self, spec: ParameterSpec) -> tuple[ParameterSpec, ...]:
        rows, columns = spec.shape
        num_blocks = -(-rows * columns // BLOCK)
        divisor = math.gcd(columns, *(spec.cuts if spec.split_dim == 1 else ()))

        def packed(name: str, width: int) -> ParameterSpec:
            cuts = spec.cuts
            if spec.split_dim == 1:
                cuts = tuple(cut // width for cut in cuts)
            part = replace(spec, name=spec.name + name, shape=(rows, columns // width), cuts=cuts)
            return replace(part, base_format=None, held_dtype=torch.uint8)

        codes = packed(CODES, math.gcd(divisor, 2))
        whole = ParameterSpec(spec.name + SCALES, (num_blocks,), spec.layer, trainable=False)
        scales = replace(whole, held_dtype=torch.uint8)
        if divisor % BLOCK == 0:
            scales = packed(SCALES, BLOCK)
        factors = replace(
            whole,
            name=spec.name + FACTORS,
            shape=(-(-num_blocks // GROUP) + 1,),
            held_dtype=torch.float32,
        )
        return codes, scales, factors

    def quantize(self, spec: ParameterSpec, weight: Tensor) -> dict[str, Tensor]:
        nf4, dynamic = _tables(weight.device)
        indices, scales = _nearest(weight.reshape(-1), BLOCK, nf4)
        codes = indices.flatten()[: weight.numel()]
        parts = self.held_as(spec)
        if math.prod(parts[0].shape) < weight.numel():
            codes = codes[::2] << 4 | codes[1::2]
        # Summed in fp64, so that the mean does not depend on the machine.
        mean = scales.double().mean().float()
        of_scales, factors = _nearest(scales - mean, GROUP, dynamic)
        tensors = codes, of_scales.flatten(), torch.cat([factors, mean[None]])
        found: dict[str, Tensor] = {}
        for part, tensor in zip(parts, tensors, strict=True):
            # The last group of scales may be filled up.
            found[part.name] = tensor[: math.prod(part.shape)].view(part.shape)
        return found

    def places(
        self, spec: ParameterSpec, units: Sequence[int], device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return `dequantize_nf4`'s starts and columns."""
        rows, columns = spec.shape
        starts = torch.arange(0, rows * columns, columns, device=device)
        own_columns = torch.arange(columns, device=device)
        edges = {columns}
        if spec.split_dim == 0:
            starts = take_units(spec, units, starts)
        elif spec.split_dim == 1:
            own_columns = take_units(replace(spec, split_dim=0), units, own_columns)
            for unit in units:
                # Edges between two own units cancel out.
                edges ^= {spec.cuts[unit], spec.cuts[unit + 1]}
        is_whole = all(edge % BLOCK == 0 for edge in edges | {columns})
        return starts, own_columns[::BLOCK] if is_whole else own_columns

    def dequantize(self, parts: Sequence[Tensor], like: Tensor) -> Any:
        return dequantize_nf4(*parts, like)
