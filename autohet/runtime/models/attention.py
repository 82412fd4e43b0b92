"""Causal attention with a sliding window of `sliding_window` tokens, without a mask of S x S.

Queries are processed in chunks. Each chunk reads only the keys that some of its queries attend to.
All chunks, layers and microbatches share one band as mask: [C, window + C] for chunks of C queries,
instead of [S, S]. FLOPs and memory are linear in the sequence's length. The backward pass computes
each chunk again, so autograd keeps query, key and value alone. Gradients of keys are summed in
fp32.

It is registered with the library as an attention implementation, `IMPLEMENTATION`. Without a band
it is the library's `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autohet.runtime.models.autograd import apply
from autohet.runtime.models.pieces import piece_attention
from planner.plan import TensorShare

IMPLEMENTATION = "chunked_causal"
CHUNK_TOKENS = 1024
"""Queries per chunk, at most the window.

With a window of 4,096 tokens, a chunk reads a fourth more keys than each query attends to.
"""

UNEQUAL_GROUPS = "num_queries_by_key_head"
"""Attribute of an attention module: the number of its query heads for each key-value head.

Set only if these numbers differ.
"""

MaskMaker = Callable[[int | None, int, torch.dtype, torch.device], Tensor | None]


def whole_mask(
    window: int | None, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return a mask [S, S], for attention as one operator in a model's graph, not for training.

    None: plain causal attention is enough.
    """
    if window is None or length <= window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def window_band(
    window: int | None, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return the band that is added to a chunk's scores, [C, window + C].

    It is 0 if query i attends to key j (i < j <= i + window) of the `window` before the chunk and
    the chunk itself, else -inf. None if sequences of this length fit the window: plain causal
    attention.
    """
    if window is None or length <= window:
        return None
    chunk = min(CHUNK_TOKENS, window)
    seen = torch.ones(chunk, window + chunk, dtype=torch.bool, device=device).triu_(1).tril_(window)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    piece_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention through the library's interface; return [b, S, heads, d].

    query: [b, heads, S, d]; key and value: [b, kv heads, S, d]. `attention_mask`: a band of
    `window_band` (which is never square), a `whole_mask`, a `piece_mask` [b, 1, S, S], cumulative
    lengths of pieces [n], or None.

    piece_window: tokens that a token attends to within its piece; only with cumulative lengths.
    softcap: bound of the scores (Gemma 2), which torch's fused kernels do not support. Attention
    then runs by chunks of queries as for a window, and the backward pass computes each chunk again;
    not with cumulative lengths.
    """
    width = value.shape[-1]
    if width < query.shape[-1] and value.device.type == "cpu":
        # The fused kernel for the CPU has one width. Without it all scores would be kept.
        padded = F.pad(value, (0, query.shape[-1] - width))
        out, _ = attention(
            module,
            query,
            key,
            padded,
            attention_mask,
            scaling=scaling,
            piece_window=piece_window,
            softcap=softcap,
            **rest,
        )
        return out[..., :width], None
    if (counts := getattr(module, UNEQUAL_GROUPS, None)) is not None:
        key, value = (_repeated(each, counts) for each in (key, value))
    if softcap is not None:
        capped = apply(_ChunkedAttention, query, key, value, attention_mask, scaling, softcap)
        return capped, None
    if attention_mask is not None and attention_mask.dim() == 1:
        states = (query, key, value)
        return piece_attention(module, states, attention_mask, scaling, piece_window), None
    if attention_mask is None or _is_plain(attention_mask):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return found
    out = apply(_ChunkedAttention, query, key, value, attention_mask, scaling, None)
    return out, None


def _is_plain(mask: Tensor) -> bool:
    """Return True if the library's attention takes the mask: a mask of pieces, or a square one."""
    return mask.dim() == 4 or mask.shape[0] == mask.shape[1]


AttentionInterface.register(IMPLEMENTATION, attention)


def share_key_heads(module: nn.Module, share: TensorShare, key_value_units: int) -> None:
    """Map this rank's query heads to its key-value heads, if there are more parts than those heads.

    The rank holds the key-value heads that its parts overlap.
    """
    if not hasattr(module, "num_key_value_groups") or key_value_units % share.of == 0:
        return
    parts = share.of // key_value_units  # of one key-value head
    per_part = int(module.num_key_value_groups) // parts  # type: ignore[arg-type]
    counts = tuple(
        per_part * (min(share.end, (head + 1) * parts) - max(share.first, head * parts))
        for head in share.units(key_value_units)
    )
    equal = len(set(counts)) == 1
    module.num_key_value_groups = counts[0] if equal else 1  # type: ignore[assignment]
    if not equal:
        setattr(module, UNEQUAL_GROUPS, counts)


def _repeated(heads: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Repeat each key or value head for each of its query heads.

    [b, kv heads, S, d] becomes [b, heads, S, d].
    """
    each = (
        head.expand(-1, count, -1, -1)
        for head, count in zip(heads.split(1, dim=1), counts, strict=True)
    )
    return torch.cat(list(each), dim=1)


class _ChunkedAttention(torch.autograd.Function):
    """Attention by chunks of queries; the backward pass computes each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale, ctx.softcap = scale, softcap
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        for rows, keys, part in _chunks(length, mask, query.device):
            found = _attend(
                (query[:, :, rows], key[:, :, keys], value[:, :, keys]), part, scale, softcap
            )
            out[:, rows] = found.transpose(1, 2)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, mask = ctx.saved_tensors
        of_query = torch.empty_like(query)
        of_key, of_value = (
            torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32))
            for each in (key, value)
        )
        for rows, keys, part in _chunks(query.shape[2], mask, query.device):
            given = [
                t.detach().requires_grad_()
                for t in (query[:, :, rows], key[:, :, keys], value[:, :, keys])
            ]
            with torch.enable_grad():
                found = _attend((given[0], given[1], given[2]), part, ctx.scale, ctx.softcap)
            parts = torch.autograd.grad(found, given, gradients[0][:, rows].transpose(1, 2))
            of_query[:, :, rows] = parts[0]
            of_key[:, :, keys] += parts[1]
            of_value[:, :, keys] += parts[2]
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


Chunk = tuple[slice, slice, Tensor | None]
"""Queries, keys, and the mask between them; None: plainly causal, with as many keys as queries."""


def _chunks(length: int, mask: Tensor | None, device: torch.device) -> Iterator[Chunk]:
    if mask is None:
        return _causal_chunks(length, device)
    return _square_chunks(length, mask) if _is_plain(mask) else _band_chunks(length, mask)


def _band_chunks(length: int, band: Tensor) -> Iterator[Chunk]:
    """Yield the chunks under a band; the first chunk is plainly causal.

    A chunk's keys begin `window` before it, or at the begin of the sequence; in the latter case the
    mask is the right part of the band.
    """
    chunk, window = band.shape[0], band.shape[1] - band.shape[0]
    for first in range(0, length, chunk):
        end, begin = min(first + chunk, length), max(0, first - window)
        left = begin - (first - window)
        mask = None if first == 0 else band[: end - first, left : window + end - first]
        yield slice(first, end), slice(begin, end), mask


def _causal_chunks(length: int, device: torch.device) -> Iterator[Chunk]:
    for first in range(0, length, CHUNK_TOKENS):
        end = min(first + CHUNK_TOKENS, length)
        mask = None
        if first:
            mask = torch.ones(end - first, end, dtype=torch.bool, device=device).tril_(first)
        yield slice(first, end), slice(0, end), mask


def _square_chunks(length: int, mask: Tensor) -> Iterator[Chunk]:
    """Yield the chunks under a mask with one row for each query, [..., S, S]."""
    for first in range(0, length, CHUNK_TOKENS):
        end = min(first + CHUNK_TOKENS, length)
        yield slice(first, end), slice(0, end), mask[..., first:end, :end]


def _attend(
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Compute attention, [b, heads, queries, d].

    Kernels that take a mask need as many key heads as query heads.
    """
    query, key, value = states
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (mask is not None or softcap is not None):
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    if softcap is not None:
        return _attend_capped((query, key, value), mask, scale, softcap)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=mask is None and groups > 1,
    )


def _attend_capped(
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """Compute attention as the library's eager Gemma 2: soft-cap, mask, then softmax in fp32."""
    query, key, value = states
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * factor
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ value
