"""Tensor parallelism on plain local tensors: Megatron-LM's f and g (Shoeybi et al., 2019, section 3) and a vocabulary split in parts.

Hidden states are whole and equal on every rank of the group, before and after each block; only what lies inside attention and MLP is cut.
Every rank of a group calls these in the same order; each blocks until its all-reduce is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class ReduceGroup(Protocol):
    """What tensor parallelism needs of a group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the group, in place; blocks."""
        ...

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Elementwise maximum over the group, in place; blocks."""
        ...


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a tensor-parallel group."""

    group: ReduceGroup
    rank: int
    degree: int


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
        # A partial product or masked rows: fresh, and neither's backward reads its own output, so the sum takes its place.
        assert x.is_contiguous()
        group.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def enter(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Where a whole tensor enters a part that is cut."""
    return x if tp is None or tp.degree == 1 else _Enter.apply(x, tp.group)


def leave(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Where partial sums leave a part that is cut."""
    return x if tp is None or tp.degree == 1 else _Leave.apply(x, tp.group)


class RowParallel(nn.Module):
    """A linear map whose inputs are cut: partial products are summed, then the bias is added once.

    Holds `weight` (and `bias`) under the names of the module that it replaces: nn.Linear's (out, in) or Conv1D's (in, out).
    """

    def __init__(self, original: nn.Module, tp: TensorParallel) -> None:
        super().__init__()
        self.transposed = isinstance(original, Conv1D)
        self.tp = tp
        self.weight: nn.Parameter = original._parameters["weight"]  # type: ignore[assignment]
        self.bias: nn.Parameter | None = original._parameters.get("bias")

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        partial = x @ weight if self.transposed else F.linear(x, weight)
        total = leave(partial, self.tp)
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding of which this rank holds rows from `start`: others' tokens give zeros, the sum is whole."""

    def __init__(self, original: nn.Module, tp: TensorParallel, start: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = original._parameters["weight"]  # type: ignore[assignment]
        self.tp = tp
        self.start = start
        self.padding_idx: int | None = getattr(original, "padding_idx", None)

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        outside = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(outside, 0), self.weight)
        if self.padding_idx is not None:
            # As nn.Embedding: the padding token has its row's values but teaches the row nothing.
            rows = torch.where((tokens == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        return leave(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.tp)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Sum of cross entropy over rows whose logits are cut along the vocabulary; equal on every rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, group: ReduceGroup) -> Tensor:
        highest = logits.amax(dim=-1)
        group.all_reduce_max(highest)
        shifted = logits - highest.unsqueeze(-1)
        local = targets - start
        mine = (local >= 0) & (local < logits.shape[-1])
        index = local.masked_fill(~mine, 0).unsqueeze(-1)
        sums = torch.stack([shifted.exp().sum(-1), shifted.gather(-1, index).squeeze(-1).masked_fill(~mine, 0.0)])
        group.all_reduce(sums)
        probabilities = shifted.exp_().div_(sums[0].unsqueeze(-1))
        counted = targets >= 0
        ctx.save_for_backward(probabilities, index, mine, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, mine, counted = ctx.saved_tensors
        probabilities.scatter_add_(-1, index, -mine.unsqueeze(-1).to(probabilities.dtype))
        return probabilities * counted.unsqueeze(-1) * gradients[0], None, None, None


def cross_entropy_sum(logits: Tensor, targets: Tensor, tp: TensorParallel | None, start: int) -> Tensor:
    """Sum over positions of the cross entropy, fp32; positions with target -100 count nothing.

    logits: [..., V_local] of vocabulary rows from `start`; targets: [...] int64. Equal on every rank of the group.
    """
    flat, flat_targets = logits.float().flatten(0, -2), targets.flatten()
    if tp is None or tp.degree == 1:
        return F.cross_entropy(flat, flat_targets, ignore_index=-100, reduction="sum")
    return _VocabularyCrossEntropy.apply(flat, flat_targets, start, tp.group)
