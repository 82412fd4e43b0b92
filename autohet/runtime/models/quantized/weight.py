"""Frozen weights that are held in fewer bits (`model.adapter.base`), and products with them.

A format quantizes whole weights, so that their values depend on no plan, and a rank holds its part
of the result. A product dequantizes its weight, and its backward pass does so again; no dequantized
weight is kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.tensor_parallel import set_product
from autohet.runtime.models.parameter_spec import ParameterSpec
from autohet.runtime.models.quantized.base_format import BaseFormat
from autohet.runtime.models.quantized.fp8_rows import Fp8Rows
from autohet.runtime.models.quantized.nf4 import Nf4

FORMATS: Mapping[str, BaseFormat] = {"nf4": Nf4(), "fp8": Fp8Rows()}
"""Formats by `ParameterSpec.base_format`."""


def held_as(spec: ParameterSpec) -> tuple[ParameterSpec, ...]:
    """Return the specs of what a parameter is held as: itself, or the parts of a quantized one."""
    return (spec,) if spec.base_format is None else _format_of(spec).held_as(spec)


def quantize(spec: ParameterSpec, weight: Tensor) -> dict[str, Tensor]:
    """Return what a whole weight [out, in] is held as, by the names of `held_as`."""
    return _format_of(spec).quantize(spec, weight)


def quantized_values(spec: ParameterSpec, weight: Tensor) -> Tensor:
    """Return the values of a whole weight [out, in] that stages compute with instead of it."""
    base_format = _format_of(spec)
    places = base_format.places(spec, range(spec.num_units), weight.device)
    values: Tensor = base_format.dequantize([*quantize(spec, weight).values(), *places], weight)
    return values


def _format_of(spec: ParameterSpec) -> BaseFormat:
    assert spec.base_format is not None
    return FORMATS[spec.base_format]


class QuantizedWeight(nn.Module):
    """A rank's part of a weight, in the place of the parameter of a linear map."""

    def __init__(self, spec: ParameterSpec, units: Sequence[int], device: torch.device) -> None:
        super().__init__()
        for part in held_as(spec):
            # Of the right shapes once the stage's slices are loaded.
            empty = torch.empty(0, dtype=part.held_dtype, device="meta")
            name = part.name.rpartition(".")[2]
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.base_format = spec.base_format
        self.places = _format_of(spec).places(spec, units, device)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the transposed weight."""
        return apply(_Product, x, self.base_format, *self._parameters.values(), *self.places)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, base_format: str, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.base_format = base_format
        return F.linear(x, FORMATS[base_format].dequantize(parts, x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: a recomputed block gives them once.
        parts = ctx.saved_tensors
        weight = FORMATS[ctx.base_format].dequantize(parts, gradients[0])
        return gradients[0] @ weight, None, *[None] * len(parts)


def use_quantized(module: Any, weight: QuantizedWeight) -> None:
    """Let a linear map of a stage compute with this weight."""
    del module._parameters["weight"]
    module.weight = weight
    set_product(module, lambda x, _: weight(x))
