"""Attention by chunks of queries, without a mask or scores of S x S.

Each chunk reads only the keys that some of its queries attend to. All chunks, layers and
microbatches share one band as mask: [C, window + C] for chunks of C queries, instead of [S, S].
FLOPs and memory are linear in the sequence's length. The backward pass computes each chunk again,
so autograd keeps query, key and value alone. Gradients of keys are summed in fp32.

Attention with a soft-cap of its scores, with dropout of its weights or with sinks goes the same
way, where `fused_attention` cannot be used: scores of some queries at a time, at most
`EXPLICIT_SCORES`, which the backward pass computes again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autohet.runtime.models.layers.dropout import AttentionDropout
from autohet.runtime.models.layers.row_chunks import wide_zeros
from planner.plans.model_spec import EXPLICIT_SCORES

CHUNK_TOKENS = 1024
"""Queries per chunk, at most the window.

With a window of 4,096 tokens, a chunk reads a fourth more keys than each query attends to.
"""
States = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


@dataclass(frozen=True)
class Explicit:
    """Operations on scores and weights that no fused kernel has.

    softcap: bound of the scores (Gemma 2). dropout: of the weights. has_sinks: each head has a
    further score (gpt-oss).
    """

    softcap: float | None = None
    dropout: AttentionDropout | None = None
    has_sinks: bool = False

    def __bool__(self) -> bool:
        return self.softcap is not None or self.dropout is not None or self.has_sinks


def is_plain(mask: Tensor) -> bool:
    """Return True if the library's attention takes the mask: a mask of pieces, or a square one."""
    return mask.dim() == 4 or (mask.dim() == 2 and mask.shape[0] == mask.shape[1])


class ChunkedAttention(torch.autograd.Function):
    """Attention by chunks of queries; the backward pass computes each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        scale: float,
        explicit: Explicit,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks, mask)
        ctx.scale = scale
        ctx.explicit = explicit
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        for chunk in _chunks(query, mask, explicit):
            rows, keys, _ = chunk
            states = query[:, :, rows], key[:, :, keys], value[:, :, keys]
            found = _attend(states, chunk, scale, explicit, sinks)
            out[:, rows] = found.transpose(1, 2)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask = ctx.saved_tensors
        of_query = torch.empty_like(query)
        # Several chunks read a key: their gradients are summed in fp32.
        of_key = wide_zeros(key)
        of_value = wide_zeros(value)
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=of_key.dtype)
        for chunk in _chunks(query, mask, ctx.explicit):
            rows, keys, _ = chunk
            inputs = [query[:, :, rows], key[:, :, keys], value[:, :, keys]]
            if sinks is not None:
                inputs.append(sinks)
            given = [each.detach().requires_grad_() for each in inputs]
            sink = None if sinks is None else given[3]
            with torch.enable_grad():
                states = given[0], given[1], given[2]
                found = _attend(states, chunk, ctx.scale, ctx.explicit, sink)
            gradient = gradients[0][:, rows].transpose(1, 2)
            parts = torch.autograd.grad(found, given, gradient)
            of_query[:, :, rows] = parts[0]
            of_key[:, :, keys] += parts[1]
            of_value[:, :, keys] += parts[2]
            if of_sinks is not None:
                of_sinks += parts[3]
        if of_sinks is not None:
            of_sinks = of_sinks.to(sinks.dtype)
        of_states = of_query, of_key.to(key.dtype), of_value.to(value.dtype)
        return *of_states, of_sinks, None, None, None


Chunk = tuple[slice, slice, Tensor | None]
"""Queries, keys, and the mask between them; None: plainly causal, with as many keys as queries."""


def _chunks(query: Tensor, mask: Tensor | None, explicit: Explicit) -> Iterator[Chunk]:
    """Yield the chunks of the queries [b, heads, S, d]: at most CHUNK_TOKENS each.

    Explicit scores of a chunk, [b, heads, chunk, keys], are at most EXPLICIT_SCORES.
    """
    batch, heads, length, _ = query.shape
    num_keys = length
    if mask is not None and not is_plain(mask):
        num_keys = min(length, mask.shape[1])
    chunk = CHUNK_TOKENS
    if explicit:
        most = EXPLICIT_SCORES // (batch * heads * num_keys)
        chunk = max(1, min(chunk, most))
    if mask is None:
        return _causal_chunks(length, chunk, query.device)
    if is_plain(mask):
        return _square_chunks(length, chunk, mask)
    return _band_chunks(length, min(chunk, mask.shape[0]), mask)


def _band_chunks(length: int, chunk: int, band: Tensor) -> Iterator[Chunk]:
    """Yield the chunks under a band, whose rows are at least `chunk`.

    A chunk's keys begin `window` before it, or at the begin of the sequence; in the latter case the
    mask is the right part of the band. The first chunk is plainly causal.
    """
    window = band.shape[1] - band.shape[0]
    for first in range(0, length, chunk):
        end = min(first + chunk, length)
        begin = max(0, first - window)
        mask = None
        if first:
            num_queries = end - first
            left = begin - (first - window)
            mask = band[:num_queries, left : window + num_queries]
        yield slice(first, end), slice(begin, end), mask


def _causal_chunks(length: int, chunk: int, device: torch.device) -> Iterator[Chunk]:
    for first in range(0, length, chunk):
        end = min(first + chunk, length)
        mask = None
        if first:
            mask = torch.ones(end - first, end, dtype=torch.bool, device=device)
            mask = mask.tril_(first)
        yield slice(first, end), slice(0, end), mask


def _square_chunks(length: int, chunk: int, mask: Tensor) -> Iterator[Chunk]:
    """Yield the chunks under a mask with one row for each query, [..., S, S]."""
    for first in range(0, length, chunk):
        end = min(first + chunk, length)
        own = mask[..., first:end, :end]
        yield slice(first, end), slice(0, end), own


def _attend(
    states: States,
    chunk: Chunk,
    scale: float,
    explicit: Explicit,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention of a chunk, [b, heads, queries, d].

    Kernels that take a mask need as many key heads as query heads.
    """
    query, key, value = states
    _, _, mask = chunk
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (mask is not None or explicit):
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    if explicit:
        return _attend_explicitly((query, key, value), chunk, scale, explicit, sinks)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=mask is None and groups > 1,
    )


def _attend_explicitly(
    states: States,
    chunk: Chunk,
    scale: float,
    explicit: Explicit,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention as the library's eager modules do, in their order of operations.

    They are: soft-cap, mask, a sink beside the keys, softmax in fp32, dropout.
    """
    query, key, value = states
    rows, keys, mask = chunk
    scores = query @ key.transpose(-1, -2) * scale
    if explicit.softcap is not None:
        scores = torch.tanh(scores / explicit.softcap) * explicit.softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = mask.tril_()
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    if sinks is not None:
        by_head = sinks.view(1, -1, 1, 1)
        sink = by_head.expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    weights = weights.to(query.dtype)
    # A sink has a weight and no value.
    weights = weights[..., : value.shape[2]]
    if explicit.dropout is not None:
        weights = explicit.dropout.drop(weights, rows, keys)
    return weights @ value
