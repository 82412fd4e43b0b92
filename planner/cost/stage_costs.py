"""Seconds and bytes of one stage of a plan, cached.

Searches change few stages of a plan at a time.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.cost.basis import CostBasis
from planner.cost.eviction import evict_oldest
from planner.cost.layers.even_layers import LayerTimes
from planner.cost.layers.expert_dispatch import DispatchCosts
from planner.cost.layers.layer_times import LayerTimesByFormat
from planner.cost.links.traffic import Links
from planner.cost.memory.full_shard import gathered_scalars
from planner.cost.memory.offload import offloaded_update_s
from planner.cost.memory.stage_terms import NOT_SHARED, RankBytes, Sharing, StageTerms, traits_of
from planner.cost.memory.training_bytes import (
    FLAT_BYTES,
    OPTIMIZER_BYTES,
    VALUE_BYTES,
    MemoryTerms,
)
from planner.cost.memory.worker_memory import MemoryUse, WorkerMemory
from planner.inputs.fleet import Member, NodeType
from planner.plans.model_spec import ModelSpec
from planner.plans.muon import MUON_STATE_BYTES, Matrices
from planner.plans.plan import Pipeline, Plan, Stage, TensorShare
from planner.plans.redundancy import layers_of

ESTIMATED_DISPATCH = "all-to-all of tokens to experts: from links and even routing, not measured"
TermsByStage = dict[tuple[Hashable, ...], StageTerms]
"""Terms of stages by all that they depend on: the same on any fleet."""

_Share = TensorShare | None  # None: as the TP degree defines it
_Part = tuple[NodeType, _Share]
_TermsOfPipeline = tuple[tuple[Stage, ...], tuple[StageTerms, ...]]
_REMEMBERED = 4096  # pipelines


@dataclass(frozen=True)
class _PlacedStage:
    """One stage of a pipeline, and the sharing of its optimizer state."""

    pipeline: Pipeline
    index: int
    sharing: Sharing = NOT_SHARED

    @property
    def stage(self) -> Stage:
        return self.pipeline.stages[self.index]

    @property
    def size(self) -> int:
        """Sequences of a microbatch."""
        return self.pipeline.microbatch_sequences

    @property
    def is_whole_model(self) -> bool:
        return len(self.pipeline.stages) == 1

    @cached_property
    def entries(self) -> Ints:
        """Its entries of the layer arrays: 0 the embedding, 1.. the blocks, -1 the head."""
        entries = list(range(self.stage.first_layer + 1, self.stage.end_layer + 1))
        if self.index == 0:
            entries.insert(0, 0)
        if self.index == len(self.pipeline.stages) - 1:
            entries.append(-1)
        return np.array(entries, dtype=np.int64)

    def pinned_bytes(self, inside: float) -> float:
        """Return the bytes of pinned memory that inputs of its blocks take on a rank.

        inside: bytes of a microbatch's hidden states.
        """
        parts = self.stage.tp_degree if self.stage.sequence_parallel else 1
        # torch's allocator rounds up to powers of two
        return float(self.stage.num_layers * 2.0 ** math.ceil(math.log2(inside / parts)))

    def matrices(self, spec: ModelSpec) -> list[Matrices]:
        """Return the matrices of each block that Muon updates."""
        found = [spec.layers[entry].matrices for entry in self.entries]
        return [each for each in found if each]

    @cached_property
    def is_shared(self) -> Bools:
        """True for each of its entries whose optimizer state is shared out."""
        names = layers_of(self.stage, self.index, len(self.pipeline.stages))
        return np.array([name in self.sharing.layers for name in names], dtype=np.bool_)

    @cached_property
    def own_parts(self) -> Floats:
        """Share of each entry's optimizer state that one worker holds and updates."""
        return np.where(self.is_shared, 1.0 / self.sharing.holders, 1.0)


class StageCosts:
    """Costs of stages on one fleet.

    dispatch: costs of all-to-all dispatch to experts. known: cache of terms, which may be shared by
    fleets.
    """

    def __init__(
        self,
        basis: CostBasis,
        layer_times: LayerTimesByFormat,
        memory: WorkerMemory,
        dispatch: DispatchCosts,
        known: TermsByStage,
    ) -> None:
        self.fleet = basis.fleet
        self.spec = basis.workload.spec
        self.links = basis.links
        self.parameters = basis.parameters
        self.formats = basis.formats
        self.recompute_of = basis.workload.recompute_of
        self.layer_times = layer_times
        self.memory = memory
        self.dispatch = dispatch
        self._known = known
        self._by_pipeline: dict[tuple[int, int, Sharing], _TermsOfPipeline] = {}

    def terms(self, pipeline: Pipeline, index: int, sharing: Sharing = NOT_SHARED) -> StageTerms:
        """Return the terms of one stage of a pipeline.

        sharing: how the plan shares out optimizer state.
        """
        return self.every_terms(pipeline, sharing)[index]

    def every_terms(
        self, pipeline: Pipeline, sharing: Sharing = NOT_SHARED
    ) -> tuple[StageTerms, ...]:
        """Return the terms of each stage of a pipeline.

        They are found by the identity of its stages: a search asks many times for the same ones.
        """
        stages = pipeline.stages
        size = pipeline.microbatch_sequences
        key = (id(stages), size, sharing)
        known = self._by_pipeline.get(key)
        if known is None:
            terms = [self._stage_terms(pipeline, index, sharing) for index in range(len(stages))]
            # the stages are kept, so that no others have the same id
            known = self._by_pipeline[key] = stages, tuple(terms)
            evict_oldest(self._by_pipeline, _REMEMBERED)
        return known[1]

    def _stage_terms(self, pipeline: Pipeline, index: int, sharing: Sharing) -> StageTerms:
        stage = pipeline.stages[index]
        count = len(pipeline.stages)
        shared_layers = sharing.layers
        if shared_layers:
            shared_layers = shared_layers.intersection(layers_of(stage, index, count))
        holders = sharing.holders if shared_layers else 1
        offloads = sharing.offloads

        # all that the terms depend on, so that equal stages of other plans and fleets share them
        key = (
            self._place_key(stage),
            traits_of(stage),
            index == 0,
            index == count - 1,
            pipeline.microbatch_sequences,
            holders,
            shared_layers,
            offloads,
            self._border_bytes(pipeline, index),
        )
        known = self._known.get(key)
        if known is None:
            stage_sharing = Sharing(holders, shared_layers, offloads)
            placed = _PlacedStage(pipeline, index, stage_sharing)
            known = self._known[key] = self._terms(placed)
        return known

    def _place_key(self, stage: Stage) -> Hashable:
        """Return a key that is equal for stages on equal workers, whatever the nodes' names.

        The order of the names counts: rings go round nodes in that order.
        """
        members = self.fleet.members_of(stage.workers)
        names = sorted({name for name, _ in members})
        order = {name: i for i, name in enumerate(names)}
        return tuple((order[name], kind) for name, kind in members)

    def work_s(self, pipeline: Pipeline) -> float:
        """Return forward and backward seconds of one microbatch in the slowest stage."""
        every_terms = self.every_terms(pipeline)
        return max(terms.forward_s + terms.backward_s for terms in every_terms)

    def estimates(self, plan: Plan) -> tuple[str, ...]:
        """Return the times of a plan's stages that are estimated, not measured, each once."""
        notes = dict[str, None]()
        for pipeline in plan.pipelines:
            for terms in self.every_terms(pipeline):
                notes.update(dict.fromkeys(terms.estimated))
        return tuple(notes)

    def seconds(
        self, pipeline: Pipeline, index: int, *, rated: bool = False
    ) -> tuple[float, float]:
        """Return forward and backward seconds of one microbatch in one stage.

        They are its slowest worker's. rated: as if no node were slowed down.
        """
        if rated:
            return self._seconds(_PlacedStage(pipeline, index), rated=True)
        terms = self.terms(pipeline, index)
        return terms.forward_s, terms.backward_s

    def _seconds(self, placed: _PlacedStage, *, rated: bool = False) -> tuple[float, float]:
        stage = placed.stage
        entries = placed.entries
        size = placed.size
        spread_s = self._spread_tp_s(stage, size)
        # overheads do not depend on how fast a node computes, so its slowdown leaves them alone
        overhead_s = stage.num_layers * spread_s + self.parameters.stage_overhead_s

        forward = 0.0
        backward = 0.0
        for kind, share in dict.fromkeys(self._parts(stage)):
            times = self._layer_times(kind, share, stage, size)
            slowdown = 1.0 if rated else kind.slowdown
            own_forward = slowdown * float(times.forward_s[entries].sum())
            own_backward = slowdown * float(times.backward_s[entries].sum())

            added_forward, added_backward = self._dispatch_s(times, stage, size, spread_s)
            own_forward += float(added_forward[entries].sum())
            own_backward += float(added_backward[entries].sum())

            forward = max(forward, own_forward + overhead_s)
            backward = max(backward, own_backward + overhead_s)
        return forward, backward

    def _dispatch_s(
        self, times: LayerTimes, stage: Stage, size: int, spread_s: float
    ) -> tuple[Floats, Floats]:
        """Return the seconds that a stage's way of tokens to experts adds to each layer's passes.

        spread_s: as `_spread_tp_s`, which the caller adds to every block.
        """
        if stage.expert_dispatch != "all_to_all":
            nothing = np.zeros_like(times.forward_s)
            return nothing, nothing
        recomputes = self.recompute_of(stage) != "none"
        group = self.dispatch.group_of(stage, size, recomputes=recomputes)
        return self.dispatch.added_by_layer(times, group, spread_s)

    def _parts(self, stage: Stage) -> list[_Part]:
        """Return each rank's node type and share of what is cut.

        The share is None if the TP degree defines it.
        """
        parts = list[_Part]()
        for rank, kind in enumerate(self.fleet.node_types_of(stage.workers)):
            share = stage.share(rank) if stage.tp_shares else None
            parts.append((kind, share))
        return parts

    def _layer_times(self, kind: NodeType, share: _Share, stage: Stage, size: int) -> LayerTimes:
        recompute = self.recompute_of(stage)
        compute = self.formats.of(stage)
        return self.layer_times.times(
            kind.gpu_type, compute, stage.tp_degree, size, recompute, share
        )

    def _terms(self, placed: _PlacedStage) -> StageTerms:
        stage = placed.stage
        # in the order of names, so that notes do not depend on the order of the workers
        parts = sorted(dict.fromkeys(self._parts(stage)), key=_name_and_share)
        seconds = []
        notes = dict[str, None]()
        for kind, share in parts:
            times = self._layer_times(kind, share, stage, placed.size)
            rated_s = float(placed.own_parts @ times.update_s[placed.entries])
            seconds.append(kind.slowdown * rated_s)
            notes.update(dict.fromkeys(times.estimated))
        if stage.expert_dispatch == "all_to_all":
            notes[ESTIMATED_DISPATCH] = None

        update_s = max(seconds)
        matrices = placed.matrices(self.spec)
        if stage.tp_degree > 1 and matrices:
            # Gradients go to the owner of each matrix, weights come from it: each rank sends as
            # much as in an all-reduce of half of its part.
            width = FLAT_BYTES + VALUE_BYTES[self.formats.of(stage)]
            owned = sum(each.parameters for each in matrices) / placed.sharing.holders
            members = sorted(self.fleet.members_of(stage.workers), key=lambda member: member[0])
            update_s += self.links.all_reduce_s(members, owned * width / stage.tp_degree / 2)
        ranks = self._bytes_by_rank(placed)
        if ranks[0].host_bytes:
            update_s = self._offloaded_s(stage, ranks)
        forward_s, backward_s = self._seconds(placed)
        return StageTerms(forward_s, backward_s, update_s, ranks, tuple(notes))

    def _offloaded_s(self, stage: Stage, ranks: Sequence[RankBytes]) -> float:
        """Return the seconds of the slowest worker's update in host memory."""
        value_bytes = VALUE_BYTES[self.formats.of(stage)]
        kinds = self.fleet.node_types_of(stage.workers)
        seconds = []
        for rank, kind in zip(ranks, kinds, strict=True):
            update_s = offloaded_update_s(kind, value_bytes, self.parameters)
            seconds.append(rank.host_bytes / OPTIMIZER_BYTES * update_s)
        return max(seconds)

    def _bytes_by_rank(self, placed: _PlacedStage) -> tuple[RankBytes, ...]:
        """Return the bytes of each rank.

        Workers with equal shares count as the fullest of them, whatever their node types.
        """
        stage = placed.stage
        if not stage.tp_shares:
            kinds = set(self.fleet.node_types_of(stage.workers))
            fullest = self._bytes_of(placed, None, kinds)
            return (fullest,) * stage.tp_degree

        return tuple(self._bytes_of(placed, share, {kind}) for kind, share in self._parts(stage))

    def _bytes_of(self, placed: _PlacedStage, share: _Share, kinds: set[NodeType]) -> RankBytes:
        """Return the bytes of a worker with `share`, on the node type of `kinds` with least room.

        share: None if the TP degree defines it.
        """
        stage = placed.stage
        entries = placed.entries
        holders = placed.sharing.holders
        memory = self._memory_terms(placed, share)

        fixed = max(self.memory.fixed_bytes(kind) for kind in kinds)
        if self.parameters.full_shard and holders > 1:
            # a layer is whole only while it runs or is about to
            state = memory.state_bytes[entries] / holders
            all_layers = self.spec.layers
            layers = [all_layers[entry] for entry in entries]
            width = self.parameters.sync_bytes_per_parameter
            fixed += gathered_scalars(layers, stage.tp_degree) * width
        else:
            saved = memory.saved_bytes(holders)[entries]
            state = memory.state_bytes[entries] - placed.is_shared * saved
        kept = (memory.optimizer_bytes + memory.host_bytes)[entries] * placed.own_parts

        # the terms count the tied tensor at both ends; a stage with both ends holds it once
        if placed.is_whole_model and self.spec.tied_embeddings:
            tp_degree = stage.tp_degree if share is None else 1 / share.fraction
            once = 1.0 - self.spec.tied_share(tp_degree)
            state[0] *= once
            kept[0] *= once

        if matrices := placed.matrices(self.spec):
            # Matrices stay whole, so that the fullest owner may have almost one more.
            others = 1.0 - 1.0 / (holders * stage.tp_degree)
            fixed += MUON_STATE_BYTES * max(each.largest for each in matrices) * others

        # layers run one after the other, so that the largest peak alone counts
        largest_peak = memory.peak_bytes[entries].max()
        held = float(state.sum() + largest_peak) + fixed
        border_bytes = self._border_bytes(placed.pipeline, placed.index)
        held += self.parameters.border_messages * border_bytes
        if stage.expert_dispatch == "all_to_all":
            held += self.dispatch.buffer_bytes(stage, placed.size)

        activations = float(memory.activation_bytes[entries].sum())
        moved = 0.0
        if self.recompute_of(stage) == "offload":
            inside = self.formats.inside_bytes(placed.size, self.formats.of(stage))
            moved = placed.pinned_bytes(inside)
        if any(kind.gpu_type == "CPU" for kind in kinds):
            # host memory is the device's
            activations += moved
            moved = 0.0

        limit = min(self.memory.limit_bytes(kind) for kind in kinds)
        kept_bytes = float(kept.sum())
        return RankBytes(
            held_bytes=held,
            activation_bytes=activations,
            free_bytes=limit - held,
            state_bytes=kept_bytes,
            room_bytes=limit - fixed,
            host_bytes=kept_bytes if np.any(memory.host_bytes) else 0.0,
            moved_bytes=moved,
        )

    def _memory_terms(self, placed: _PlacedStage, share: _Share) -> MemoryTerms:
        """Return the bytes of every layer as the stage would hold it."""
        stage = placed.stage
        parameters = self.parameters
        use = MemoryUse(
            self.formats.of(stage),
            stage.tp_degree,
            placed.size,
            self.recompute_of(stage),
            share,
            cuts_sequence=stage.sequence_parallel and not parameters.sequence_parallel,
            offloads=placed.sharing.offloads and not parameters.offload_optimizer,
        )
        return self.memory.terms(use)

    def _border_bytes(self, pipeline: Pipeline, index: int) -> float:
        """Return bytes of a microbatch's hidden states at the stage's borders, added up."""
        stages = pipeline.stages
        mine = self.formats.of(stages[index])
        neighbours = []
        if index > 0:
            neighbours.append(stages[index - 1])
        if index + 1 < len(stages):
            neighbours.append(stages[index + 1])

        total = 0.0
        for neighbour in neighbours:
            other = self.formats.of(neighbour)
            total += self.formats.border_bytes(pipeline.microbatch_sequences, mine, other)
        return total

    def _spread_tp_s(self, stage: Stage, microbatch: int) -> float:
        """Return seconds that a group over several nodes adds to each block of the profile.

        The profile is measured inside one node.
        """
        members = self.fleet.members_of(stage.workers)
        compute = self.formats.of(stage)
        num_bytes = self.formats.inside_bytes(microbatch, compute)
        return spread_tp_s(self.links, members, num_bytes)

    def seconds_of_shares(
        self, pipeline: Pipeline, index: int, sharing: Sharing, taken_bytes: float
    ) -> Callable[[int, TensorShare], float]:
        """Return a function that gives each rank's seconds of a microbatch with a share.

        Infinite if memory, less `taken_bytes`, does not hold the microbatches in flight.
        """
        placed = _PlacedStage(pipeline, index, sharing)
        stage = placed.stage
        in_flight = pipeline.in_flight(index)
        kinds = self.fleet.node_types_of(stage.workers)
        experts = self.spec.experts
        known: dict[tuple[NodeType, float, int, int], float] = {}

        def compute(kind: NodeType, share: TensorShare) -> float:
            memory = self._bytes_of(placed, share, {kind})
            if memory.free_bytes - taken_bytes < in_flight * memory.activation_bytes:
                return np.inf
            times = self._layer_times(kind, share, stage, placed.size)
            both_passes_s = times.forward_s + times.backward_s
            return kind.slowdown * float(both_passes_s[placed.entries].sum())

        def seconds(rank: int, share: TensorShare) -> float:
            # Shares of one size differ in place alone, which matters only by the keys and values
            # and the experts that they overlap: a division has far more shares than kinds of them.
            units = len(share.units(self.spec.key_value_units))
            held = experts.of_share(share) if experts else 0
            key = kinds[rank], share.fraction, units, held
            if key not in known:
                known[key] = compute(kinds[rank], share)
            return known[key]

        return seconds


def spread_tp_s(links: Links, members: Sequence[Member], num_bytes: float) -> float:
    """Return seconds by which a block's two all-reduces exceed a profile, in one direction.

    members: (node name, node type) over several nodes. A profile is measured inside one node.
    """
    is_one_node = len({name for name, _ in members}) == 1
    if is_one_node:
        return 0.0
    node_by_node = sorted(members, key=lambda member: member[0])
    over = links.all_reduce_s(node_by_node, num_bytes)

    _, first_kind = members[0]
    on_one_node = [("node", first_kind)] * len(members)
    inside = links.all_reduce_s(on_one_node, num_bytes)
    return 2 * max(0.0, over - inside)


def _name_and_share(part: _Part) -> tuple[str, tuple[int, ...]]:
    kind, share = part
    return kind.name, share or ()
