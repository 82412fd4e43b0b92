"""Causal attention with a sliding window of `sliding_window` tokens, without a mask of S x S.

Queries are processed in chunks. Each chunk reads only the keys that some of its queries attend to.
All chunks, layers and microbatches share one band as mask: [C, window + C] for chunks of C queries,
instead of [S, S]. FLOPs and memory are linear in the sequence's length. The backward pass computes
each chunk again, so autograd keeps query, key and value alone. Gradients of keys are summed in
fp32.

Attention with a soft-cap of its scores or with dropout of its weights goes the same way, since no
fused kernel computes it with this project's bits: scores of some queries at a time, at most
`EXPLICIT_SCORES`, which the backward pass computes again.

It is registered with the library as an attention implementation, `IMPLEMENTATION`. Without all of
these it is the library's `sdpa`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.dropout import ATTENTION_DROPOUT, AttentionDropout
from autohet.runtime.models.layers.pieces import piece_attention
from autohet.runtime.models.layers.row_chunks import wide_zeros
from planner.plans.model_spec import EXPLICIT_SCORES, WINDOW_CHUNK
from planner.plans.plan import TensorShare

IMPLEMENTATION = "chunked_causal"
CHUNK_TOKENS = WINDOW_CHUNK
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
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    seen = seen.tril_().triu_(1 - window)
    return _additive(seen, dtype)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to scores: 0 where `seen` is True, else -inf."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, -torch.inf)


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
    seen = torch.ones(chunk, window + chunk, dtype=torch.bool, device=device)
    seen = seen.triu_(1).tril_(window)
    return _additive(seen, dtype)


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
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention through the library's interface; return [b, S, heads, d].

    query: [b, heads, S, d]; key and value: [b, kv heads, S, d]. `attention_mask`: a band of
    `window_band` (which is never square), a `whole_mask`, a `piece_mask` [b, 1, S, S], cumulative
    lengths of pieces [n], or None.

    piece_window: tokens that a token attends to within its piece; only with cumulative lengths.
    softcap: bound of the scores (Gemma 2), which torch's fused kernels do not support. Attention
    then runs by chunks of queries as for a window, and the backward pass computes each chunk again;
    not with cumulative lengths. So it does with dropout of a module that has ATTENTION_DROPOUT, and
    with s_aux: a further score of each head, its sink, which takes a part of the softmax and has no
    value (gpt-oss).
    """
    width = value.shape[-1]
    if width < query.shape[-1] and value.device.type == "cpu":
        # The fused kernel for the CPU has one width. Without it all scores would be kept.
        missing = query.shape[-1] - width
        padded = F.pad(value, (0, missing))
        out, _ = attention(
            module,
            query,
            key,
            padded,
            attention_mask,
            scaling=scaling,
            piece_window=piece_window,
            softcap=softcap,
            s_aux=s_aux,
            **rest,
        )
        return out[..., :width], None
    drawn: AttentionDropout | None = getattr(module, ATTENTION_DROPOUT, None)
    dropout = None if drawn is None else drawn.now()
    explicit = Explicit(softcap, dropout, s_aux is not None)
    counts = getattr(module, UNEQUAL_GROUPS, None)
    if counts is not None:
        key = _repeat_heads(key, counts)
        value = _repeat_heads(value, counts)
    states = (query, key, value)
    if not explicit:
        if attention_mask is not None and attention_mask.dim() == 1:
            return piece_attention(module, states, attention_mask, scaling, piece_window), None
        if attention_mask is None or _is_plain(attention_mask):
            found: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **rest
            )
            return found
    # A band alone, and what no fused kernel computes. Only the latter has sinks.
    out = apply(_ChunkedAttention, *states, s_aux, attention_mask, scaling, explicit)
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
    parts_per_head = share.of // key_value_units
    queries_per_part = int(module.num_key_value_groups) // parts_per_head  # type: ignore[arg-type]
    counts = []
    for head in share.units(key_value_units):
        first = max(share.first, head * parts_per_head)
        end = min(share.end, (head + 1) * parts_per_head)
        counts.append(queries_per_part * (end - first))
    if len(set(counts)) == 1:
        module.num_key_value_groups = counts[0]  # type: ignore[assignment]
    else:
        # The heads are repeated before the library's module counts them.
        module.num_key_value_groups = 1  # type: ignore[assignment]
        setattr(module, UNEQUAL_GROUPS, tuple(counts))


def _repeat_heads(heads: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Repeat each key or value head for each of its query heads.

    [b, kv heads, S, d] becomes [b, heads, S, d].
    """
    repeated = [
        head.expand(-1, count, -1, -1)
        for head, count in zip(heads.split(1, dim=1), counts, strict=True)
    ]
    return torch.cat(repeated, dim=1)


class _ChunkedAttention(torch.autograd.Function):
    """Attention by chunks of queries; the backward pass computes each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        scale: float | None,
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
    if mask is not None and not _is_plain(mask):
        num_keys = min(length, mask.shape[1])
    chunk = CHUNK_TOKENS
    if explicit:
        most = EXPLICIT_SCORES // (batch * heads * num_keys)
        chunk = max(1, min(chunk, most))
    if mask is None:
        return _causal_chunks(length, chunk, query.device)
    if _is_plain(mask):
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
    states: tuple[Tensor, Tensor, Tensor],
    chunk: Chunk,
    scale: float | None,
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
    states: tuple[Tensor, Tensor, Tensor],
    chunk: Chunk,
    scale: float | None,
    explicit: Explicit,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention as the library's eager modules do, in their order of operations.

    They are: soft-cap, mask, a sink beside the keys, softmax in fp32, dropout.
    """
    query, key, value = states
    rows, keys, mask = chunk
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * factor
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
