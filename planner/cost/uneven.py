"""Tensor-parallel groups of different GPUs, or of a number that is no power of two.

The module gives the parts of each GPU, and the costs of layers there.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from planner.cluster import NodeType
from planner.cost.layer_costs import Floats, LayerCosts
from planner.cost.stage_costs import spread_tp_s
from planner.formats import shared_format
from planner.plan import TensorShare

if TYPE_CHECKING:
    from planner.cost.model import CostModel

# of a stage's seconds: for less its shares are neither cut finer nor changed, which moves state
ALIKE = 1e-3


@dataclass(frozen=True, slots=True)
class UnevenGroup:
    """Node types of a group's GPUs, equal ones next to each other, and the parts of each GPU.

    shares: parts by speed (`Stage.tp_shares`). GPUs of one type are on one node.
    """

    kinds: tuple[NodeType, ...]
    shares: tuple[int, ...]

    @property
    def nodes(self) -> tuple[NodeType, ...]:
        """Node types of the group's nodes, one entry for each node."""
        return tuple(dict.fromkeys(self.kinds))


Seconds = Callable[[int, TensorShare], float]
"""Seconds of a rank of a stage with a share; infinite if it may not have that share."""


def whole_shares(seconds: Seconds, ranks: int, finest: int, units: int = 0) -> tuple[int, ...]:
    """Return the number of parts of each rank with which the slowest rank ends earliest.

    Each rank gets one part at least; the division has as few parts as are as fast. finest: parts at
    most. units: number into which keys and values are cut. A rank holds each unit that its share
    overlaps. Among equally fast divisions, the rank with most units has the fewest. Empty if no
    division is allowed.
    """

    def load(shares: tuple[int, ...]) -> list[tuple[float, int]]:
        loads = []
        for rank, share in enumerate(placed(shares)):
            loads.append((seconds(rank, share), len(share.units(units))))
        return sorted(loads, reverse=True)

    found = []
    for parts in (2**i for i in range(finest.bit_length())):
        if parts >= ranks:
            lightest = min(_divisions(parts, ranks), key=load)
            found.append((lightest, slowest_s(seconds, lightest)))
    best_s = min((slowest for _, slowest in found), default=math.inf)
    if not math.isfinite(best_s):
        return ()
    return next(shares for shares, slowest in found if slowest <= (1 + ALIKE) * best_s)


@cache
def _divisions(parts: int, ranks: int) -> list[tuple[int, ...]]:
    """Return all divisions of `parts` among ranks that each have one part at least.

    Those with most parts for the first ranks come first.
    """
    divisions = []
    for inner in itertools.combinations(range(1, parts), ranks - 1):
        ends = itertools.pairwise((0, *inner, parts))
        divisions.append(tuple(end - begin for begin, end in ends))
    return sorted(divisions, reverse=True)


def placed(shares: Sequence[int]) -> list[TensorShare]:
    """Return the share of each rank: consecutive ranges of parts, in rank order."""
    ends = list(itertools.accumulate(shares))
    return [
        TensorShare(end - share, end, ends[-1]) for share, end in zip(shares, ends, strict=True)
    ]


def slowest_s(seconds: Seconds, shares: Sequence[int]) -> float:
    """Return seconds of the slowest rank with these shares."""
    return max(seconds(rank, share) for rank, share in enumerate(placed(shares)))


def uneven_group(
    cost: "CostModel", kinds: tuple[NodeType, ...], microbatch: int
) -> UnevenGroup | None:
    """Return the group with the shares by which the whole model takes least time.

    None if some GPU would get no part, or if all would get equal parts.
    """
    finest = cost.spec.max_tp_degree

    def seconds(rank: int, share: TensorShare) -> float:
        alone = TensorShare(
            0, (share.end - share.first) * finest // share.of, finest
        )  # where it lies takes no time
        return _whole_s(cost, kinds[rank], len(kinds), microbatch, alone)

    shares = whole_shares(seconds, len(kinds), finest, cost.spec.key_value_units)
    return UnevenGroup(kinds, shares) if len(set(shares)) > 1 else None


def _whole_s(
    cost: "CostModel",
    kind: NodeType,
    tp_degree: int,
    microbatch: int,
    share: TensorShare | None = None,
) -> float:
    costs = cost.layers.costs(kind, tp_degree, microbatch, share)
    return float(costs.forward_s.sum() + costs.backward_s.sum())


def group_costs(cost: "CostModel", group: UnevenGroup, microbatch: int) -> LayerCosts:
    """Return each layer's costs on the group.

    Seconds: the slowest GPU's. For a group on one node, whose bound is proved: the least with which
    some GPU does the layer, whatever the shares. Bytes: the fullest GPU's, scaled to the room of
    the GPU with least room.
    """
    pairs = zip(group.kinds, placed(group.shares), strict=True)
    ranks = [cost.layers.costs(kind, len(group.kinds), microbatch, share) for kind, share in pairs]
    room = [rank.limit_bytes - rank.fixed_bytes for rank in ranks]
    scales = [min(room) / each for each in room]
    spread = np.zeros_like(ranks[0].forward_s)
    members = [(kind.name, kind) for kind in group.kinds]
    formats = cost.stage_formats
    compute = shared_format({k.gpu_type: formats.of_type(k.gpu_type) for k in group.kinds})
    num_bytes = formats.inside_bytes(microbatch, compute)
    spread[1:-1] = spread_tp_s(cost.links, members, num_bytes)

    def most(name: str, scaled: bool = False) -> Floats:
        factors = scales if scaled else [1.0] * len(ranks)
        return np.asarray(
            np.max(
                [factor * getattr(rank, name) for factor, rank in zip(factors, ranks, strict=True)],
                axis=0,
            )
        )

    forward_s = most("forward_s") + spread
    backward_s = most("backward_s") + spread
    if len(group.nodes) == 1:
        forward_s, backward_s = _least_s(cost, group.kinds, microbatch)
    return replace(
        ranks[room.index(min(room))],
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=most("update_s"),
        sync_bytes=most("sync_bytes"),
        state_bytes=most("state_bytes", True),
        activation_bytes=most("activation_bytes", True),
        peak_bytes=most("peak_bytes", True),
    )


def _least_s(
    cost: "CostModel", kinds: tuple[NodeType, ...], microbatch: int
) -> tuple[Floats, Floats]:
    """Return (layers,) forward and backward seconds of GPUs of one type.

    Some GPU has an even part at least; at most, it leaves one part to each other GPU.
    """
    finest, ranks = cost.spec.max_tp_degree, len(kinds)
    parts = (TensorShare(0, k, finest) for k in range(-(-finest // ranks), finest - ranks + 2))
    costs = [cost.layers.costs(kinds[0], ranks, microbatch, share) for share in parts]
    return np.min([each.forward_s for each in costs], axis=0), np.min(
        [each.backward_s for each in costs], axis=0
    )


def gain(cost: "CostModel", group: UnevenGroup, microbatch: int) -> float:
    """Return the group's speedup on the whole model over the fastest even part of it."""
    costs = group_costs(cost, group, microbatch)
    even = []
    for kind in group.nodes:
        degree = 2 ** int(math.log2(min(group.kinds.count(kind), cost.spec.max_tp_degree)))
        even.append(_whole_s(cost, kind, degree, microbatch))
    return min(even) / float(costs.forward_s.sum() + costs.backward_s.sum())
