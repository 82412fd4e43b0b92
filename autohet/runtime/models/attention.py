"""Causal attention whose tokens see a window of the last `sliding_window` tokens, without a mask of
the whole sequence.

Queries go in chunks; each chunk meets only the keys that some of its queries see, under one band
that all chunks, layers and microbatches share: [C, window + C] for chunks of C queries, instead of
[S, S]. FLOPs and memory are linear in the sequence's length. The backward pass computes each chunk
again, so that what is kept is query, key and value alone, and gradients of keys are added up in
fp32.

Registered with the library as an attention implementation, `IMPLEMENTATION`; wherever no band is
given it is the library's `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autohet.runtime.models.pieces import piece_attention
from planner.plan import TensorShare

IMPLEMENTATION = "chunked_causal"
CHUNK_TOKENS = 1024
"""Queries of a chunk, at most the window: of a window of 4,096 tokens a fourth more keys are met
than are seen.
"""

UNEQUAL_GROUPS = "num_queries_by_key_head"
"""Attribute of an attention module: how many of its query heads use each of its key-value heads,
where these are not equally many.
"""

MaskMaker = Callable[[int | None, int, torch.dtype, torch.device], Tensor | None]


def whole_mask(
    window: int | None, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[S, S], for whoever needs attention to be one operator: a model's graph, not its training."""
    if window is None or length <= window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def window_band(
    window: int | None, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """What a chunk's scores get added, [C, window + C]: 0 where query i sees key j of the `window`
    before the chunk and the chunk itself (i < j <= i + window), else -inf. None where the window
    holds every sequence of this length: plain causal attention.
    """
    if window is None or length <= window:
        return None
    chunk = min(CHUNK_TOKENS, window)
    seen = torch.ones(chunk, window + chunk, dtype=torch.bool, device=device).triu_(1).tril_(window)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


@torch.compiler.disable
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
    """The library's interface: query [b, heads, S, d], key and value [b, kv heads, S, d]; returns
    [b, S, heads, d]. `attention_mask`: a band of `window_band` (which is never square), a
    `whole_mask`, a `piece_mask` [b, 1, S, S], cumulative lengths of pieces [n], or None.

    piece_window: tokens that one sees within its piece; with cumulative lengths. softcap: bound of
    the scores (Gemma 2), which torch's fused kernels do not know: by chunks of queries as for a
    window, each computed again in the backward pass; not with cumulative lengths.
    """
    if (counts := getattr(module, UNEQUAL_GROUPS, None)) is not None:
        key, value = (_repeated(each, counts) for each in (key, value))
    if softcap is not None:
        capped: Tensor = _ChunkedAttention.apply(
            query, key, value, attention_mask, scaling, softcap
        )
        return capped, None
    if attention_mask is not None and attention_mask.dim() == 1:
        states = (query, key, value)
        return piece_attention(module, states, attention_mask, scaling, piece_window), None
    if attention_mask is None or _is_plain(attention_mask):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return found
    out: Tensor = _ChunkedAttention.apply(query, key, value, attention_mask, scaling, None)
    return out, None


def _is_plain(mask: Tensor) -> bool:
    """Whether the library's attention takes the mask: of pieces, or square."""
    return mask.dim() == 4 or mask.shape[0] == mask.shape[1]


AttentionInterface.register(IMPLEMENTATION, attention)


def share_key_heads(module: nn.Module, share: TensorShare, key_value_units: int) -> None:
    """Where a model's attention is cut into more parts than it has key-value heads: tell it which
    of this rank's query heads use which of its key-value heads, those that the rank's parts
    overlap.
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
    """Each key or value head as often as query heads use it: [b, kv heads, S, d] to [b, heads, S,
    d].
    """
    each = (
        head.expand(-1, count, -1, -1)
        for head, count in zip(heads.split(1, dim=1), counts, strict=True)
    )
    return torch.cat(list(each), dim=1)


class _ChunkedAttention(torch.autograd.Function):
    """Attention by chunks of queries, of which the backward pass computes each again."""

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
"""Queries, keys, and the mask between them; None: plainly causal, and as many keys as queries."""


def _chunks(length: int, mask: Tensor | None, device: torch.device) -> Iterator[Chunk]:
    if mask is None:
        return _causal_chunks(length, device)
    return _square_chunks(length, mask) if _is_plain(mask) else _band_chunks(length, mask)


def _band_chunks(length: int, band: Tensor) -> Iterator[Chunk]:
    """The first chunk is plainly causal. A chunk's keys begin `window` before it, or at the
    sequence's begin: the mask is then the band's right part.
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
    """Of a mask that has a row for each query, [..., S, S]."""
    for first in range(0, length, CHUNK_TOKENS):
        end = min(first + CHUNK_TOKENS, length)
        yield slice(first, end), slice(0, end), mask[..., first:end, :end]


def _attend(
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """[b, heads, queries, d]. Kernels that take a mask want as many key heads as query heads."""
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
    """As the library's eager attention of Gemma 2: capped, then masked, then softmax in fp32."""
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
