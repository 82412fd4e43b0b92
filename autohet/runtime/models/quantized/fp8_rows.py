"""Frozen linear maps in eight bits: E4M3 with one scale a row, as torchao's weight-only fp8.

The scale of a row of a weight [out, in] is its largest magnitude over LARGEST, in the weight's own
dtype. A row is that of the whole weight, so that its values depend on no plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.models.layers.row_chunks import row_chunks
from autohet.runtime.models.parameter_spec import ParameterSpec
from autohet.runtime.models.quantized.base_format import CHUNK_ELEMENTS, CODES, SCALES, BaseFormat

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


@torch.library.custom_op("autohet::dequantize_fp8_rows", mutates_args=())
def dequantize_rows(codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    """Return a rank's part [m, n] of a weight: values in fp32, rounded once to the dtype of `like`.

    An operator of its own, with the input or gradient of a product, for the reasons of
    `nf4.dequantize_nf4`.
    """
    weight = torch.empty(codes.shape, dtype=like.dtype, device=codes.device)
    for rows in row_chunks(codes, CHUNK_ELEMENTS):
        weight[rows] = codes[rows].view(E4M3).float() * scales[rows].unsqueeze(1)
    return weight


@dequantize_rows.register_fake
def _(codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    return codes.new_empty(codes.shape, dtype=like.dtype)


class Fp8Rows(BaseFormat):
    """E4M3 with one scale a row: codes are its bits, uint8 [out, in], and scales fp32 [out]."""

    def held_as(self, spec: ParameterSpec) -> tuple[ParameterSpec, ...]:
        codes = replace(spec, name=spec.name + CODES, base_format=None, held_dtype=torch.uint8)
        name = spec.name + SCALES
        scales = replace(codes, name=name, shape=spec.shape[:1], held_dtype=torch.float32)
        if spec.split_dim == 1:
            # Each rank has a part of every row.
            scales = replace(scales, split_dim=None, cuts=(0, 1), groups=1)
        return codes, scales

    def quantize(self, spec: ParameterSpec, weight: Tensor) -> dict[str, Tensor]:
        scales = (weight.abs().amax(1) / LARGEST).float()
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        for rows in row_chunks(weight, CHUNK_ELEMENTS):
            # A row of zeros alone has a scale of 0.
            quotients = weight[rows].float() / scales[rows].clamp(min=1e-38).unsqueeze(1)
            codes[rows] = quotients.clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8)
        return {spec.name + CODES: codes, spec.name + SCALES: scales}

    def dequantize(self, parts: Sequence[Tensor], like: Tensor) -> Any:
        return dequantize_rows(*parts, like)
