"""Expert parallelism with all-to-all: each rank routes its tokens and sends them to their experts.

A rank has an equal part of each sequence (`TokenPart`) at the input of a block with experts: the
part that it has anyway in a sequence-parallel stage, else its slice of the whole hidden states. It
routes these tokens alone and sends each one once to every rank that owns one of its experts, with
the indices and weights of its experts. The owner applies the weights, adds up its experts' outputs
and returns one row (GShard, Lepikhin et al. 2020, section 3.2, without its capacity: no token is
dropped). Experts stay where they are without all-to-all, so state does not depend on the way.

Every gradient of a router is a part of the sum over the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.tensor_parallel import (
    ReduceGroup,
    TensorParallel,
    gather_sequence,
    own_part,
    reduce_sequence,
    whole_of_parts,
)


@dataclass(frozen=True)
class TokenPart:
    """Part of each sequence that a rank routes; the last parts may end with padding."""

    tp: TensorParallel

    @property
    def width(self) -> int:
        """Tokens of each sequence on a rank, with padding."""
        return -(-self.tp.length.tokens // self.tp.degree)

    @property
    def num_real(self) -> int:
        """Tokens of each sequence on this rank, without padding."""
        from_here_on = self.tp.length.tokens - self.tp.rank * self.width
        return min(max(from_here_on, 0), self.width)

    def real(self, rows: Tensor) -> Tensor:
        """Return [b, num_real, ...] of the rows [b * width, ...] of all tokens."""
        by_sequence: Tensor = rows.unflatten(0, (-1, self.width))
        return by_sequence[:, : self.num_real]

    def is_real(self, num_rows: int, device: torch.device) -> Tensor:
        """Return bool [num_rows]: the row of a token [b * width] is no padding."""
        places = torch.arange(num_rows, device=device) % self.width
        return places < self.num_real


@dataclass(frozen=True)
class _Routes:
    """Rows between a rank's tokens and the owners of their experts.

    tokens: int64 [P], the token of each sent row; rows are in the order of receiving ranks. places:
    int64 [N, ranks], row of a token for a rank, or P if none is sent. sent, received: rows by rank.
    """

    group: ReduceGroup
    tokens: Tensor
    places: Tensor
    sent: Sequence[int]
    received: Sequence[int]

    def send(self, rows: Tensor) -> Tensor:
        """Send the rows of tokens [N, w] to their owners; return the received [R, w]."""
        given = rows[self.tokens]
        out = rows.new_empty(sum(self.received), rows.shape[1])
        self.group.all_to_all(out, given, self.received, self.sent)
        return out

    def sum_back(self, rows: Tensor) -> Tensor:
        """Return the owners' rows [R, w] to their tokens, and sum them to [N, w] in rank order."""
        # The last row stays zero: it is that of ranks to which a token was not sent.
        back = rows.new_zeros(len(self.tokens) + 1, rows.shape[1])
        self.group.all_to_all(back[:-1], rows.contiguous(), self.sent, self.received)
        total = back[self.places[:, 0]]
        for rank in range(1, self.places.shape[1]):
            total += back[self.places[:, rank]]
        return total


def _routes(tp: TensorParallel, owners: Tensor) -> _Routes:
    """Agree with the group on the rows to send.

    owners: int64 [N, k], the rank that owns each chosen expert of each token.
    """
    num_tokens = len(owners)
    needed = torch.zeros(num_tokens, tp.degree, dtype=torch.bool, device=owners.device)
    needed.scatter_(1, owners, True)
    is_real = TokenPart(tp).is_real(num_tokens, owners.device)
    needed &= is_real.unsqueeze(1)
    sent, received = tp.group.exchange_counts(needed.sum(0))

    # Rows go out rank by rank, so a row's place is the number of rows before it in that order.
    by_rank = needed.T.contiguous()
    tokens = by_rank.nonzero()[:, 1]
    places = by_rank.flatten().cumsum(0).view_as(by_rank).T - 1
    places = places.masked_fill(~needed, sum(sent))
    return _Routes(tp.group, tokens, places, sent, received)


class _ToOwners(torch.autograd.Function):
    """Send hidden states [N, h] and routing [N, w] to the owners of the tokens' experts."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routing: Tensor, routes: _Routes) -> tuple[Tensor, ...]:
        ctx.routes = routes
        return routes.send(hidden), routes.send(routing)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        of_hidden, of_routing = gradients
        return ctx.routes.sum_back(of_hidden), ctx.routes.sum_back(of_routing), None


class _FromOwners(torch.autograd.Function):
    """Sum the owners' outputs [R, h] of each token to [N, h]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: _Routes) -> Tensor:
        ctx.routes = routes
        return routes.sum_back(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.routes.send(gradients[0]), None


class _Dispatch:
    """Hooks of one block's experts: tokens go to their owners before them, outputs back after."""

    def __init__(self, tp: TensorParallel, owner_by_expert: Sequence[int]) -> None:
        self._tp = tp
        self._owners = torch.tensor(owner_by_expert)
        self._routes: _Routes | None = None

    def before(
        self, _: nn.Module, args: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens that other ranks send here, with indices and weights of experts.

        Indices of other ranks' experts are among them. Without tokens there is a row for none of
        this rank's experts, since grouped products need one.
        """
        hidden, index, weights = args
        self._owners = self._owners.to(index.device)
        routes = _routes(self._tp, self._owners[index])
        self._routes = routes
        # Indices and weights in one message: fp32 holds indices below 2**24 exactly.
        routing = torch.cat([index.float(), weights.float()], -1)
        outputs: Any = _ToOwners.apply(hidden, routing, routes)  # type: ignore[no-untyped-call]
        rows, theirs = outputs
        if not len(rows):
            rows = F.pad(rows, (0, 0, 0, 1))
            theirs = F.pad(theirs, (0, 0, 0, 1), value=-1.0)
        used = index.shape[-1]
        chosen = theirs[:, :used].detach().long()
        their_weights = theirs[:, used:].to(weights.dtype)
        return rows, chosen, their_weights

    def after(self, _: nn.Module, args: Any, out: Tensor) -> Tensor:
        routes = self._routes
        assert routes is not None
        self._routes = None
        # Without the row that `before` adds if no token came.
        own = out[: sum(routes.received)]
        return apply(_FromOwners, own, routes)


def send_tokens(experts: nn.Module, tp: TensorParallel, owner_by_expert: Sequence[int]) -> None:
    """Let the library's module of a rank's experts compute the tokens that all ranks send to them.

    It takes this rank's tokens [N, h] with the indices [N, k] of their experts, and returns [N, h].
    Call it after `experts.keep_own_experts`, whose hooks see the received tokens.
    """
    dispatch = _Dispatch(tp, owner_by_expert)
    experts.register_forward_pre_hook(dispatch.before, prepend=True)
    experts.register_forward_hook(dispatch.after)


def route_own_part(block: nn.Module, tp: TensorParallel) -> None:
    """Let a block with experts see this rank's part of each sequence; its output is whole again.

    No-op in a sequence-parallel stage, which has such parts already. The block may have several
    outputs, of which the first are hidden states.
    """
    if tp.cuts_sequence:
        return

    def before(_: nn.Module, args: Any) -> Any:
        hidden, *rest = args
        return own_part(hidden, tp), *rest

    def after(_: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            hidden, *rest = out
            return whole_of_parts(hidden, tp), *rest
        return whole_of_parts(out, tp)

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)


def share_all_tokens(shared: nn.Module, tp: TensorParallel) -> None:
    """Let shared experts, which are cut, see all tokens in a block that sees its rank's part."""

    def before(_: nn.Module, args: Any) -> Any:
        hidden, *rest = args
        return gather_sequence(hidden, tp), *rest

    shared.register_forward_pre_hook(before)
    shared.register_forward_hook(lambda _, args, out: reduce_sequence(out, tp))
