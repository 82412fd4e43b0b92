"""Tensor-parallel groups of different GPUs, or of a number that is no power of two.

The module gives the parts of each GPU, and the costs of layers there.
"""

import math
from dataclasses import replace

import numpy as np

from planner.arrays import Floats
from planner.cost.layers.layer_costs import LayerCosts
from planner.cost.model import CostModel
from planner.cost.stage_costs import spread_tp_s
from planner.inputs.fleet import NodeType
from planner.plans.formats import shared_format
from planner.plans.plan import TensorShare
from planner.plans.shares import UnevenGroup, place_shares, whole_shares


def uneven_group(
    cost: CostModel, kinds: tuple[NodeType, ...], microbatch: int
) -> UnevenGroup | None:
    """Return the group with the shares by which the whole model takes least time.

    None if some GPU would get no part, or if all would get equal parts.
    """
    finest = cost.spec.max_tp_degree

    def seconds(rank: int, share: TensorShare) -> float:
        # Where a share lies takes no time: shares of one size share one entry of the cache.
        parts = (share.end - share.first) * finest // share.of
        alone = TensorShare(0, parts, finest)
        return _whole_s(cost, kinds[rank], len(kinds), microbatch, alone)

    shares = whole_shares(seconds, len(kinds), finest, cost.spec.key_value_units)
    is_uneven = len(set(shares)) > 1
    return UnevenGroup(kinds, shares) if is_uneven else None


def _whole_s(
    cost: CostModel,
    kind: NodeType,
    tp_degree: int,
    microbatch: int,
    share: TensorShare | None = None,
) -> float:
    costs = cost.layers.costs(kind, tp_degree, microbatch, share)
    return float(costs.forward_s.sum() + costs.backward_s.sum())


def group_costs(cost: CostModel, group: UnevenGroup, microbatch: int) -> LayerCosts:
    """Return each layer's costs on the group.

    Seconds: the slowest GPU's. For a group on one node, whose bound is proved: the least with which
    some GPU does the layer, whatever the shares. Bytes: the fullest GPU's, scaled to the room of
    the GPU with least room.
    """
    tp_degree = len(group.kinds)
    shares = place_shares(group.shares)
    ranks = []
    for kind, share in zip(group.kinds, shares, strict=True):
        ranks.append(cost.layers.costs(kind, tp_degree, microbatch, share))

    def largest(name: str) -> Floats:
        by_rank = [getattr(rank, name) for rank in ranks]
        return np.asarray(np.max(by_rank, axis=0))

    forward_s = largest("forward_s")
    backward_s = largest("backward_s")
    if len(group.nodes) == 1:
        forward_s, backward_s = _least_s(cost, group.kinds, microbatch)
    else:
        spread_s = _spread_s(cost, group, microbatch)
        # embedding and head have no all-reduces
        forward_s[1:-1] += spread_s
        backward_s[1:-1] += spread_s

    room = [rank.limit_bytes - rank.fixed_bytes for rank in ranks]
    least_room = min(room)
    scales = [least_room / each for each in room]

    def fullest(name: str) -> Floats:
        scaled = [scale * getattr(rank, name) for scale, rank in zip(scales, ranks, strict=True)]
        return np.asarray(np.max(scaled, axis=0))

    return replace(
        ranks[room.index(least_room)],
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=largest("update_s"),
        sync_bytes=largest("sync_bytes"),
        state_bytes=fullest("state_bytes"),
        activation_bytes=fullest("activation_bytes"),
        peak_bytes=fullest("peak_bytes"),
    )


def _spread_s(cost: CostModel, group: UnevenGroup, microbatch: int) -> float:
    """Return seconds that a group over several nodes adds to a block, in one direction."""
    formats = cost.stage_formats
    by_type = {kind.gpu_type: formats.of_type(kind.gpu_type) for kind in group.kinds}
    compute = shared_format(by_type)
    # GPUs of one type are on one node: the type's name stands for the node's
    members = [(kind.name, kind) for kind in group.kinds]
    return spread_tp_s(cost.links, members, formats.inside_bytes(microbatch, compute))


def _least_s(
    cost: CostModel, kinds: tuple[NodeType, ...], microbatch: int
) -> tuple[Floats, Floats]:
    """Return (layers,) forward and backward seconds of GPUs of one type.

    Some GPU has an even part at least; at most, it leaves one part to each other GPU.
    """
    finest = cost.spec.max_tp_degree
    ranks = len(kinds)
    fewest = -(-finest // ranks)
    most = finest - ranks + 1
    forward_s = []
    backward_s = []
    for parts in range(fewest, most + 1):
        share = TensorShare(0, parts, finest)
        costs = cost.layers.costs(kinds[0], ranks, microbatch, share)
        forward_s.append(costs.forward_s)
        backward_s.append(costs.backward_s)
    return np.min(forward_s, axis=0), np.min(backward_s, axis=0)


def gain(cost: CostModel, group: UnevenGroup, microbatch: int) -> float:
    """Return the group's speedup on the whole model over the fastest even part of it."""
    costs = group_costs(cost, group, microbatch)
    even = []
    for kind in group.nodes:
        # even groups have a power of two of GPUs
        gpus = min(group.kinds.count(kind), cost.spec.max_tp_degree)
        degree = 2 ** int(math.log2(gpus))
        even.append(_whole_s(cost, kind, degree, microbatch))
    uneven_s = float(costs.forward_s.sum() + costs.backward_s.sum())
    return min(even) / uneven_s
