"""Seconds and bytes of the two ways in which tokens reach their experts in a tensor-parallel group.

By a sum, each rank computes its experts for all tokens, and an all-reduce of the hidden states adds
their outputs, in either direction. In a sequence-parallel stage an all-gather and a reduce-scatter
carry the same bytes.

By all-to-all, each rank routes its part of the tokens
(`autohet.runtime.models.layers.expert_dispatch`). A token goes once to every rank that owns one of
its k experts. With even routing to E experts it reaches a rank with n of them with probability 1 -
C(E - n, k) / C(E, k). Ranks exchange the counts, which the host reads, then the rows, and return as
many. Outside of sequence-parallel stages an all-gather makes hidden states whole again: half of an
all-reduce. Shared experts need all tokens on every rank, for which the sum has no extra cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import Literal

import numpy as np

from planner.arrays import Floats
from planner.cost.basis import CostBasis
from planner.cost.layers.even_layers import LEAST_OWN, LayerTimes
from planner.cost.layers.experts import USUAL_LOAD_SPREAD, imbalance
from planner.cost.memory.training_bytes import VALUE_BYTES
from planner.errors import ConfigError
from planner.inputs.fleet import Member, NodeType
from planner.plans.model_spec import Experts, LayerSpec
from planner.plans.plan import Plan, Stage, TensorShare

ROUTING_BYTES = 8
"""Index and weight of a token's expert, in fp32."""
COUNT_BYTES = 8
HOST_READ_S = 3e-5
"""Seconds in which the host reads the counts and launches again: assumed, not measured."""


def reach(experts: Experts, held: int) -> float:
    """Return the probability that a token uses one of a rank's `held` experts."""
    missed = comb(experts.number - held, experts.per_token)
    return 1.0 - missed / comb(experts.number, experts.per_token)


@dataclass(frozen=True)
class ExpertGroup:
    """Tensor-parallel group whose ranks send tokens to each other's experts.

    members: (node name, node type) by rank. shares: of what the group cuts. microbatch: sequences.
    compute: format of hidden states. is_cut: the stage is sequence parallel. recomputes: it runs
    its blocks again in the backward pass.
    """

    members: tuple[Member, ...]
    shares: tuple[TensorShare, ...]
    microbatch: int
    compute: str
    is_cut: bool
    recomputes: bool


class DispatchCosts:
    """Costs of all-to-all dispatch on one fleet.

    load_spread: measured spread of the experts' loads (`experts.load_spread`); None: not measured.
    allowed: way of tokens to experts that plans may take; auto: the faster one of each stage.
    """

    def __init__(
        self,
        basis: CostBasis,
        load_spread: Callable[[], float | None],
        allowed: Literal["auto", "sum", "all_to_all"],
    ) -> None:
        self.allowed = allowed
        self._fleet = basis.fleet
        self._spec = basis.workload.spec
        self._links = basis.links
        self._formats = basis.formats
        self._load_spread = load_spread
        self._cuts_sequence = basis.parameters.sequence_parallel
        """All tensor-parallel stages are sequence parallel."""
        self._may_cut_sequence = basis.parameters.may_cut_sequence
        """Those with all-to-all may be."""

    def check(self, plan: Plan) -> None:
        """Raise ConfigError if a stage sends tokens to experts that none of its blocks has."""
        for index, pipeline in enumerate(plan.pipelines):
            for number, stage in enumerate(pipeline.stages):
                sends_tokens = stage.expert_dispatch == "all_to_all"
                if sends_tokens and not self._blocks(stage):
                    raise ConfigError(
                        f"'expert_dispatch' of stage {number} of pipeline {index} is all_to_all,"
                        " but none of its blocks has routed experts; leave it out"
                    )

    def applies(self, stage: Stage) -> bool:
        """Return True if the stage has a group, and experts to which its tokens may be sent."""
        has_group = stage.tp_degree > 1 and stage.spmd is None
        return has_group and bool(self._blocks(stage))

    def mixes_types(self, stage: Stage) -> bool:
        """Return True if a stage's GPUs are of several types."""
        return len(self._fleet.gpu_types_of(stage.workers)) > 1

    def _blocks(self, stage: Stage) -> list[LayerSpec]:
        """Return the stage's blocks with routed experts."""
        blocks = self._spec.blocks[stage.first_layer : stage.end_layer]
        return [block for block in blocks if block.experts is not None]

    def group_of(self, stage: Stage, microbatch: int, *, recomputes: bool) -> ExpertGroup:
        """Return the group of a stage of a plan."""
        return ExpertGroup(
            members=tuple(self._fleet.members_of(stage.workers)),
            shares=tuple(stage.share(rank) for rank in range(stage.tp_degree)),
            microbatch=microbatch,
            compute=self._formats.of(stage),
            is_cut=stage.sequence_parallel or self._cuts_sequence,
            recomputes=recomputes,
        )

    def even_group(
        self, kind: NodeType, tp_degree: int, microbatch: int, *, recomputes: bool
    ) -> ExpertGroup:
        """Return a group with even shares on one node."""
        return ExpertGroup(
            members=(("node", kind),) * tp_degree,
            shares=tuple(TensorShare(rank, rank + 1, tp_degree) for rank in range(tp_degree)),
            microbatch=microbatch,
            compute=self._formats.of_type(kind.gpu_type),
            is_cut=self._cuts_sequence or self._may_cut_sequence,
            recomputes=recomputes,
        )

    def added_by_layer(
        self, times: LayerTimes, group: ExpertGroup, spread_s: float = 0.0
    ) -> tuple[Floats, Floats]:
        """Return the seconds that all-to-all adds to each layer's forward and backward pass.

        times: with a sum. A pass of a block keeps LEAST_OWN of its time, since measured times may
        have less communication than links predict. spread_s: seconds that a block's all-reduces
        take beyond `times`.
        """
        forward_s = np.zeros_like(times.forward_s)
        backward_s = np.zeros_like(times.backward_s)
        known: dict[Experts, tuple[float, float]] = {}
        for layer, block in enumerate(self._spec.blocks, 1):
            if block.experts is None:
                continue
            if block.experts not in known:
                known[block.experts] = self.added_s(block.experts, group)
            added_forward, added_backward = known[block.experts]
            most_forward = (1.0 - LEAST_OWN) * times.forward_s[layer] + spread_s
            most_backward = (1.0 - LEAST_OWN) * times.backward_s[layer] + spread_s
            forward_s[layer] = max(added_forward, -most_forward)
            backward_s[layer] = max(added_backward, -most_backward)
        return forward_s, backward_s

    def added_s(self, experts: Experts, group: ExpertGroup) -> tuple[float, float]:
        """Return the seconds that all-to-all adds to a forward and a backward pass of a block.

        They are negative if it is faster than the sum.
        """
        members = group.members
        # rings go node by node
        ring = sorted(members, key=lambda member: member[0])
        num_bytes = self._formats.inside_bytes(group.microbatch, group.compute)
        all_reduce_s = self._links.all_reduce_s(ring, num_bytes)

        backward = self._rows_s(experts, group)
        # the all-gather that makes hidden states whole again takes half of an all-reduce
        backward -= all_reduce_s if group.is_cut else all_reduce_s / 2
        # the outputs of shared experts are still summed
        if experts.has_shared:
            backward += all_reduce_s

        counts_s = self._links.all_to_all_s(members, [COUNT_BYTES] * len(members)) + HOST_READ_S
        forward = backward + counts_s
        if group.recomputes:
            return forward, backward + forward
        return forward, backward

    def _rows_s(self, experts: Experts, group: ExpertGroup) -> float:
        """Return the seconds of all exchanges of rows in one direction."""
        num_bytes = self._formats.inside_bytes(group.microbatch, group.compute)
        row_bytes = self._spec.hidden_size * VALUE_BYTES[group.compute]
        tokens = num_bytes / row_bytes / len(group.members)
        hidden = []
        routing = []
        for share in self.received_shares(experts, group):
            rows = share * tokens
            hidden.append(rows * row_bytes)
            routing.append(rows * ROUTING_BYTES * experts.per_token)

        # rows go to their experts and come back; routing goes along on the way there
        hidden_s = self._links.all_to_all_s(group.members, hidden)
        routing_s = self._links.all_to_all_s(group.members, routing)
        return 2 * hidden_s + routing_s

    def received_shares(self, experts: Experts, group: ExpertGroup) -> list[float]:
        """Return the share of all tokens that each rank gets if it has the largest load."""
        measured = self._load_spread()
        spread = USUAL_LOAD_SPREAD if measured is None else measured
        found = []
        for share in group.shares:
            held = max(1, experts.of_share(share))
            fraction = held / experts.number
            load = imbalance(experts, held, fraction, len(group.shares), spread)
            found.append(min(1.0, load * reach(experts, held)))
        return found

    def buffer_bytes(self, stage: Stage, microbatch: int) -> float:
        """Return the bytes of rows that a rank has sent, received and not freed yet, of one block.

        They are copies of sent and received rows, and as many outputs.
        """
        group = self.group_of(stage, microbatch, recomputes=False)
        largest = 0.0
        for block in self._blocks(stage):
            assert block.experts is not None
            shares = self.received_shares(block.experts, group)
            sent = sum(shares) / len(shares)
            received = max(shares)
            largest = max(largest, sent + received)
        return 2 * largest * self._formats.inside_bytes(microbatch, group.compute)


__all__ = ["DispatchCosts", "ExpertGroup", "reach"]
