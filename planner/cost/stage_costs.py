"""Seconds and bytes of one stage of a plan, cached.

Searches change few stages of a plan at a time.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from planner.cluster import NodeType
from planner.cost.basis import CostBasis
from planner.cost.even_layers import LayerTimes
from planner.cost.expert_dispatch import DispatchCosts
from planner.cost.full_shard import GATHERED_LAYERS
from planner.cost.layer_times import LayerTimesByFormat
from planner.cost.links import Links
from planner.cost.memory import OPTIMIZER_BYTES, VALUE_BYTES, with_cut_sequence
from planner.cost.offload import offloaded_update_s
from planner.cost.worker_memory import WorkerMemory
from planner.plan import Pipeline, Plan, Recompute, Stage, TensorShare
from planner.redundancy import layers_of, sharded_layers

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
ESTIMATED_DISPATCH = "all-to-all of tokens to experts: from links and even routing, not measured"
TermsByStage = dict[tuple[Hashable, ...], "StageTerms"]
"""Terms of stages by all that they depend on: the same on any fleet."""

_REMEMBERED = 4096  # pipelines
_REST = attrgetter(*(each.name for each in fields(Stage) if each.name != "workers"))


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of one worker of a stage.

    held_bytes: held all step long. activation_bytes: for each microbatch in flight. free_bytes:
    free beside what it holds all step long. state_bytes: masters and moments, which outlive a plan.
    room_bytes: room for what a plan puts there. offloaded_bytes: masters and moments in host
    memory.
    """

    held_bytes: float
    activation_bytes: float
    free_bytes: float
    state_bytes: float
    room_bytes: float
    host_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTerms:
    """Seconds and bytes of one stage.

    Seconds of a microbatch and of the update are the slowest worker's. ranks: bytes of each worker.
    estimated: the times that are estimated, not measured.
    """

    forward_s: float
    backward_s: float
    update_s: float
    ranks: tuple[RankBytes, ...]
    estimated: tuple[str, ...]

    def room(self, taken_bytes: float) -> int:
        """Return microbatches in flight that memory holds.

        taken_bytes: further bytes taken of each worker.
        """
        return min(
            int((rank.free_bytes - taken_bytes) / max(1.0, rank.activation_bytes))
            for rank in self.ranks
        )


@dataclass(frozen=True, slots=True)
class Sharing:
    """Layers with shared-out optimizer state, and the number of workers that share each.

    layers: names as in `planner.redundancy`. holders: number of pipelines, since each pipeline
    holds each slice once. Further workers may hold a few tensors (biases, norms, a tied embedding);
    they are not counted. offloads: masters and moments are in host memory.
    """

    holders: int = 1
    layers: frozenset[str] = frozenset()
    offloads: bool = False


NOT_SHARED = Sharing()


def sharing_of(plan: Plan) -> Sharing:
    """Return the sharing of optimizer state in a plan."""
    if len(plan.pipelines) > 1 and any(
        stage.shard_optimizer for p in plan.pipelines for stage in p.stages
    ):
        return Sharing(len(plan.pipelines), sharded_layers(plan), plan.offloads)
    return Sharing(offloads=True) if plan.offloads else NOT_SHARED


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
        self.recompute: Recompute = basis.workload.recompute
        self.layer_times = layer_times
        self.memory = memory
        self.dispatch = dispatch
        self._known = known
        self._by_pipeline: dict[
            tuple[int, int, Sharing], tuple[tuple[Stage, ...], tuple[StageTerms, ...]]
        ] = {}

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
            terms = tuple(self._stage_terms(pipeline, i, sharing) for i in range(len(stages)))
            # the stages are kept, so that no others have the same id
            known = self._by_pipeline[key] = stages, terms
            if len(self._by_pipeline) > _REMEMBERED:
                del self._by_pipeline[next(iter(self._by_pipeline))]
        return known[1]

    def _stage_terms(self, pipeline: Pipeline, index: int, sharing: Sharing) -> StageTerms:
        stage, last = pipeline.stages[index], len(pipeline.stages) - 1
        mine = sharing.layers and sharing.layers.intersection(layers_of(stage, index, last + 1))
        holders = sharing.holders if mine else 1
        offloads = sharing.offloads
        size = pipeline.microbatch_sequences
        borders = self._border_bytes(pipeline, index)
        place = self._place_key(stage)
        ends = index == 0, index == last
        key = (place, _REST(stage), ends, size, holders, mine, offloads, borders)
        known = self._known.get(key)
        if known is None:
            stage_sharing = Sharing(holders, mine or frozenset(), offloads)
            known = self._known[key] = self._terms(pipeline, index, stage_sharing)
        return known

    def _place_key(self, stage: Stage) -> Hashable:
        """Return a key that is equal for stages on equal workers, whatever the nodes' names.

        The order of the names counts: rings go round nodes in that order.
        """
        nodes = [self.fleet.node_of(worker) for worker in stage.workers]
        names = sorted({node.name for node in nodes})
        order = {name: i for i, name in enumerate(names)}
        return tuple((order[node.name], node.node_type) for node in nodes)

    def work_s(self, pipeline: Pipeline) -> float:
        """Return forward and backward seconds of one microbatch in the slowest stage."""
        return max(each.forward_s + each.backward_s for each in self.every_terms(pipeline))

    def estimated(self, plan: Plan) -> tuple[str, ...]:
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
            return self._seconds(pipeline, index, rated=True)
        terms = self.terms(pipeline, index)
        return terms.forward_s, terms.backward_s

    def _seconds(
        self, pipeline: Pipeline, index: int, *, rated: bool = False
    ) -> tuple[float, float]:
        stage = pipeline.stages[index]
        chosen = _entries(stage, index, len(pipeline.stages))
        size = pipeline.microbatch_sequences
        forward = 0.0
        backward = 0.0
        spread_s = self._spread_tp_s(stage, size)
        more = stage.num_layers * spread_s + self.parameters.stage_overhead_s
        for kind, share in dict.fromkeys(self._parts(stage)):
            times = self._layer_times(kind, share, stage, size)
            added = self._dispatch_s(times, stage, size, spread_s)
            slowdown = 1.0 if rated else kind.slowdown
            own_forward = slowdown * float(times.forward_s[chosen].sum())
            own_backward = slowdown * float(times.backward_s[chosen].sum())
            forward = max(forward, own_forward + float(added[0][chosen].sum()) + more)
            backward = max(backward, own_backward + float(added[1][chosen].sum()) + more)
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
        recomputes = (stage.recompute or self.recompute) != "none"
        group = self.dispatch.group_of(stage, size, recomputes=recomputes)
        return self.dispatch.added_by_layer(times, group, spread_s)

    def _parts(self, stage: Stage) -> list[tuple[NodeType, TensorShare | None]]:
        """Return each rank's node type and share of what is cut.

        The share is None if the TP degree defines it.
        """
        kinds = (self.fleet.node_of(worker).node_type for worker in stage.workers)
        return [
            (kind, stage.share(rank) if stage.tp_shares else None)
            for rank, kind in enumerate(kinds)
        ]

    def _layer_times(
        self, kind: NodeType, share: TensorShare | None, stage: Stage, size: int
    ) -> LayerTimes:
        recompute = stage.recompute or self.recompute
        compute = self.formats.of(stage)
        return self.layer_times.times(
            kind.gpu_type, compute, stage.tp_degree, size, recompute, share
        )

    def _terms(self, pipeline: Pipeline, index: int, sharing: Sharing) -> StageTerms:
        stage, count, size = (
            pipeline.stages[index],
            len(pipeline.stages),
            pipeline.microbatch_sequences,
        )
        chosen, parts = _entries(stage, index, count), self._parts(stage)
        kinds = sorted(dict.fromkeys(parts), key=lambda part: (part[0].name, part[1] or ()))
        times = [(kind, self._layer_times(kind, share, stage, size)) for kind, share in kinds]
        is_shared = np.array([name in sharing.layers for name in layers_of(stage, index, count)])
        updated = np.where(is_shared, 1.0 / sharing.holders, 1.0)
        ranks = self._bytes_by_rank(pipeline, index, sharing, is_shared)
        update_s = max(kind.slowdown * float(updated @ of.update_s[chosen]) for kind, of in times)
        if ranks[0].host_bytes:
            update_s = self._offloaded_s(pipeline, index, ranks)
        notes = dict.fromkeys(note for _, of in times for note in of.estimated)
        if stage.expert_dispatch == "all_to_all":
            notes[ESTIMATED_DISPATCH] = None
        return StageTerms(
            *self._seconds(pipeline, index),
            update_s,
            ranks,
            tuple(notes),
        )

    def _offloaded_s(self, pipeline: Pipeline, index: int, ranks: Sequence[RankBytes]) -> float:
        """Return the seconds of the slowest worker's update in host memory."""
        stage = pipeline.stages[index]
        value_bytes = VALUE_BYTES[self.formats.of(stage)]
        seconds = []
        for rank, worker in zip(ranks, stage.workers, strict=True):
            kind = self.fleet.node_of(worker).node_type
            update_s = offloaded_update_s(kind, value_bytes, self.parameters)
            seconds.append(rank.host_bytes / OPTIMIZER_BYTES * update_s)
        return max(seconds)

    def _bytes_by_rank(
        self, pipeline: Pipeline, index: int, sharing: Sharing, is_shared: Bools
    ) -> tuple[RankBytes, ...]:
        """Return the bytes of each rank.

        Workers with equal shares count as the fullest of them, whatever their node types.
        """
        stage, parts = pipeline.stages[index], self._parts(pipeline.stages[index])
        if not stage.tp_shares:
            kinds = {kind for kind, _ in parts}
            return (self._bytes_of(pipeline, index, sharing, is_shared, None, kinds),) * len(parts)
        return tuple(
            self._bytes_of(pipeline, index, sharing, is_shared, share, {kind})
            for kind, share in parts
        )

    def _bytes_of(
        self,
        pipeline: Pipeline,
        index: int,
        sharing: Sharing,
        is_shared: Bools,
        share: TensorShare | None,
        kinds: set[NodeType],
    ) -> RankBytes:
        stage, count, size = (
            pipeline.stages[index],
            len(pipeline.stages),
            pipeline.microbatch_sequences,
        )
        chosen = _entries(stage, index, count)
        recompute = stage.recompute or self.recompute
        compute = self.formats.of(stage)
        memory = self.memory.terms(compute, stage.tp_degree, size, recompute, share)
        if stage.sequence_parallel and not self.parameters.sequence_parallel:
            value_bytes = self.formats.inside_bytes(size, compute) / self.spec.hidden_size
            by_modules = self.parameters.autograd_activations
            memory = with_cut_sequence(
                memory, self.spec, value_bytes, stage.tp_degree, recompute, by_modules
            )
        if sharing.offloads and not self.parameters.offload_optimizer:
            memory = memory.offloaded()
        holders = sharing.holders
        fixed = max(map(self.memory.fixed_bytes, kinds))
        if self.parameters.full_shard and holders > 1:
            state = memory.state_bytes[chosen] / holders
            fixed += self._gathered_bytes(chosen, stage.tp_degree)
        else:
            state = memory.state_bytes[chosen] - is_shared * memory.saved_bytes(holders)[chosen]
        part = np.where(is_shared, 1.0 / holders, 1.0)
        kept = (memory.optimizer_bytes + memory.host_bytes)[chosen] * part
        if count == 1 and self.spec.tied_embeddings:  # the tied tensor is held once
            degree = stage.tp_degree if share is None else 1 / share.fraction
            once = 1.0 - self.spec.tied_share(degree)
            state[0], kept[0] = state[0] * once, kept[0] * once
        held = float(state.sum() + memory.peak_bytes[chosen].max()) + fixed
        held += self.parameters.border_messages * self._border_bytes(pipeline, index)
        if stage.expert_dispatch == "all_to_all":
            held += self.dispatch.buffer_bytes(stage, size)
        activations = float(memory.activation_bytes[chosen].sum())
        limit = min(map(self.memory.limit_bytes, kinds))
        host = float(kept.sum()) if np.any(memory.host_bytes) else 0.0
        return RankBytes(held, activations, limit - held, float(kept.sum()), limit - fixed, host)

    def _border_bytes(self, pipeline: Pipeline, index: int) -> float:
        """Return bytes of a microbatch's hidden states at the stage's borders, added up."""
        mine = self.formats.of(pipeline.stages[index])
        size = pipeline.microbatch_sequences
        neighbours = pipeline.stages[max(0, index - 1) : index] + pipeline.stages[index + 1 :][:1]
        return sum(
            self.formats.border_bytes(size, mine, self.formats.of(other)) for other in neighbours
        )

    def _gathered_bytes(self, chosen: NDArray[np.int64], tp_degree: int) -> float:
        """Return bytes of gathered weights and of one layer's gradient.

        The weights are those of the layers gathered at one time; both are in the format in which
        they are sent.
        """
        layers = (self.spec.embedding, *self.spec.blocks, self.spec.head)
        trained = [layers[i].parameters_per_worker(tp_degree) for i in chosen]
        frozen = [layers[i].frozen_per_worker(tp_degree) for i in chosen]
        weights = sorted(map(sum, zip(trained, frozen, strict=True)), reverse=True)
        whole = sum(weights[:GATHERED_LAYERS]) + max(trained)
        return float(whole * self.parameters.sync_bytes_per_parameter)

    def _spread_tp_s(self, stage: Stage, microbatch: int) -> float:
        """Return seconds that a group over several nodes adds to each block of the profile.

        The profile is measured inside one node.
        """
        nodes = [self.fleet.node_of(worker) for worker in stage.workers]
        members = [(node.name, node.node_type) for node in nodes]
        num_bytes = self.formats.inside_bytes(microbatch, self.formats.of(stage))
        return spread_tp_s(self.links, members, num_bytes)

    def seconds_of_shares(
        self, pipeline: Pipeline, index: int, sharing: Sharing, taken_bytes: float
    ) -> Callable[[int, TensorShare], float]:
        """Return a function that gives each rank's seconds of a microbatch with a share.

        Infinite if memory, less `taken_bytes`, does not hold the microbatches in flight.
        """
        stage, count, size = (
            pipeline.stages[index],
            len(pipeline.stages),
            pipeline.microbatch_sequences,
        )
        chosen, flying = _entries(stage, index, count), pipeline.in_flight(index)
        is_shared = np.array([name in sharing.layers for name in layers_of(stage, index, count)])
        kinds = [self.fleet.node_of(worker).node_type for worker in stage.workers]
        known: dict[tuple[NodeType, float, int, int], float] = {}
        experts = self.spec.experts

        def compute(kind: NodeType, share: TensorShare) -> float:
            memory = self._bytes_of(pipeline, index, sharing, is_shared, share, {kind})
            if memory.free_bytes - taken_bytes < flying * memory.activation_bytes:
                return np.inf
            times = self._layer_times(kind, share, stage, size)
            return kind.slowdown * float((times.forward_s + times.backward_s)[chosen].sum())

        def seconds(rank: int, share: TensorShare) -> float:
            # bytes and seconds depend on how much it is, on how many keys and values it overlaps,
            # and on how many experts it has
            units = len(share.units(self.spec.key_value_units))
            held = experts.of_share(share) if experts else 0
            key = kinds[rank], share.fraction, units, held
            if key not in known:
                known[key] = compute(kinds[rank], share)
            return known[key]

        return seconds


def spread_tp_s(links: Links, members: Sequence[tuple[str, NodeType]], num_bytes: float) -> float:
    """Return seconds by which a block's two all-reduces exceed a profile, in one direction.

    members: (node name, node type) over several nodes. A profile is measured inside one node.
    """
    if len({name for name, _ in members}) == 1:
        return 0.0
    over = links.all_reduce_s(sorted(members, key=lambda member: member[0]), num_bytes)
    inside = links.all_reduce_s([("node", members[0][1])] * len(members), num_bytes)
    return 2 * max(0.0, over - inside)


def _entries(stage: Stage, index: int, num_stages: int) -> NDArray[np.int64]:
    """The stage's entries of the layer arrays: 0 the embedding, 1.. the blocks, -1 the head."""
    chosen = list(range(stage.first_layer + 1, stage.end_layer + 1))
    if index == 0:
        chosen = [0, *chosen]
    if index == num_stages - 1:
        chosen = [*chosen, -1]
    return np.array(chosen, dtype=np.int64)
