"""Causal attention of a stage's blocks, registered with the library as `IMPLEMENTATION`.

It is the library's `sdpa` where one of torch's fused kernels computes it. A sliding window, a
soft-cap of the scores, dropout of the weights and sinks have kernels of this project on a GPU
(`fused_attention`), and are computed by chunks of queries elsewhere (`chunked_attention`).
"""

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autohet.runtime.models.error_text import first_line
from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.chunked_attention import (
    CHUNK_TOKENS,
    ChunkedAttention,
    Explicit,
    States,
    is_plain,
)
from autohet.runtime.models.layers.compilation import report_failure
from autohet.runtime.models.layers.dropout import (
    ATTENTION_DROPOUT,
    AttentionDropout,
    DropoutRows,
)
from autohet.runtime.models.layers.pieces import VARLEN_DTYPES, piece_attention
from planner.plans.plan import TensorShare

IMPLEMENTATION = "chunked_causal"
FUSED_ATTENTION = "autohet.runtime.models.layers.fused_attention"
FUSED = {torch.float32: (128, 1e-3), torch.bfloat16: (256, 5e-2), torch.float16: (256, 1e-2)}
"""Limits of that module: on the width of heads, and on the difference of their
results from those of the chunks, relative to the largest value."""
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
    softcap: bound of the scores (Gemma 2), which torch's fused kernels do not support; nor do they
    support dropout of a module that has ATTENTION_DROPOUT, and s_aux: a further score of each head,
    its sink, which takes a part of the softmax and has no value (gpt-oss).
    """
    width = value.shape[-1]
    if width < query.shape[-1] and value.device.type == "cpu":
        # The fused kernel for the CPU has one width. Without it all scores would be kept.
        value = F.pad(value, (0, query.shape[-1] - width))
    drawn: AttentionDropout | None = getattr(module, ATTENTION_DROPOUT, None)
    dropout = None if drawn is None else drawn.now()
    explicit = Explicit(softcap, dropout, s_aux is not None)
    counts = getattr(module, UNEQUAL_GROUPS, None)
    if counts is not None:
        key = _repeat_heads(key, counts)
        value = _repeat_heads(value, counts)
    states = (query, key, value)
    lengths = None
    if attention_mask is not None and attention_mask.dim() == 1:
        lengths = attention_mask
    if not explicit and lengths is not None and query.dtype in VARLEN_DTYPES:
        return piece_attention(module, states, lengths, scaling, piece_window), None
    out: Tensor
    if not explicit and (attention_mask is None or is_plain(attention_mask)):
        out, _ = sdpa_attention_forward(module, *states, attention_mask, scaling=scaling, **rest)
    else:
        # A band, pieces in fp32, or what no kernel of torch computes. Only that has sinks.
        function = _usable_kernels(states, attention_mask, explicit)
        mask = attention_mask
        if lengths is not None or function is not None:
            mask = _first_keys(mask, piece_window, query)
        if function is None:
            function = ChunkedAttention
            if lengths is not None:
                keys = torch.arange(query.shape[2], device=query.device)
                assert mask is not None
                mask = (keys >= mask[:, None, :, None]).tril_()
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = apply(function, *states, s_aux, mask, factor, explicit)
    return out if out.shape[-1] == width else out[..., :width], None


def _first_keys(mask: Tensor | None, piece_window: int | None, query: Tensor) -> Tensor | None:
    """Return the first key that each query attends to, int32 [b, S]; None: the first of the row.

    mask: a band, or cumulative lengths of pieces.
    """
    if mask is None:
        return None
    batch, _, length, _ = query.shape
    places = torch.arange(batch * length, device=query.device)
    first = torch.zeros_like(places)
    window = piece_window
    if mask.dim() == 1:
        piece = torch.searchsorted(mask, places, right=True) - 1
        first = mask[piece] % length
    else:
        window = mask.shape[1] - mask.shape[0]
    if window is not None:
        first = torch.maximum(first, places % length - (window - 1))
    return first.view(batch, length).int()


def _usable_kernels(states: States, mask: Tensor | None, explicit: Explicit) -> Any:
    """Return `FusedAttention` if it computes this attention on this device, else None."""
    query, _, value = states
    width = max(query.shape[-1], value.shape[-1])
    if query.device.type != "cuda" or width > FUSED.get(query.dtype, (0, 0))[0]:
        return None
    # The kernels count in 32 bits within a row of the batch.
    if query[0].numel() >= 1 << 31 or (mask is not None and is_plain(mask)):
        return None
    # Kernels are compiled for lengths that are multiples of 16, and for others.
    length = 77 if query.shape[2] % 16 else 80
    shapes = [(1, each.shape[1], length, each.shape[3]) for each in states]
    rate = explicit.dropout and explicit.dropout.rate
    kind = replace(explicit, dropout=None), rate, mask is not None
    return _try_kernels(query.device, query.dtype, *shapes, *kind)


@cache
def _try_kernels(*kind: Any) -> Any:
    """Return what `_check_kernels` returns for these arguments; None if it fails."""
    try:
        # Hooks and modes of the pass around this call do not hold in another thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_check_kernels, *kind).result()
    except Exception as error:  # noqa: BLE001 - a compiler's failures have no common type
        report_failure(
            "Attention runs by chunks of its scores, which takes several times as long, since its"
            f" kernel fails here: {first_line(error)}"
        )
        return None


def _check_kernels(device: torch.device, dtype: torch.dtype, *kind: Any) -> Any:
    """Return `FusedAttention`, if it gives results and gradients of the chunks.

    kind: shapes of query, key and value, settings but for dropout, its rate, and whether queries
    have first keys.
    """
    *shapes, explicit, rate, has_first = kind
    fused = importlib.import_module(FUSED_ATTENTION).FusedAttention
    heads, length = shapes[0][1:3]
    if explicit.has_sinks:
        shapes.append((heads,))
    source = torch.Generator(device).manual_seed(0)
    with torch.accelerator.device_index(device.index):
        inputs = [
            torch.randn(shape, generator=source, dtype=dtype, device=device, requires_grad=True)
            for shape in shapes
        ]
        if rate:
            numbers = torch.arange(max(length, heads), dtype=torch.int32, device=device)
            rows = DropoutRows(numbers[None, :length])
            dropout = AttentionDropout(rate, rows, numbers[:heads])
            explicit = replace(explicit, dropout=dropout)
        mask = window_band(length // 2, length, dtype, device) if has_first else None
        results = []
        for function, own in (
            (ChunkedAttention, mask),
            (fused, _first_keys(mask, None, inputs[0])),
        ):
            out = apply(function, *[*inputs, None][:4], own, 0.1, explicit)
            results.append([out, *torch.autograd.grad(out, inputs, out)])
        for wanted, found in zip(*results, strict=True):
            limit = FUSED[dtype][1] * float(wanted.abs().max())
            torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
    return fused


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
