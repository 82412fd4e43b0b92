"""Tensor parallelism on plain local tensors, with an embedding split in parts.

It uses Megatron-LM's f and g (Shoeybi et al., 2019, section 3). Hidden states are whole and equal
on every rank of the group, before and after each block; only tensors inside attention and MLP are
cut. Every rank of a group calls these functions in the same order; each blocks until its all-reduce
is done.

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) each rank has an equal part of
the sequence between these, in norms and residual sums. An all-gather replaces f and a
reduce-scatter replaces g; together they transfer as much as the two all-reduces. The sequence is
padded at its end if the TP degree does not divide it. A parameter that each rank holds whole then
has the gradient of the rank's own tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from autohet.runtime.models.layers.recomputation import is_replaying
from planner.plans.plan import Stage, TensorShare


class ReduceGroup(Protocol):
    """Group operations that tensor parallelism needs."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the group, in place; blocks."""
        ...

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Take the elementwise maximum over the group, in place; blocks."""
        ...

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Gather every rank's `part` in rank order into `out`; blocks."""
        ...

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None:
        """Sum `parts` over the group, this rank's part into `out`; blocks. `parts` may change."""
        ...

    def all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Send rows of `given` to every rank and receive rows into `out`, in rank order; blocks.

        received, sent: rows by rank.
        """
        ...

    def exchange_counts(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """Send `counts[rank]` to each rank; return the sent and the received; blocks the host."""
        theirs = torch.empty_like(counts)
        ones = [1] * len(counts)
        self.all_to_all(theirs, counts, ones, ones)
        return counts.tolist(), theirs.tolist()


@dataclass
class SequenceLength:
    """Number of tokens of the whole sequences that a stage computes on now."""

    tokens: int = 0


@dataclass
class TensorParallel:
    """A rank of the tensor-parallel group of a plan's stage.

    length: of the whole sequences, which the stage sets. group: an audit replaces it for a while.
    """

    group: ReduceGroup
    rank: int
    stage: Stage
    length: SequenceLength = field(default_factory=SequenceLength, compare=False)

    @classmethod
    def even(cls, group: ReduceGroup, rank: int, degree: int) -> TensorParallel:
        """Return a rank of a group with equal shares, of no plan."""
        return cls(group, rank, Stage(0, 1, ("",) * degree))

    @property
    def degree(self) -> int:
        return self.stage.tp_degree

    @property
    def share(self) -> TensorShare:
        return self.stage.share(self.rank)

    @property
    def cuts_sequence(self) -> bool:
        """True if hidden states between cut parts are this rank's part of the sequence."""
        return self.stage.sequence_parallel

    @property
    def sends_tokens(self) -> bool:
        """True if blocks with experts send tokens to the experts' owners (`expert_dispatch`).

        False: each rank computes its experts for all tokens.
        """
        return self.stage.expert_dispatch == "all_to_all"


class _Enter(torch.autograd.Function):
    """Identity forward, sum of gradients backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ReduceGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        ctx.group.all_reduce(gradient)
        return gradient, None


class _Leave(torch.autograd.Function):
    """Sum forward, identity backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ReduceGroup) -> Tensor:
        # A partial product or masked rows: fresh, and neither's backward reads its own output, so
        # the sum takes its place. `data` has a version of its own, so recomputation finds
        # products that anything else changed in place, as far as torch counts such changes.
        assert x.is_contiguous()
        total = x.data
        group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _gather_parts(x: Tensor, tp: TensorParallel, length: int) -> Tensor:
    """Gather [b, ceil(S / degree), h] of each rank to [b, S, h]."""
    parts = x.new_empty(tp.degree, *x.shape)
    tp.group.all_gather(parts, x.contiguous())
    whole = parts.transpose(0, 1).flatten(1, 2)[:, :length]
    # Contiguous: blocks with experts take a view of it.
    return whole.contiguous()


def _sum_own_part(x: Tensor, tp: TensorParallel, length: int) -> Tensor:
    """Sum the ranks' partial sums [b, S, h]; return this rank's [b, ceil(S / degree), h]."""
    by_rank = pad_sequence(x, tp.degree).unflatten(1, (tp.degree, -1)).transpose(0, 1)
    out = x.new_empty(by_rank.shape[1:])
    # A copy, since the group may change the parts, and autograd may still need `x`.
    parts = by_rank.clone(memory_format=torch.contiguous_format)
    tp.group.reduce_scatter(out, parts)
    return out


def _take_own_part(x: Tensor, tp: TensorParallel, length: int) -> Tensor:
    parts = pad_sequence(x, tp.degree).chunk(tp.degree, dim=1)
    # A copy, since a view would keep the whole.
    return parts[tp.rank].clone(memory_format=torch.contiguous_format)


def _place_own_part(x: Tensor, tp: TensorParallel, length: int) -> Tensor:
    """Return [b, S, h] of zeros with this rank's part [b, ceil(S / degree), h] at its place."""
    parts = [torch.zeros_like(x) for _ in range(tp.degree)]
    parts[tp.rank] = x
    return torch.cat(parts, dim=1)[:, :length].contiguous()


def pad_sequence(x: Tensor, parts: int) -> Tensor:
    """Return [b, S, ...] with zeros at the end of dimension 1, whose length `parts` divides."""
    more = -x.shape[1] % parts
    if not more:
        return x
    # F.pad takes two numbers for each dimension, from the last one on.
    dimensions_after = x.dim() - 2
    return F.pad(x, (0, 0) * dimensions_after + (0, more))


class _SequenceOperation(torch.autograd.Function):
    """Autograd function that applies one of the functions above forward, and another backward.

    A rank's results for padding are cut off wherever parts are gathered, so their gradient is zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, ahead: Any, back: Any) -> Tensor:
        ctx.tp = tp
        ctx.back = back
        ctx.length = tp.length.tokens
        out: Tensor = ahead(x, tp, ctx.length)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.tp, ctx.length), None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply_eagerly(function: Any, *arguments: Any, is_product: bool) -> Any:
    return arguments[0] if is_product and is_replaying() else function.apply(*arguments)


def communicate(function: Any, *arguments: Any, is_product: bool = False) -> Tensor:
    """Apply an autograd function that communicates, between the compiled parts of a block.

    is_product: of a matrix product, which selective recomputation keeps with its sum.
    """
    result: Tensor = _apply_eagerly(function, *arguments, is_product=is_product)
    return result


def enter(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Pass a whole tensor, or a part of the sequence, into a part of the model that is cut."""
    if tp is None or tp.degree == 1:
        return x
    if tp.cuts_sequence:
        return gather_sequence(x, tp)
    return communicate(_Enter, x, tp.group)


def leave(x: Tensor, tp: TensorParallel | None, *, is_product: bool = True) -> Tensor:
    """Sum the partial sums that leave a cut part of the model; is_product: see `communicate`."""
    if tp is None or tp.degree == 1:
        return x
    if tp.cuts_sequence:
        return reduce_sequence(x, tp)
    return communicate(_Leave, x, tp.group, is_product=is_product)


def gather_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather the ranks' parts of the sequence; each rank computes a part of the gradient."""
    return communicate(_SequenceOperation, x, tp, _gather_parts, _sum_own_part)


def reduce_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum the ranks' partial sums, and return this rank's part of the sequence."""
    return communicate(_SequenceOperation, x, tp, _sum_own_part, _gather_parts)


def own_part(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's part of hidden states that are whole and equal on every rank."""
    return communicate(_SequenceOperation, x, tp, _take_own_part, _gather_parts)


def own_part_alone(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's part of what every rank computed; each has a part of the gradient."""
    return communicate(_SequenceOperation, x, tp, _take_own_part, _place_own_part)


def whole_of_parts(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather the ranks' parts of the sequence; every rank computes the same with the whole."""
    return communicate(_SequenceOperation, x, tp, _gather_parts, _take_own_part)


def split_sequence(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Return this rank's part of the whole hidden states that enter a stage."""
    if tp is None or not tp.cuts_sequence:
        return x
    return own_part(x, tp)


def join_sequence(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Make the hidden states that leave a stage whole again, and equal on every rank."""
    if tp is None or not tp.cuts_sequence:
        return x
    return whole_of_parts(x, tp)


class RowParallel(nn.Module):
    """Linear map whose inputs are cut: it sums partial products, then adds the bias once.

    Holds `weight` (and `bias`) under the names of the module that it replaces: nn.Linear's (out,
    in) or Conv1D's (in, out).
    """

    def __init__(self, original: nn.Module, tp: TensorParallel) -> None:
        super().__init__()
        self.transposed = isinstance(original, Conv1D)
        self.tp = tp
        self.weight: nn.Parameter = original._parameters["weight"]  # type: ignore[assignment]
        self.bias: nn.Parameter | None = original._parameters.get("bias")
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        partial = x @ weight if self.transposed else self.product(x, weight)
        total = leave(partial, self.tp)
        return total if self.bias is None else total + self.bias


class _LinearByProduct(nn.Linear):
    product: Callable[[Tensor, Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        product = self.product(input, self.weight)
        return product if self.bias is None else product + self.bias


def set_product(module: nn.Module, product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let an nn.Linear, or a module with a `product` of x and its weight, compute this one."""
    if type(module) is nn.Linear:
        module.__class__ = _LinearByProduct
    module.__dict__["product"] = product


class _SumBoth(torch.autograd.Function):
    """Sum forward and backward: each rank uses the sum for its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ReduceGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(gradient)
        return gradient, None


class SplitNorm(nn.Module):
    """RMS norm over a width that is cut; holds this rank's slice of `weight`.

    The mean of squares is taken over the whole group, one fp32 number a token.
    """

    def __init__(self, original: nn.Module, tp: TensorParallel) -> None:
        super().__init__()
        self.weight: nn.Parameter = original._parameters["weight"]  # type: ignore[assignment]
        self.epsilon = float(original.variance_epsilon)  # type: ignore[arg-type]
        self.width = len(self.weight)
        """Width of the whole norm; `load_parameters` loads the slice later."""
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        own_squares = wide.square().sum(-1, keepdim=True)
        squares = communicate(_SumBoth, own_squares, self.tp.group)
        normalised = wide * torch.rsqrt(squares / self.width + self.epsilon)
        return (self.weight * normalised).to(x.dtype)


class VocabularyEmbedding(nn.Module):
    """Embedding of which this rank holds the rows from `start`.

    Tokens of other ranks give zeros, and the sum over ranks is whole.
    """

    def __init__(self, original: nn.Module, tp: TensorParallel | None, start: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = original._parameters["weight"]  # type: ignore[assignment]
        self.tp = tp
        self.start = start
        self.padding_idx: int | None = getattr(original, "padding_idx", None)

    def forward(self, tokens: Tensor) -> Tensor:
        return leave(self.own_rows(tokens, self.weight), self.tp)

    def own_rows(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return the rows of `tokens` in a table of this rank's tokens; zeros for other tokens."""
        local = tokens - self.start
        outside = (local < 0) | (local >= len(table))
        rows = F.embedding(local.masked_fill(outside, 0), table)
        if self.padding_idx is not None:
            # As nn.Embedding: the padding token has its row's values but teaches the row nothing.
            is_padding = (tokens == self.padding_idx).unsqueeze(-1)
            rows = torch.where(is_padding, rows.detach(), rows)
        return rows.masked_fill(outside.unsqueeze(-1), 0.0)
