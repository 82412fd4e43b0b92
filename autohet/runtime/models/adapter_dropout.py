"""Dropout of adapters' inputs whose bits are the same on any plan, and on CPU and GPU.

The bit of an element is a hash of the job's seed, the sample (its position in the run), the token,
the linear map and the column of its input. Neither the plan nor the order of computation is part of
it, so recomputation draws the same bits, and so does a rank that has some of the columns.

The hash is `lowbias32` (Wellons 2018) on 32-bit integers, which wrap alike on all devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.models.autograd import apply
from autohet.runtime.models.row_chunks import row_chunks

_GOLDEN = -0x61C88647  # 2^32 / golden ratio, as a signed number

CHUNK_ELEMENTS = 1 << 22
"""Limit on the elements whose bits are drawn at a time."""


@dataclass
class DropoutRows:
    """Keys of the rows that a stage computes on now, int32 [b, S]; None: nothing is dropped."""

    keys: Tensor | None = None


def row_keys(seed: int, samples: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Return the keys of the tokens of samples, int32 [len(samples), length].

    samples: positions of the rows in the run, whatever the plan.
    """
    drawn = [_key(f"{seed}:{sample}") for sample in samples]
    of_sample = torch.tensor(drawn, dtype=torch.int32, device=device).unsqueeze(1)
    tokens = torch.arange(length, dtype=torch.int32, device=device)
    return _mix(of_sample + tokens * _GOLDEN)


def column_keys(path: str, columns: Tensor) -> Tensor:
    """Return the keys of columns of a linear map's input, int32 [n].

    path: the map in the library's model. columns: their indices in the whole map, int64 [n].
    """
    return _mix(columns.to(torch.int32) * _GOLDEN + _key(path))


def _key(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -0x7B935975
    x ^= (x >> 16) & 0xFFFF
    return x


def dropped(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return the mask of dropped elements, bool [b, S, n], from row and column keys."""
    bits = _mix(rows.unsqueeze(-1) ^ columns)
    return bits < round(rate * 2**32) - 2**31


class _DroppedProduct(torch.autograd.Function):
    """Product of an input with dropout and a weight; keeps the input, not a copy with zeros.

    Bits are drawn for some rows at a time, since they take several times the memory of the input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, rate: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, rows, columns)
        ctx.rate = rate
        flat, keys = x.flatten(0, -2), rows.flatten()
        product = x.new_empty(len(flat), len(weight))
        for part in row_chunks(len(flat), flat.shape[1], CHUNK_ELEMENTS):
            left = _without(flat[part], dropped(keys[part], columns, rate), rate)
            product[part] = left @ weight.T
        return product.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, rows, columns = ctx.saved_tensors
        flat, keys, gradient = x.flatten(0, -2), rows.flatten(), gradients[0].flatten(0, -2)
        of_x = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_weight = torch.zeros_like(weight, dtype=wide)
        for part in row_chunks(len(flat), flat.shape[1], CHUNK_ELEMENTS):
            mask = dropped(keys[part], columns, ctx.rate)
            if of_x is not None:
                of_x[part] = _without(gradient[part] @ weight, mask, ctx.rate)
            if ctx.needs_input_grad[1]:
                of_weight += gradient[part].T @ _without(flat[part], mask, ctx.rate)
        return (
            None if of_x is None else of_x.view_as(x),
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )


def _without(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Return x with zeros under the mask and all else scaled up, so that its mean stays."""
    return x.masked_fill(mask, 0.0).mul_(1.0 / (1.0 - rate))


def dropped_product(
    x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, rate: float
) -> Tensor:
    """Return dropout(x) @ weight.T, [b, S, r], for x [b, S, n] and weight [r, n].

    rows, columns: keys of the elements, as `dropped` takes them.
    """
    return apply(_DroppedProduct, x, weight, rows, columns, rate)


__all__ = ["DropoutRows", "column_keys", "dropped", "dropped_product", "row_keys"]
