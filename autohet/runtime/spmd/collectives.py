"""Collectives on uneven parts, with their gradient duals as autograd functions.

They use the operations of `autohet.runtime.groups.Group`, since gloo refuses uneven gathers. Parts
may be empty.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.groups import Group
from autohet.runtime.models.layers.autograd import apply
from planner.spmd.layouts import TensorLayout, conversion_between

TAG = 41
"""Tag of messages between two ranks, which arrive in order."""
Lengths = Sequence[int]


def _exchange(group: Group, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Send part j to rank j and receive rank j's part in received[j]; empty parts are not sent."""
    works = []
    me = group.rank
    # In turns: each rank receives from one neighbour while it sends to the opposite one.
    for away in range(1, group.size):
        source = (me - away) % group.size
        target = (me + away) % group.size
        if received[source].numel():
            work = group.recv(received[source], group.members[source], TAG)
            works.append(work)
        if parts[target].numel():
            work = group.send(parts[target], group.members[target], TAG)
            works.append(work)
    for work in works:
        group.wait_on_stream(work)
    received[me].copy_(parts[me])


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous, in a type that groups can send."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return tensor


def gather_parts(group: Group, local: Tensor, dim: int, lengths: Lengths, variant: str) -> Tensor:
    """Gather all parts along `dim`.

    padded: one all-gather of parts as long as the longest; grouped: each rank sends its part to all
    others.
    """
    part = _plain(local.movedim(dim, 0))
    rest = part.shape[1:]
    if variant == "padded":
        longest = max(lengths)
        padded = part.new_zeros((longest, *rest))
        padded[: len(part)] = part
        out = part.new_empty((group.size, longest, *rest))
        group.all_gather(out, padded)
        received = [out[rank, :length] for rank, length in enumerate(lengths)]
    else:
        received = [part.new_empty((length, *rest)) for length in lengths]
        _exchange(group, [part] * group.size, received)
    whole = torch.cat(received)
    return whole.view(local.dtype).movedim(0, dim)


def reduce_parts(group: Group, whole: Tensor, dim: int, lengths: Lengths, variant: str) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks, added in order of ranks.

    padded: parts are as long as the longest.
    """
    moved = _plain(whole.movedim(dim, 0))
    rest = moved.shape[1:]
    parts = list(moved.split(list(lengths)))
    mine = lengths[group.rank]
    arriving = mine
    if variant == "padded":
        arriving = max(lengths)
        for rank, part in enumerate(parts):
            padding = part.new_zeros((arriving - len(part), *rest))
            parts[rank] = torch.cat([part, padding])
    received = [moved.new_empty((arriving, *rest)) for _ in range(group.size)]
    _exchange(group, [part.contiguous() for part in parts], received)
    # Without a dtype the sum of integers would be int64.
    total = torch.stack(received).sum(0, dtype=moved.dtype)
    own = total[:mine]
    return own.view(whole.dtype).movedim(0, dim)


def exchange_parts(
    group: Group, local: Tensor, source: int, target: int, before: Lengths, after: Lengths
) -> Tensor:
    """Convert parts along `source` (lengths `before`) to parts along `target` (lengths `after`)."""
    plain = _plain(local)
    views = plain.split(list(after), dim=target)
    parts = [view.contiguous() for view in views]
    shape = list(plain.shape)
    shape[target] = after[group.rank]
    received = []
    for length in before:
        shape[source] = length
        received.append(plain.new_empty(shape))
    _exchange(group, parts, received)
    return torch.cat(received, dim=source).view(local.dtype)


def sum_over_ranks(group: Group, tensor: Tensor) -> Tensor:
    """Return the sum over ranks."""
    total = _plain(tensor).clone()
    group.all_reduce(total)
    return total.view(tensor.dtype)


class _Dual(torch.autograd.Function):
    """Conversion whose backward is its gradient dual."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.dual = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.dual(gradients[0]), None, None


def convert(
    group: Group,
    tensor: Tensor,
    source: TensorLayout,
    target: TensorLayout,
    lengths: Callable[[int], Lengths],
    variant: str,
) -> Tensor:
    """Convert a tensor to another layout; its gradient returns by the dual conversion.

    lengths: returns each rank's length along a dimension of the tensor.
    """
    if conversion_between(source, target) == "slice":
        sizes = list(lengths(target.dim))
        parts: Sequence[Tensor] = tensor.split(sizes, target.dim)
        return parts[group.rank]

    def move(x: Tensor, source: TensorLayout, target: TensorLayout) -> Tensor:
        match conversion_between(source, target):
            case "all_gather":
                return gather_parts(group, x, source.dim, lengths(source.dim), variant)
            case "reduce_scatter":
                return reduce_parts(group, x, target.dim, lengths(target.dim), variant)
            case "all_reduce":
                return sum_over_ranks(group, x)
            case "all_to_all":
                return exchange_parts(
                    group, x, source.dim, target.dim, lengths(source.dim), lengths(target.dim)
                )
            case "mask":
                # A sum over ranks of which the first has everything.
                if group.rank == 0:
                    return x.clone()
                return torch.zeros_like(x)
        raise AssertionError(f"no instruction from {source} to {target}")

    return apply(
        _Dual,
        tensor,
        lambda x: move(x, source, target),
        lambda g: move(g, target.dual, source.dual),
    )


class FactoredLinear(torch.autograd.Function):
    """Linear map y = x W^T + b on a part of the rows, with gradients by sufficient factors.

    Backward gathers the sufficient factors, x and the gradient of y, and computes the whole
    gradients of W and b on every rank (Xie et al., "Lighter-communication distributed machine
    learning via sufficient factor broadcasting", UAI 2016).
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        dim: int,
        lengths: Lengths,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.place = group, dim, lengths
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (x, weight) = ctx.saved_tensors
        group, dim, lengths = ctx.place
        every_x = gather_parts(group, x, dim, lengths, "padded")
        every_x = every_x.flatten(0, -2)
        every_gradient = gather_parts(group, gradient, dim, lengths, "padded")
        every_gradient = every_gradient.flatten(0, -2)
        x_gradient = gradient @ weight
        weight_gradient = every_gradient.mT @ every_x
        bias_gradient = every_gradient.sum(0)
        # autograd wants a gradient for each argument that `forward` was given: with the bias or not
        has_bias = len(ctx.needs_input_grad) == 6
        if not has_bias:
            return None, None, None, x_gradient, weight_gradient
        return None, None, None, x_gradient, weight_gradient, bias_gradient


class VocabularyLoss(torch.autograd.Function):
    """Sum of cross entropies with the classes split over ranks; this rank's begin at `offset`.

    The result is a partial sum: the first rank adds the normalizers (as Megatron-LM's
    vocabulary-parallel cross entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, group: Group, offset: int, logits: Tensor, targets: Tensor, ignored: int
    ) -> Tensor:
        num_rows, num_classes = logits.shape
        if num_classes:
            highest = logits.max(-1).values
        else:
            highest = logits.new_full((num_rows,), float("-inf"))
        every = logits.new_empty((group.size, num_rows))
        group.all_gather(every, highest.contiguous())

        # Without the row's highest logit no exponential overflows.
        shifted = logits - every.max(0).values[:, None]
        total = sum_over_ranks(group, shifted.exp().sum(-1))

        counts = targets != ignored
        local = targets - offset
        mine = counts & (local >= 0) & (local < num_classes)
        rows = mine.nonzero().flatten()
        columns = local[rows]
        probabilities = shifted.exp() / total[:, None]
        probabilities = probabilities * counts[:, None]
        ctx.save_for_backward(probabilities, rows, columns)
        loss = -shifted[rows, columns].sum()
        if group.rank == 0:
            return loss + (total.log() * counts).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, rows, columns = ctx.saved_tensors
        found = probabilities.clone()
        found[rows, columns] -= 1
        return None, None, found * gradients[0], None, None
