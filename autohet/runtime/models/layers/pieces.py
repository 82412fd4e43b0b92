"""Attention and positions of rows that hold several documents, called pieces.

No piece attends to another, and each begins at position 0. `begins` is a row's map of its pieces:
bool [b, S], true at the first token of each. It is on the host, so that nothing here waits for a
device.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True if varlen_attn takes fewer key-value than query heads, as in newer versions of torch."""
VARLEN_DTYPES = (torch.bfloat16, torch.float16)


def starts_of(begins: Tensor) -> Tensor:
    """Return the index in its row of the first token of each token's piece, int64 [b, S]."""
    places = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    starts = places.masked_fill(~begins, 0)
    return starts.cummax(dim=1).values


def positions_of(begins: Tensor) -> Tensor:
    """Return the position of each token in its piece, int64 [b, S]."""
    places = torch.arange(begins.shape[1], device=begins.device)
    return places - starts_of(begins)


def answer_lengths(begins: Tensor) -> list[list[int]]:
    """Return the lengths of each row's two answers, and of the rest, from its map of pieces.

    begins: bool [b, S] on the host; a row begins with its first answer.
    """
    lengths = []
    length = begins.shape[1]
    for row in begins:
        # The rest, if there is one, begins as a third piece.
        ends = [place for place in row.nonzero().flatten().tolist() if place > 0]
        ends.append(length)
        first = ends[0]
        second = 0
        if len(ends) > 1:
            second = ends[1] - first
        lengths.append([first, second, length - first - second])
    return lengths


def piece_mask(begins: Tensor, window: int | None, device: torch.device) -> Tensor:
    """Return a block-diagonal causal mask, bool [b, 1, S, S].

    Query i attends to key j of its own piece if j <= i and, with a window, i - j < window.
    """
    begins = begins.to(device)
    length = begins.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    seen = seen.tril_()
    if window is not None and window < length:
        seen.triu_(1 - window)
    starts = starts_of(begins)
    same = starts.unsqueeze(2) == starts.unsqueeze(1)
    return (same & seen).unsqueeze(1)


def compute_pieces_alone(mixer: nn.Module) -> None:
    """Let a module that mixes tokens along the sequence [b, S, h] compute each piece by itself.

    Its `attention_mask` is then the rows' map of pieces on the host; None: each row is one piece.
    """
    compute = mixer.forward

    # Each length of a piece would be compiled anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        hidden_states: Tensor, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if attention_mask is None:
            whole: Tensor = compute(hidden_states, *args, **kwargs)
            return whole
        rows = []
        for states, begins in zip(hidden_states, attention_mask, strict=True):
            inner = [place for place in begins.nonzero().flatten().tolist() if place > 0]
            pieces = states.tensor_split(inner)
            outputs = [compute(piece.unsqueeze(0), *args, **kwargs) for piece in pieces]
            rows.append(torch.cat(outputs, dim=1))
        return torch.cat(rows)

    mixer.forward = forward


def cumulative_lengths(begins: Tensor, device: torch.device) -> Tensor:
    """Return the begins of pieces in the concatenated rows, then the total length, int32 [n + 1].

    Empty pieces round n up to a power of two: fewer shapes, so compiled blocks are seldom compiled
    again.
    """
    flat = begins.clone()
    flat[:, 0] = True
    starts = flat.flatten().nonzero().flatten()
    starts = starts.to(torch.int32)
    size = 1 << max(0, len(starts) - 1).bit_length()
    lengths = torch.full((size + 1,), flat.numel(), dtype=torch.int32)
    lengths[: len(starts)] = starts
    return lengths.to(device, non_blocking=True)


def piece_attention(
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    lengths: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute causal attention within pieces by `torch.nn.attention.varlen`.

    `states`: query [b, heads, S, d], key and value [b, kv heads, S, d]. Returns [b, S, heads, d].
    """
    batch, heads, length, _ = states[0].shape
    groups = heads // states[1].shape[1]
    # The kernel takes the tokens of all rows one after the other, [b S, heads, d].
    query, key, value = [each.transpose(1, 2).flatten(0, 1) for each in states]
    width = value.shape[-1]
    if width < query.shape[-1]:
        # Latent attention has narrower values, and the kernel has one width.
        value = F.pad(value, (0, query.shape[-1] - width))
    grouped: dict[str, Any] = {}
    if _TAKES_GROUPS:
        grouped["enable_gqa"] = groups > 1
    elif groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    # Tokens to the left of a query that it attends to; -1: all.
    left = -1
    if window is not None and window < length:
        left = window - 1
    out: Any = varlen_attn(
        query,
        key,
        value,
        lengths,
        lengths,
        length,
        length,
        scale=scaling,
        window_size=(left, 0),
        **grouped,
    )
    return out[..., :width].unflatten(0, (batch, length))  # type: ignore[no-any-return]
