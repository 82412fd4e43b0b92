"""Cross entropy, and head and cross entropy fused, for some rows of logits at a time.

A vocabulary of 152k makes 1.24 GB of bf16 logits per sequence of 4,096 tokens, and the same amount
for their gradient. Here each chunk's logits are replaced by their gradient at once, so neither is
ever whole. The products are those of the head's forward and backward passes; none is computed
twice, and those of the weight's gradient add up in fp32. `F.cross_entropy` and
`F.linear_cross_entropy` count rows that pad a vocabulary, and sum in the compute dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.compilation import MAX_VARIANTS, can_compile
from autohet.runtime.models.layers.logits import UNCHANGED, LogitAdjustment
from autohet.runtime.models.layers.loss_terms import PLAIN, LossTerms
from autohet.runtime.models.layers.row_chunks import row_chunks, wide_zeros
from autohet.runtime.models.layers.tensor_parallel import ReduceGroup

CHUNK_ELEMENTS = 1 << 26
"""Logits at a time: 128 MiB in bf16, and large enough for products at full speed."""
MIN_COMPILED_ELEMENTS = 1_000_000
"""Least size of a head's weight that is compiled; smaller ones are tests, slowed by compiling."""
LossAndGradient = Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CutVocabulary:
    """This rank's rows of the head's weight.

    They begin at `start`, of `num_rows` in all, of which the first `num_tokens` belong to the
    vocabulary. Ranks may have unequal numbers of rows, but take equally many positions at a time,
    so that all of them call the sums of each chunk.
    """

    group: ReduceGroup
    degree: int
    start: int
    num_rows: int
    num_tokens: int

    def tokens_among(self, num_rows: int) -> int:
        """Return how many of this rank's rows belong to the vocabulary, if it has `num_rows`."""
        return min(max(self.num_tokens - self.start, 0), num_rows)


@dataclass(frozen=True)
class HeadFactors:
    """Factors of a head's logits: hidden @ weight.T, and with an adapter + low @ update.T.

    hidden: [..., h]; weight: [V, h]; low: [..., r], scaled; update: [V, r].
    """

    hidden: Tensor
    weight: Tensor
    low: Tensor | None = None
    update: Tensor | None = None

    def usable(self) -> tuple[Tensor | None, ...]:
        """Return the factors with one row for each position, without gradients in evaluation."""
        found: list[Tensor | None] = []
        for each in (self.hidden, self.weight, self.low, self.update):
            if each is not None and each.dim() > 2:
                each = each.flatten(0, -2)
            if each is not None and not torch.is_grad_enabled():
                # Autograd functions are told that a parameter needs a gradient in evaluation too.
                each = each.detach()
            found.append(each)
        return tuple(found)


def linear_cross_entropy_sum(
    factors: HeadFactors,
    targets: Tensor,
    vocabulary: int | CutVocabulary,
    terms: LossTerms = PLAIN,
    adjustment: LogitAdjustment = UNCHANGED,
) -> Tensor:
    """Return the sum of cross entropy of the adjusted logits over `targets`, an fp32 scalar.

    targets: [...] int64, -100 where a position counts nothing;
    vocabulary: its number of tokens, from which on rows of the weight pad it. Gradients are
    computed in the forward pass and scaled in the backward pass, which may run once.

    With a cut vocabulary the weight has this rank's rows, the sum is equal on all ranks of the
    group, and the gradients of `hidden` and `low` are this rank's parts of the sum.
    """
    cut, num_tokens = _own_part(vocabulary, len(factors.weight))
    return apply(
        _LinearCrossEntropy,
        *factors.usable(),
        targets.flatten(),
        num_tokens,
        terms,
        adjustment,
        cut,
    )


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    vocabulary: int | CutVocabulary,
    terms: LossTerms = PLAIN,
) -> Tensor:
    """Return the sum of cross entropy of logits [..., V] over `targets`, as the function above.

    The logits are never whole in fp32 if they come in another dtype.
    """
    cut, num_tokens = _own_part(vocabulary, logits.shape[-1])
    rows = logits.flatten(0, -2)
    return apply(_CrossEntropy, rows, targets.flatten(), num_tokens, terms, cut)


def _own_part(vocabulary: int | CutVocabulary, num_rows: int) -> tuple[CutVocabulary | None, int]:
    """Return the cut of a vocabulary, and how many of this rank's `num_rows` belong to it."""
    if isinstance(vocabulary, CutVocabulary):
        return vocabulary, vocabulary.tokens_among(num_rows)
    return None, vocabulary


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        num_tokens: int,
        terms: LossTerms,
        cut: CutVocabulary | None,
    ) -> Tensor:
        ctx.scale = terms.gradient_scale
        loss_and_gradient = _eager if cut is None else partial(_over_group, cut=cut)
        gradient = logits.clone()
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        size = max(1, _chunk_rows(logits.shape[-1], cut))
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            # It puts the gradient in the place of the logits.
            loss, _ = loss_and_gradient(
                gradient[rows], targets[rows], num_tokens, ctx.scale, terms=terms
            )
            total += loss
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(gradients[0] / ctx.scale), None, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor | None,
        update: Tensor | None,
        targets: Tensor,
        num_tokens: int,
        terms: LossTerms,
        adjustment: LogitAdjustment,
        cut: CutVocabulary | None,
    ) -> Tensor:
        ctx.scale = terms.gradient_scale
        loss_and_gradient = _way_of(weight, replace(terms, gradient_scale=1.0), cut)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight: Tensor | None = None
        of_low = torch.empty_like(low) if low is not None and ctx.needs_input_grad[2] else None
        of_update = None
        if update is not None and ctx.needs_input_grad[3]:
            of_update = wide_zeros(update)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        size = max(1, _chunk_rows(len(weight), cut))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = hidden[rows] @ weight.T
            if low is not None and update is not None:
                logits.addmm_(low[rows], update.T)
            slope: Tensor | float = 1.0
            if not adjustment.changes_nothing:
                logits = adjustment.compute(logits)
                slope = adjustment.derivative(logits)
            loss, gradient = loss_and_gradient(logits, targets[rows], num_tokens, ctx.scale)
            if not adjustment.changes_nothing:
                gradient.mul_(slope)
            total += loss
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[rows])
            if of_low is not None and update is not None:
                torch.mm(gradient, update, out=of_low[rows])
            if of_update is not None and low is not None:
                _add_product(of_update, gradient, low[rows])
            if not ctx.needs_input_grad[1]:
                continue
            if size >= len(hidden):
                of_weight = gradient.T @ hidden
                continue
            if of_weight is None:
                of_weight = wide_zeros(weight)
            _add_product(of_weight, gradient, hidden[rows])
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        if of_update is not None and update is not None:
            of_update = of_update.to(update.dtype)
        ctx.save_for_backward(of_hidden, of_weight, of_low, of_update)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0] / ctx.scale
        found = ctx.saved_tensors
        for each in found:
            if each is not None:
                each.mul_(scale)
        return *found, None, None, None, None, None


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Add gradient.T @ hidden, [V, h], to an fp32 total, some of its rows at a time."""
    if total.dtype == hidden.dtype:
        total.addmm_(gradient.T, hidden)
        return
    for part in row_chunks(total, CHUNK_ELEMENTS):
        total[part] += gradient[:, part].T @ hidden


def _chunk_rows(num_rows: int, cut: CutVocabulary | None) -> int:
    """Return the number of positions at a time: with a cut, equal on ranks of unequal rows."""
    if cut is None:
        return CHUNK_ELEMENTS // num_rows
    return CHUNK_ELEMENTS * cut.degree // cut.num_rows


def _way_of(weight: Tensor, terms: LossTerms, cut: CutVocabulary | None) -> LossAndGradient:
    if cut is not None:
        return partial(_over_group, terms=terms, cut=cut)
    if weight.numel() >= MIN_COMPILED_ELEMENTS and can_compile(weight.device.type):
        return _compile(terms)
    return partial(_eager, terms=terms)


def _over_group(
    logits: Tensor,
    targets: Tensor,
    num_tokens: int,
    scale: float,
    terms: LossTerms,
    cut: CutVocabulary,
) -> tuple[Tensor, Tensor]:
    """Compute this rank's columns like `_eager`; a few numbers of each position are reduced."""
    smoothing = terms.label_smoothing
    z_loss = terms.z_loss
    local = targets - cut.start
    counted = targets >= 0
    mine = (local >= 0) & (local < num_tokens)
    index = local.masked_fill(~mine, 0).unsqueeze(-1)
    gradient = logits[:, :num_tokens].float()
    highest = gradient.new_full((len(logits),), -torch.inf)
    if num_tokens:
        highest = gradient.amax(-1)
    cut.group.all_reduce_max(highest)
    # Sums over the vocabulary: of exponentials, of the target's logit alone, and of all logits.
    sums = gradient.new_zeros(3, len(logits))
    if num_tokens:
        gradient = gradient.sub_(highest.unsqueeze(-1))
        own_target = gradient.gather(-1, index).squeeze(-1)
        sums[1] = own_target.masked_fill(~mine, 0.0)
        if smoothing:
            sums[2] = gradient.sum(-1)
        gradient = gradient.exp_()
        sums[0] = gradient.sum(-1)
    cut.group.all_reduce(sums)
    of_target = sums[1]
    if smoothing:
        of_all = smoothing / cut.num_tokens * sums[2]
        of_target = (1.0 - smoothing) * of_target + of_all
    losses = sums[0].log() - of_target
    factor = 1.0 / sums[0]
    if z_loss:
        normaliser = sums[0].log() + highest
        losses = losses + z_loss * normaliser.square()
        factor = factor * (1.0 + 2.0 * z_loss * normaliser)
    if num_tokens:
        gradient = gradient.mul_(factor.unsqueeze(-1))
        if smoothing:
            gradient = gradient.sub_(smoothing / cut.num_tokens)
        at_target = (smoothing - 1.0) * mine.unsqueeze(-1).float()
        gradient.scatter_add_(-1, index, at_target)
        factor_of_row = counted.unsqueeze(-1) * scale
        logits[:, :num_tokens].copy_(gradient.mul_(factor_of_row))
    logits[:, num_tokens:] = 0.0
    return (losses * counted).sum(), logits


def _eager(
    logits: Tensor, targets: Tensor, num_tokens: int, scale: float, terms: LossTerms
) -> tuple[Tensor, Tensor]:
    """Return the fp32 sum of losses of rows of logits, and its scaled gradient in the logits'
    memory.
    """
    smoothing = terms.label_smoothing
    z_loss = terms.z_loss
    counted = targets >= 0
    index = targets.clamp_min(0).unsqueeze(-1)
    columns = logits[:, :num_tokens]
    gradient = columns.float()
    highest = gradient.amax(-1, keepdim=True)
    gradient = gradient.sub_(highest)
    of_target = gradient.gather(-1, index)
    if smoothing:
        of_all = smoothing * gradient.mean(-1, keepdim=True)
        of_target = (1.0 - smoothing) * of_target + of_all
    gradient = gradient.exp_()
    total = gradient.sum(-1, keepdim=True)
    losses = (total.log() - of_target).squeeze(-1)
    gradient = gradient.div_(total)
    if z_loss:
        normaliser = total.log() + highest
        losses = losses + z_loss * normaliser.square().squeeze(-1)
        gradient = gradient.mul_(1.0 + 2.0 * z_loss * normaliser)
    if smoothing:
        gradient = gradient.sub_(smoothing / num_tokens)
    at_target = torch.full_like(of_target, smoothing - 1.0)
    gradient.scatter_add_(-1, index, at_target)
    factor_of_row = counted.unsqueeze(-1) * scale
    columns.copy_(gradient.mul_(factor_of_row))
    logits[:, num_tokens:] = 0.0
    return (losses * counted).sum(), logits


@cache
def _compile(terms: LossTerms) -> LossAndGradient:
    """Return `_eager` compiled into few passes over the logits."""
    # torch's type hints lack this parameter
    compile_: Any = torch.compile
    compiled: LossAndGradient = compile_(partial(_eager, terms=terms), recompile_limit=MAX_VARIANTS)
    return compiled
