"""Attention with dropout, soft-cap and sinks in Triton kernels: O(S) memory, and the CPU's bits.

Scores live in registers, tile by tile, with a running softmax (FlashAttention-2, Dao 2023). The
backward pass makes them again from the logarithm of each query's sum. One kernel has a program for
each tile of queries and gives their gradients; the other has one for each tile of keys and loops
over the query heads of its group. Nothing is added atomically, so two runs give equal bits.

A query attends to the keys from its `first` to itself: `first` is 0 in a causal row, and larger
under a sliding window and in a later piece. It never falls along a row.

Tiles depend on widths and formats alone. An autotuner would add up in another order on each card,
and would take its time at each start.

Import it only where Triton is installed; PyTorch's CUDA builds for Linux bring it along.
"""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autohet.runtime.models.layers.chunked_attention import Explicit
from autohet.runtime.models.layers.dropout import position_keys

# Compiled for Ampere and Hopper, no kernel spills more than 130 bytes of registers a thread, and
# each fits into 99 KiB of shared memory, which is all that smaller cards of Ampere and Ada have.
_TILES = {
    (2, 64): ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
    (2, 128): ((64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 2)),
    (2, 256): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    (4, 64): ((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    (4, 128): ((32, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
}
"""Queries and keys of a tile, warps of a program and loads in flight, by bytes of an element and
width: of the forward pass, of gradients of queries, and of those of keys."""
_LOG2_E = tl.constexpr(1.4426950408889634)

_Inputs = namedtuple(
    "_Inputs",
    "query key value out lse sinks first end rows columns slope delta of_query of_key of_value"
    " heads group length scale cap kept"
    " queries keys capped limit flip precision width value_width",
)
"""Inputs of a kernel: tensors, then numbers, then constants that it is compiled for.

query, key, value, out, slope (the gradient of `out`) and the gradients `of_...`: [b, S, heads, d].
lse: logarithm to base 2 of each query's sum. delta: product of each query's output and its
gradient, which dropout leaves as it is. rows: keys of the queries' dropout, with its first shift
done as `_is_kept` says; all three [b, heads, S]. columns: those of the keys, [S]. first: first key
of each query; end: one past the last query of each key; both [b, S]. None: the attention has none.

group: query heads of a key head. cap: bound of the scores. kept: factor of the weights that dropout
keeps.

queries, keys: of a tile. limit, flip: of `_is_kept`. width, value_width: of the heads, and that
rounded up to a power of two.
"""


@triton.jit
def _is_kept(rows, columns, X):  # type: ignore[no-untyped-def]
    """Return the elements that `dropout_mask` keeps, by six integer operations and a comparison.

    The hash's first shift is linear: `rows` and `columns` have it done. Its last one changes the
    lower half of x by its upper half, which alone decides unless it is the limit's own: `flip` has
    that one.
    """
    x = (rows ^ columns).to(tl.uint32, bitcast=True) * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return (x ^ X.flip) >= X.limit


@triton.jit
def _scores(left, right, X):  # type: ignore[no-untyped-def]
    """Return scores of `left` and `right` in powers of two, and the slope of their soft-cap."""
    scores = tl.dot(left, right.T, input_precision=X.precision) * X.scale
    steepness = 1.0
    if X.capped:
        tanh = 2.0 * tl.sigmoid(scores * (2.0 / X.cap)) - 1.0
        scores = tanh * X.cap
        steepness = 1.0 - tanh * tanh
    return scores * _LOG2_E, steepness


@triton.jit
def _places(at, rows, X, width):  # type: ignore[no-untyped-def]
    """Return the place of a row of the batch, those of a head's rows in it, and which rows exist.

    at: batch, head, and number of heads. Places in a row of the batch have 32 bits, which saves
    registers.
    """
    columns = tl.arange(0, width[1])[None, :]
    first = at[0] * (X.length * at[2] * width[0])
    places = (rows * at[2] + at[1])[:, None] * width[0] + columns
    return first, places, (rows < X.length)[:, None] & (columns < width[0])


@triton.jit
def _load(base, at, rows, X, width):  # type: ignore[no-untyped-def]
    first, places, inside = _places(at, rows, X, width)
    return tl.load(base + first + places, mask=inside, other=0.0)


@triton.jit
def _store(base, tile, at, rows, X, width):  # type: ignore[no-untyped-def]
    first, places, inside = _places(at, rows, X, width)
    tl.store(base + first + places, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _by_queries(X):  # type: ignore[no-untyped-def]
    """Write output and sums of a tile of queries; with `slope`, their gradients and `delta`."""
    # The longest rows begin first.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * X.queries
    batch = (tl.program_id(1) // X.heads).to(tl.int64)
    head = tl.program_id(1) % X.heads
    at = batch, head, X.heads
    of_key = batch, head // X.group, X.heads // X.group
    queries = begin + tl.arange(0, X.queries)
    inside = queries < X.length
    row = (batch * X.heads + head) * X.length + queries
    q = _load(X.query, at, queries, X, X.width)
    if X.rows is not None:
        keyed = tl.load(X.rows + row, mask=inside, other=0)

    low = 0
    if X.first is not None:
        firsts = X.first + batch * X.length
        first = tl.load(firsts + queries, mask=inside, other=0)
        low = tl.load(firsts + begin) // X.keys * X.keys

    if X.slope is None:
        acc = tl.zeros([X.queries, X.value_width[1]], tl.float32)
        # Finite, since a query may see no key of its first tile.
        top = tl.full([X.queries], -1e30, tl.float32)
        total = tl.zeros([X.queries], tl.float32)
        if X.sinks is not None:
            top = total + tl.load(X.sinks + head).to(tl.float32) * _LOG2_E
            total += 1.0
    else:
        acc = tl.zeros([X.queries, X.width[1]], tl.float32)
        slope = _load(X.slope, at, queries, X, X.value_width)
        out = _load(X.out, at, queries, X, X.value_width)
        delta = tl.sum(out.to(tl.float32) * slope.to(tl.float32), 1)
        tl.store(X.delta + row, delta, mask=inside)
        lse = tl.load(X.lse + row, mask=inside, other=float("inf"))

    for start in range(low, tl.minimum(begin + X.queries, X.length), X.keys):
        keys = start + tl.arange(0, X.keys)
        k = _load(X.key, of_key, keys, X, X.width)
        v = _load(X.value, of_key, keys, X, X.value_width)
        scores, steepness = _scores(q, k, X)
        # All tiles are masked: a branch for whole ones costs more registers than there are.
        seen = keys[None, :] <= queries[:, None]
        if X.first is not None:
            seen &= keys[None, :] >= first[:, None]
        scores = tl.where(seen, scores, -float("inf"))
        if X.rows is not None:
            column = tl.load(X.columns + keys, mask=keys < X.length, other=0)
            kept = _is_kept(keyed[:, None], column[None, :], X)
        if X.slope is None:
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            top = new_top
            total = total * shrink + tl.sum(weights, 1)
            if X.rows is not None:
                weights = tl.where(kept, weights, 0.0)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=X.precision)
        else:
            weights = tl.exp2(scores - lse[:, None])
            of_weights = tl.dot(slope, v.T, input_precision=X.precision)
            if X.rows is not None:
                of_weights = tl.where(kept, of_weights * X.kept, 0.0)
            of_scores = weights * (of_weights - delta[:, None]) * steepness
            acc = tl.dot(of_scores.to(k.dtype), k, acc, input_precision=X.precision)

    if X.slope is None:
        _store(X.out, acc * (X.kept / total)[:, None], at, queries, X, X.value_width)
        tl.store(X.lse + row, top + tl.log2(total), mask=inside)
    else:
        _store(X.of_query, acc * X.scale, at, queries, X, X.width)


@triton.jit
def _by_keys(X):  # type: ignore[no-untyped-def]
    """Write the gradients of a tile of keys and values, summed over the heads of their group."""
    begin = tl.program_id(0) * X.keys
    num_key_heads = X.heads // X.group
    batch = (tl.program_id(1) // num_key_heads).to(tl.int64)
    key_head = tl.program_id(1) % num_key_heads
    of_key = batch, key_head, num_key_heads
    keys = begin + tl.arange(0, X.keys)
    k = _load(X.key, of_key, keys, X, X.width)
    v = _load(X.value, of_key, keys, X, X.value_width)
    if X.rows is not None:
        column = tl.load(X.columns + keys, mask=keys < X.length, other=0)

    end = X.length
    if X.first is not None:
        last = tl.minimum(begin + X.keys, X.length) - 1
        end = tl.load(X.end + batch * X.length + last)

    of_k = tl.zeros([X.keys, X.width[1]], tl.float32)
    of_v = tl.zeros([X.keys, X.value_width[1]], tl.float32)
    for member in range(0, X.group):
        head = key_head * X.group + member
        at = batch, head, X.heads
        row = (batch * X.heads + head) * X.length
        for start in range(begin // X.queries * X.queries, end, X.queries):
            queries = start + tl.arange(0, X.queries)
            inside = queries < X.length
            q = _load(X.query, at, queries, X, X.width)
            slope = _load(X.slope, at, queries, X, X.value_width)
            # Infinite after the last query: these have no weights.
            lse = tl.load(X.lse + row + queries, mask=inside, other=float("inf"))
            delta = tl.load(X.delta + row + queries, mask=inside, other=0.0)
            scores, steepness = _scores(k, q, X)
            seen = keys[:, None] <= queries[None, :]
            if X.first is not None:
                firsts = X.first + batch * X.length + queries
                seen &= keys[:, None] >= tl.load(firsts, mask=inside, other=0)[None, :]
            scores = tl.where(seen, scores, -float("inf"))
            weights = tl.exp2(scores - lse[None, :])
            of_weights = tl.dot(v, slope.T, input_precision=X.precision)
            left = weights
            if X.rows is not None:
                keyed = tl.load(X.rows + row + queries, mask=inside, other=0)
                kept = _is_kept(keyed[None, :], column[:, None], X)
                left = tl.where(kept, weights, 0.0)
                of_weights = tl.where(kept, of_weights * X.kept, 0.0)
            of_v = tl.dot(left.to(slope.dtype), slope, of_v, input_precision=X.precision)
            of_scores = weights * (of_weights - delta[None, :]) * steepness
            of_k = tl.dot(of_scores.to(q.dtype), q, of_k, input_precision=X.precision)

    _store(X.of_key, of_k * X.scale, of_key, keys, X, X.width)
    _store(X.of_value, of_v * X.kept, of_key, keys, X, X.value_width)


class FusedAttention(torch.autograd.Function):
    """Attention by the kernels, with the arguments of `ChunkedAttention`.

    They differ in `first` instead of a mask: the first key of each query, int32 [b, S]; None:
    plainly causal.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        query, key, value, sinks, first, scale, explicit = given
        batch, heads, length, _ = query.shape
        end = rows = columns = None
        if first is not None:
            places = torch.arange(length, device=query.device).repeat(batch, 1).int()
            end = torch.searchsorted(first, places, right=True, out_int32=True)
        if explicit.dropout is not None:
            rows = _shift(explicit.dropout.query_keys(slice(None)))
            columns = _columns(length, query.device)
        states = [each.transpose(1, 2).contiguous() for each in (query, key, value)]
        out = query.new_empty(batch, length, heads, value.shape[-1])
        lse = query.new_empty(batch, heads, length, dtype=torch.float32)
        tensors = [*states, out, lse, sinks, first, end, rows, columns, *[None] * 5]
        ctx.save_for_backward(*tensors)
        ctx.settings = scale, explicit
        _run(_by_queries, tensors, *ctx.settings)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        lse, sinks = saved[4:6]
        delta, *of_states = [torch.empty_like(each) for each in (lse, *saved[:3])]
        tensors = [*saved[:10], gradients[0].contiguous(), delta, *of_states]
        _run(_by_queries, tensors, *ctx.settings)
        _run(_by_keys, tensors, *ctx.settings)
        of_sinks = None
        if sinks is not None:
            # A sink has a weight, and its product with the output's gradient is 0.
            weights = torch.exp2(sinks.float().view(-1, 1) * _LOG2_E.value - lse)
            of_sinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
        return *[each.transpose(1, 2) for each in of_states], of_sinks, None, None, None


@lru_cache(maxsize=8)
def _columns(length: int, device: torch.device) -> Tensor:
    return _shift(position_keys(length, device))


def _shift(keys: Tensor) -> Tensor:
    """Return keys of dropout with the first shift of the hash done."""
    return keys ^ (keys >> 16 & 0xFFFF)


def _run(kernel: Any, tensors: list[Any], scale: float, explicit: Explicit) -> None:
    """Run a kernel over tiles of queries, or of keys."""
    query, value, slope = tensors[0], tensors[2], tensors[10]
    batch, length, heads, width = query.shape
    key_heads, value_width = value.shape[2:]
    widths = [(each, max(16, triton.next_power_of_2(each))) for each in (width, value_width)]
    by_keys = kernel is _by_keys
    kinds = _TILES[query.element_size(), max(64, widths[0][1], widths[1][1])]
    queries, keys, warps, stages = kinds[0 if slope is None else 1 + by_keys]

    rate = 0.0 if explicit.dropout is None else explicit.dropout.rate
    cap = explicit.softcap
    numbers = heads, heads // key_heads, length, scale, cap or 1.0, 1.0 / (1.0 - rate)
    limit = round(rate * 2**32)
    # The limit's upper half and its sign as a signed number, which is 2**31 less.
    flip = 1 << 31 | (limit >> 16 ^ 1 << 15)
    precision = "tf32x3" if query.dtype == torch.float32 else "ieee"
    constants = queries, keys, cap is not None, limit, flip, precision
    sizes = [tuple(map(tl.constexpr, each)) for each in widths]
    inputs = _Inputs._make([*tensors, *numbers, *map(tl.constexpr, constants), *sizes])
    tiles = triton.cdiv(length, keys if by_keys else queries)
    programs = batch * (key_heads if by_keys else heads)
    kernel[tiles, programs](inputs, num_warps=warps, num_stages=stages)
