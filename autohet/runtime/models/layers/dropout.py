"""Dropout whose bits are the same on any plan, and on CPU and GPU.

The bit of an element is a hash of the job's seed, the sample (its position in the run), the token,
the place in the model and the column. For attention weights the place is the head, and the column
is the position of the key. Neither the plan nor the order of computation is part of it, so
recomputation draws the same bits, and so does a rank that has some of the columns or heads.

No mask is kept for the backward pass, which draws the bits again.

The hash is `lowbias32` (Wellons 2018) on 32-bit integers, which wrap alike on all devices.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.row_chunks import row_chunks, wide_zeros

_GOLDEN = -0x61C88647
"""2**32 / golden ratio, as a signed number: multiples of it are spread evenly."""
CHUNK_ELEMENTS = 1 << 22
"""Limit on the elements whose bits are drawn at a time."""


@dataclass(frozen=True)
class ModelDropout:
    """Dropouts of a model's config.

    attention: probability with which an attention weight is dropped. embedding: that of an element
    of the embedding's output. residual: that of an element of a block's output projections, by the
    end of the projection's path.
    """

    attention: float = 0.0
    embedding: float = 0.0
    residual: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        if self.attention or self.embedding:
            return True
        return any(self.residual.values())

    def by_place(self) -> dict[str, float]:
        """Return the rates above 0 by human-readable place."""
        rates = {
            "attention weights": self.attention,
            "embedding": self.embedding,
            **self.residual,
        }
        return {place: rate for place, rate in rates.items() if rate}


NO_DROPOUT = ModelDropout()
DROPOUT = "seeded_dropout"
"""Attribute of a config: the dropouts that it is trained with, as a mapping; absent without."""


def set_dropout(config: PreTrainedConfig, dropout: ModelDropout) -> None:
    """Put the dropouts to train with into a model's config, whose own keys are 0."""
    if dropout:
        setattr(config, DROPOUT, asdict(dropout))


def dropout_of(config: PreTrainedConfig) -> ModelDropout:
    """Return the dropouts that a stage of this config trains with."""
    found = getattr(config, DROPOUT, None)
    return NO_DROPOUT if found is None else ModelDropout(**found)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config whose stages drop nothing."""
    plain = copy.copy(config)
    if hasattr(plain, DROPOUT):
        delattr(plain, DROPOUT)
    return plain


@dataclass
class DropoutRows:
    """Keys of the rows that a stage computes on now; None: nothing is dropped.

    keys: int32 [b, S]. own: those of this rank's part of the sequence, if sequence parallelism
    cuts it, else the same.
    """

    keys: Tensor | None = None
    own: Tensor | None = None


def row_keys(seed: int, samples: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Return the keys of the tokens of samples, int32 [len(samples), length].

    samples: positions of the rows in the run, whatever the plan.
    """
    drawn = [_key(f"{seed}:{sample}") for sample in samples]
    of_sample = torch.tensor(drawn, dtype=torch.int32, device=device)
    of_sample = of_sample.unsqueeze(1)
    tokens = torch.arange(length, dtype=torch.int32, device=device)
    return _mix(of_sample + tokens * _GOLDEN)


def column_keys(path: str, columns: Tensor) -> Tensor:
    """Return the keys of columns of a linear map's input, int32 [n].

    path: the map in the library's model. columns: their indices in the whole map, int64 [n]. Heads
    of an attention module count as its columns.
    """
    numbers = columns.to(torch.int32)
    return _mix(numbers * _GOLDEN + _key(path))


def _key(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    """Return `lowbias32` of int32 numbers.

    The masks make shifts logical, which torch has for unsigned numbers alone.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -0x7B935975
    x ^= (x >> 16) & 0xFFFF
    return x


def dropout_mask(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return the mask of dropped elements, bool [b, S, n], from row and column keys."""
    bits = _mix(rows.unsqueeze(-1) ^ columns)
    # int32 numbers begin at -2**31: this many of them are below the limit.
    limit = round(rate * 2**32) - 2**31
    return bits < limit


def hashed_values(rows: Tensor, columns: Tensor) -> Tensor:
    """Return multiples of 1/128 in [-1, 1), fp32 [b, S, n], hashed from row and column keys.

    Every format holds them exactly, fp8 aside.
    """
    return (_mix(rows.unsqueeze(-1) ^ columns) >> 24).float() / 128


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
        flat = x.flatten(0, -2)
        keys = rows.flatten()
        product = x.new_empty(len(flat), len(weight))
        for part in row_chunks(flat, CHUNK_ELEMENTS):
            mask = dropout_mask(keys[part], columns, rate)
            left = _without(flat[part], mask, rate)
            product[part] = left @ weight.T
        return product.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, rows, columns = ctx.saved_tensors
        flat = x.flatten(0, -2)
        keys = rows.flatten()
        gradient = gradients[0].flatten(0, -2)
        of_x = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
        # Parts of the rows add up in fp32, whatever the format of the weight.
        of_weight = wide_zeros(weight)
        for part in row_chunks(flat, CHUNK_ELEMENTS):
            mask = dropout_mask(keys[part], columns, ctx.rate)
            if of_x is not None:
                of_x[part] = _without(gradient[part] @ weight, mask, ctx.rate)
            if ctx.needs_input_grad[1]:
                left = _without(flat[part], mask, ctx.rate)
                of_weight += gradient[part].T @ left
        x_gradient = None if of_x is None else of_x.view_as(x)
        weight_gradient = of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return x_gradient, weight_gradient, None, None, None


def _without(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Return x with zeros under the mask and all else scaled up, so that its mean stays."""
    scale = 1.0 / (1.0 - rate)
    return x.masked_fill(mask, 0.0).mul_(scale)


def multiply_dropped(
    x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, rate: float
) -> Tensor:
    """Return dropout(x) @ weight.T, [b, S, r], for x [b, S, n] and weight [r, n].

    rows, columns: keys of the elements, as `dropout_mask` takes them.
    """
    return apply(_DroppedProduct, x, weight, rows, columns, rate)


class _Dropped(torch.autograd.Function):
    """Hidden states with dropout; keeps the keys of rows and columns alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.rate = rate
        return _drop_states(x, rows, columns, rate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows, columns = ctx.saved_tensors
        gradient = _drop_states(gradients[0], rows, columns, ctx.rate)
        return gradient, None, None, None


def _drop_states(x: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    flat = x.flatten(0, -2)
    keys = rows.flatten()
    out = torch.empty_like(flat)
    for part in row_chunks(flat, CHUNK_ELEMENTS):
        mask = dropout_mask(keys[part], columns, rate)
        out[part] = _without(flat[part], mask, rate)
    return out.view_as(x)


@dataclass(frozen=True)
class StateDropout:
    """Dropout of hidden states [b, S, h] at one place of the model.

    rows: keys of the stage's present rows. columns: keys of the hidden states' elements, int32 [h].
    """

    rate: float
    rows: DropoutRows
    columns: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """Return the states with dropout where the stage trains, else unchanged."""
        if self.rows.own is None:
            return states
        return apply(_Dropped, states, self.rows.own, self.columns, self.rate)


ATTENTION_DROPOUT = "seeded_dropout"
"""Attribute of an attention module: its `AttentionDropout`; absent without dropout."""


def position_keys(length: int, device: torch.device) -> Tensor:
    """Return the keys of key positions as columns of attention weights, int32 [length]."""
    return column_keys("key position", torch.arange(length, device=device))


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the attention weights of one module.

    rows: keys of the stage's present rows, shared by its modules. heads: keys of the query heads
    that this rank has, int32 [heads].
    """

    rate: float
    rows: DropoutRows
    heads: Tensor

    def now(self) -> AttentionDropout | None:
        """Return the dropout of the present microbatch; None where the stage does not train."""
        return None if self.rows.keys is None else replace(self, rows=replace(self.rows))

    def query_keys(self, queries: slice) -> Tensor:
        """Return the keys of queries of each head as rows of weights, int32 [b, heads, queries]."""
        assert self.rows.keys is not None
        return _mix(self.rows.keys[:, None, queries] ^ self.heads[:, None])

    def drop(self, weights: Tensor, queries: slice, keys: slice) -> Tensor:
        """Return the weights of these queries and keys, [b, heads, queries, keys], with dropout."""
        of_queries = self.query_keys(queries)
        of_keys = position_keys(keys.stop, weights.device)[keys]
        mask = dropout_mask(of_queries, of_keys, self.rate)
        return _without(weights, mask, self.rate)
