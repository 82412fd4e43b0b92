"""Collectives on uneven parts, and their gradient duals as autograd functions. Built on what `autohet.runtime.groups.Group` offers, since
gloo refuses uneven gathers; parts may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

TAG = 41
"""Of messages between two ranks; they follow each other in order."""
Lengths = Sequence[int]


class Collectives(Protocol):
    """What an SPMD program needs of a group. Every rank calls the same in the same order; each call blocks, with the group's deadline."""

    rank: int
    size: int
    members: tuple[str, ...]

    def all_reduce(self, tensor: Tensor) -> None: ...

    def all_gather(self, out: Tensor, part: Tensor) -> None: ...

    def send(self, tensor: Tensor, to: str, tag: int) -> Any: ...

    def recv(self, tensor: Tensor, source: str, tag: int) -> Any: ...

    def wait_on_stream(self, work: Any) -> None: ...

    def start_all_reduce(self, tensor: Tensor) -> Any: ...

    def wait_on_host(self, work: Any) -> None: ...


def _exchanged(group: Collectives, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Part j goes to rank j; what rank j sends arrives in received[j]. Empty ones are not sent."""
    works, me = [], group.rank
    for away in range(1, group.size):
        source, target = (me - away) % group.size, (me + away) % group.size
        if received[source].numel():
            works.append(group.recv(received[source], group.members[source], TAG))
        if parts[target].numel():
            works.append(group.send(parts[target], group.members[target], TAG))
    for work in works:
        group.wait_on_stream(work)
    received[me].copy_(parts[me])


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, of a type that groups can send."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def gathered(group: Collectives, local: Tensor, dim: int, lengths: Lengths, variant: str) -> Tensor:
    """All parts along `dim`. padded: one all-gather of parts as long as the longest; grouped: each rank's part to all others."""
    part = _plain(local.movedim(dim, 0))
    rest = part.shape[1:]
    if variant == "padded":
        padded = part.new_zeros((max(lengths), *rest))
        padded[: len(part)] = part
        out = part.new_empty((group.size, max(lengths), *rest))
        group.all_gather(out, padded)
        whole = torch.cat([out[rank, :length] for rank, length in enumerate(lengths)])
    else:
        received = [part.new_empty((length, *rest)) for length in lengths]
        _exchanged(group, [part] * group.size, received)
        whole = torch.cat(received)
    return whole.view(local.dtype).movedim(0, dim)


def scattered_sum(group: Collectives, whole: Tensor, dim: int, lengths: Lengths, variant: str) -> Tensor:
    """This rank's part along `dim` of the sum over ranks, added in order of ranks. padded: parts as long as the longest."""
    moved = _plain(whole.movedim(dim, 0))
    parts = list(moved.split(list(lengths)))
    mine = lengths[group.rank]
    if variant == "padded":
        longest = max(lengths)
        parts = [torch.cat([part, part.new_zeros((longest - len(part), *part.shape[1:]))]) for part in parts]
        mine = longest
    received = [moved.new_empty((mine, *moved.shape[1:])) for _ in range(group.size)]
    _exchanged(group, [part.contiguous() for part in parts], received)
    total = torch.stack(received).sum(0, dtype=moved.dtype)[: lengths[group.rank]]
    return total.view(whole.dtype).movedim(0, dim)


def transposed(group: Collectives, local: Tensor, source: int, target: int, before: Lengths, after: Lengths) -> Tensor:
    """From parts along `source` (lengths `before`) to parts along `target` (lengths `after`)."""
    plain = _plain(local)
    parts = [part.contiguous() for part in plain.split(list(after), dim=target)]
    shape = list(plain.shape)
    shape[target] = after[group.rank]
    received = []
    for length in before:
        shape[source] = length
        received.append(plain.new_empty(shape))
    _exchanged(group, parts, received)
    return torch.cat(received, dim=source).view(local.dtype)


def own_part(tensor: Tensor, dim: int, lengths: Lengths, rank: int) -> Tensor:
    """A rank's part of a whole tensor along `dim`."""
    return tensor.narrow(dim, sum(lengths[:rank]), lengths[rank])


def summed(group: Collectives, tensor: Tensor) -> Tensor:
    """The sum over ranks."""
    total = _plain(tensor).clone()
    group.all_reduce(total)
    return total.view(tensor.dtype)


class _Dual(torch.autograd.Function):
    """A conversion whose backward is its gradient dual."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.dual = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.dual(gradients[0]), None, None


def all_gather(group: Collectives, tensor: Tensor, dim: int, lengths: Lengths, variant: str) -> Tensor:
    return _apply(
        tensor,
        lambda x: gathered(group, x, dim, lengths, variant),
        lambda g: scattered_sum(group, g, dim, lengths, variant),
    )


def reduce_scatter(group: Collectives, tensor: Tensor, dim: int, lengths: Lengths, variant: str) -> Tensor:
    return _apply(
        tensor,
        lambda x: scattered_sum(group, x, dim, lengths, variant),
        lambda g: gathered(group, g, dim, lengths, variant),
    )


def all_reduce(group: Collectives, tensor: Tensor) -> Tensor:
    return _apply(tensor, lambda x: summed(group, x), lambda g: summed(group, g))


def all_to_all(group: Collectives, tensor: Tensor, source: int, target: int, before: Lengths, after: Lengths) -> Tensor:
    return _apply(
        tensor,
        lambda x: transposed(group, x, source, target, before, after),
        lambda g: transposed(group, g, target, source, after, before),
    )


def mask(group: Collectives, tensor: Tensor) -> Tensor:
    """The first rank's copy; zeros elsewhere."""
    return tensor if group.rank == 0 else _apply(tensor, torch.zeros_like, torch.zeros_like)


def _apply(tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Dual.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _FactoredLinear(torch.autograd.Function):
    """y = x W^T + b on a part of the rows. Backward gathers x and the gradient of y, the sufficient factors, and computes the whole
    gradients of W and b on every rank (Xie et al., "Lighter-communication distributed machine learning via sufficient factor
    broadcasting", UAI 2016)."""

    @staticmethod
    def forward(ctx: Any, group: Collectives, dim: int, lengths: Lengths, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.place = group, dim, lengths
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        group, dim, lengths = ctx.place
        every_x = gathered(group, x, dim, lengths, "padded").flatten(0, -2)
        every_gradient = gathered(group, gradient, dim, lengths, "padded").flatten(0, -2)
        bias = every_gradient.sum(0) if ctx.needs_input_grad[5] else None
        return None, None, None, gradient @ weight, every_gradient.mT @ every_x, bias


def factored_linear(group: Collectives, dim: int, lengths: Lengths, tensors: Sequence[Tensor]) -> Tensor:
    """`tensors`: x, weight and perhaps bias."""
    bias = tensors[2] if len(tensors) > 2 else None
    result: Tensor = _FactoredLinear.apply(group, dim, lengths, tensors[0], tensors[1], bias)  # type: ignore[no-untyped-call]
    return result


class _VocabularyLoss(torch.autograd.Function):
    """Sum of cross entropies where each rank has some of the classes; partial: the first rank adds the normalizers (as Megatron-LM's
    vocabulary-parallel cross entropy)."""

    @staticmethod
    def forward(ctx: Any, group: Collectives, offset: int, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        counts = targets != ignored
        highest = logits.max(-1).values if logits.shape[1] else logits.new_full((len(logits),), float("-inf"))
        every = logits.new_empty((group.size, len(logits)))
        group.all_gather(every, highest.contiguous())
        shifted = logits - every.max(0).values[:, None]
        total = summed(group, shifted.exp().sum(-1))
        local = targets - offset
        mine = counts & (local >= 0) & (local < logits.shape[1])
        rows = mine.nonzero().flatten()
        ctx.save_for_backward(shifted.exp() / total[:, None] * counts[:, None], rows, local[rows])
        loss = -shifted[rows, local[rows]].sum()
        return loss + (total.log() * counts).sum() if group.rank == 0 else loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, rows, columns = ctx.saved_tensors
        found = probabilities.clone()
        found[rows, columns] -= 1
        return None, None, found * gradients[0], None, None


def vocabulary_loss(group: Collectives, offset: int, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Partial sum of the cross entropies of logits whose classes begin at `offset`."""
    result: Tensor = _VocabularyLoss.apply(group, offset, logits, targets, ignored)  # type: ignore[no-untyped-call]
    return result
