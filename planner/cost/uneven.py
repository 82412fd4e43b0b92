"""Tensor-parallel groups of unlike GPUs, or of a number that is no power of two: the parts of each GPU, and what layers take there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.cluster import NodeType
from planner.cost.layer_costs import Floats, LayerCosts
from planner.cost.stage_costs import spread_tp_s
from planner.plan import TensorShare

if TYPE_CHECKING:
    from planner.cost.model import CostModel

ALIKE = 1e-3  # of a stage's seconds: for less its shares are neither cut finer nor changed, which moves state


@dataclass(frozen=True, slots=True)
class UnevenGroup:
    """GPUs of these node types, equal ones side by side, and the parts of each (`Stage.tp_shares`), by their speeds. GPUs of one type lie
    on one node."""

    kinds: tuple[NodeType, ...]
    shares: tuple[int, ...]

    @property
    def nodes(self) -> tuple[NodeType, ...]:
        """Its nodes."""
        return tuple(dict.fromkeys(self.kinds))


def whole_shares(by_parts: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Parts of each rank, one at least, with which the slowest ends earliest, of as few parts as are as quick. by_parts: of each rank the
    seconds with one part of the finest, two and so on up to all, never falling, infinite where it may not have so many. Empty where none
    may be."""
    finest = len(by_parts[0])
    numbers = (2**i for i in range(finest.bit_length()) if len(by_parts) <= 2**i)
    found = [(shares, slowest_s(by_parts, shares)) for shares in (_shares(by_parts, parts) for parts in numbers)]
    best_s = min((seconds for _, seconds in found), default=math.inf)
    if not math.isfinite(best_s):
        return ()
    return next(shares for shares, seconds in found if seconds <= (1 + ALIKE) * best_s)


def _shares(by_parts: Sequence[Sequence[float]], parts: int) -> tuple[int, ...]:
    """Of so many parts, each next one where it ends first."""
    ranks, each = range(len(by_parts)), len(by_parts[0]) // parts
    shares = [1] * len(by_parts)
    for _ in range(parts - len(by_parts)):
        shares[min(ranks, key=lambda rank: by_parts[rank][(shares[rank] + 1) * each - 1])] += 1
    return tuple(shares)


def slowest_s(by_parts: Sequence[Sequence[float]], shares: Sequence[int]) -> float:
    """Seconds of the slowest rank with these shares."""
    each = len(by_parts[0]) // sum(shares)
    return max(seconds[share * each - 1] for seconds, share in zip(by_parts, shares, strict=True))


def uneven_group(cost: "CostModel", kinds: tuple[NodeType, ...], microbatch: int) -> UnevenGroup | None:
    """With the shares by which the whole model takes least; None where some GPU would get none, or all as much."""
    parts = [TensorShare(0, k, cost.spec.max_tp_degree) for k in range(1, cost.spec.max_tp_degree + 1)]
    seconds = {kind: [_whole_s(cost, kind, len(kinds), microbatch, part) for part in parts] for kind in kinds}
    shares = whole_shares([seconds[kind] for kind in kinds])
    return UnevenGroup(kinds, shares) if len(set(shares)) > 1 else None


def _whole_s(
    cost: "CostModel", kind: NodeType, tp_degree: int, microbatch: int, share: TensorShare | None = None
) -> float:
    costs = cost.layer_costs(kind, tp_degree, microbatch, share)
    return float(costs.forward_s.sum() + costs.backward_s.sum())


def group_costs(cost: "CostModel", group: UnevenGroup, microbatch: int) -> LayerCosts:
    """Of each layer the seconds of the slowest GPU; the bytes of the fullest, in proportion to the room of the GPU that has least."""
    first = [sum(group.shares[:rank]) for rank in range(len(group.shares))]
    ranks = [
        cost.layer_costs(kind, len(group.kinds), microbatch, TensorShare(begin, begin + share, sum(group.shares)))
        for kind, share, begin in zip(group.kinds, group.shares, first, strict=True)
    ]
    room = [rank.limit_bytes - rank.fixed_bytes for rank in ranks]
    scales = [min(room) / each for each in room]
    spread = np.zeros_like(ranks[0].forward_s)
    members = [(kind.name, kind) for kind in group.kinds]
    spread[1:-1] = spread_tp_s(cost.links, members, cost.activation_message_bytes(microbatch))

    def most(name: str, scaled: bool = False) -> Floats:
        factors = scales if scaled else [1.0] * len(ranks)
        return np.asarray(
            np.max([factor * getattr(rank, name) for factor, rank in zip(factors, ranks, strict=True)], axis=0)
        )

    return replace(
        ranks[room.index(min(room))], forward_s=most("forward_s") + spread, backward_s=most("backward_s") + spread,
        update_s=most("update_s"), sync_bytes=most("sync_bytes"), state_bytes=most("state_bytes", True),
        activation_bytes=most("activation_bytes", True), peak_bytes=most("peak_bytes", True),
    )  # fmt: skip


def gain(cost: "CostModel", group: UnevenGroup, microbatch: int) -> float:
    """How many times faster than any even part of it a group does the whole model."""
    costs = group_costs(cost, group, microbatch)
    even = []
    for kind in group.nodes:
        degree = 2 ** int(math.log2(min(group.kinds.count(kind), cost.spec.max_tp_degree)))
        even.append(_whole_s(cost, kind, degree, microbatch))
    return min(even) / float(costs.forward_s.sum() + costs.backward_s.sum())
