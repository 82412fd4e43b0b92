"""Cost model: the seconds, bytes and dollars of a plan's step, and the queries of a search.

A search reads `layer_costs` (arrays over the layers of one way to use a node type), `boundary_s`
and `sync_s`; `predict` runs the whole model with the event simulation. All of it is a function of
the arguments alone.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Fleet, NodeType
from planner.communicators import LEAST_OF_A_GROUP, MOSTLY
from planner.cost.boundaries import BoundaryCosts, WaysByLikeness
from planner.cost.expert_dispatch import DispatchCosts
from planner.cost.full_shard import overlapped_s, share_out_all
from planner.cost.layer_costs import Assumed, LayerCosts, MemoryChoices
from planner.cost.layers import LayerTimeModel, LayerTimes, require_dtype
from planner.cost.links import Links, LinkTable
from planner.cost.memory import (
    OPTIMIZER_BYTES,
    VALUE_BYTES,
    MemoryTerms,
    memory_terms,
    with_cut_sequence,
)
from planner.cost.offload import offloaded_update_s
from planner.cost.parameters import CostParameters
from planner.cost.plan_memory import PlanMemory, Synced
from planner.cost.prediction import Prediction
from planner.cost.schedule import PipelineTimes, ends_of_stages, pipeline_bound_s
from planner.cost.stage_costs import StageCosts, TermsByStage, sharing_of
from planner.cost.stage_formats import StageFormats
from planner.cost.sync import KnownRings, Rings, StepTimeline, simulate_sync
from planner.cost.zone_transfers import ZoneTransfer, bytes_between_zones
from planner.errors import ConfigError
from planner.in_flight import MOST_AHEAD
from planner.model_spec import ModelSpec
from planner.plan import (
    COMPUTE_FORMATS,
    ComputeFormat,
    Pipeline,
    Plan,
    Recompute,
    Stage,
    TensorShare,
    check_plan,
)
from planner.profile import ProfileTable, default_profile
from planner.spmd.decoder import Decoder
from planner.spmd.fleet import breakdown_of_program
from planner.zones import EC2_ZONES, ZoneTable, known_zones

__all__ = ["Assumed", "CostModel", "LayerCosts", "MemoryChoices", "Prediction", "Simulation"]

Floats = NDArray[np.float64]

_REMEMBERED = 4096  # predictions times GPUs
_PIPELINES = (
    1024  # ends of stages: of 80 stages 3 KB, where a timeline of all actions would take megabytes
)


@dataclass(frozen=True)
class Simulation:
    """Simulated step.

    ends_s: for each pipeline (of `plan.pipelines`), when its stages have ended. sync: the gradient
    sync and updates after them.
    """

    ends_s: tuple[tuple[float, ...], ...]
    sync: StepTimeline
    step_time_s: float


def _no_graph(microbatch: int) -> Decoder | None:
    """Return None: no graph is known at any microbatch size."""
    return None


class CostModel:
    """Costs plans of one model on one fleet, for one sequence length and precision.

    profile None takes the bundled measurements. `model` names the rows of the profile that are this
    model's (else the spec's name, else the profile's only model). With a `links` table measured
    bandwidths replace the labels' and the catalogue's. zones: links between zones. recompute: of
    stages that say none; choices: what a search may choose instead (None: nothing). decoder: gives
    the model's graph at a microbatch size, for SPMD programs; None: no graph is known.
    formats: number formats of GPU types that do not compute in the precision, by canonical name.
    """

    def __init__(
        self,
        fleet: Fleet,
        spec: ModelSpec,
        profile: ProfileTable | None = None,
        *,
        sequence_length: int,
        precision: str = "bf16",
        recompute: Recompute = "none",
        choices: MemoryChoices | None = None,
        links: LinkTable | None = None,
        zones: ZoneTable | None = None,
        parameters: CostParameters | None = None,
        model: str | None = None,
        decoder: Callable[[int], Decoder | None] | None = None,
        formats: Mapping[str, ComputeFormat] | None = None,
    ) -> None:
        require_dtype(precision)
        self.fleet = fleet
        self.spec = spec
        self.precision = precision
        self.recompute: Recompute = recompute
        self.choices = choices or MemoryChoices((recompute,))
        self.assumed = Assumed(recompute)
        self.sequence_length = sequence_length
        self.parameters = parameters or CostParameters()
        self.profile = profile or default_profile()
        self.links = Links(self.parameters, links, zones or EC2_ZONES)
        self.model = model or spec.name
        self._decoder = decoder or _no_graph
        self._decoders: dict[int, Decoder | None] = {}
        asked = (formats or {}).items()
        self.formats = {gpu: compute for gpu, compute in asked if compute != precision}
        self._layer_times: dict[str, LayerTimeModel] = {}
        self._costs: dict[tuple[NodeType, int, int, TensorShare | None], LayerCosts] = {}
        self._memories: dict[tuple[str, int, int, Recompute, TensorShare | None], MemoryTerms] = {}
        self._synced: Synced = {}
        self._terms: TermsByStage = {}
        self._ways: WaysByLikeness = {}
        self._rings: KnownRings = {}
        self._place(fleet)

    def _place(self, fleet: Fleet) -> None:
        """Set the attributes that depend on the fleet's nodes; what was cached is left behind."""
        self._terms = {}
        self._ways = {}
        self._rings = {}
        self._place_again(fleet)

    def _place_again(self, fleet: Fleet) -> None:
        """Set the attributes that depend on the fleet's nodes, with all else as it was."""
        values = self.sequence_length * self.spec.hidden_size
        scales_gradients = self.parameters.scales_gradients
        self.stage_formats = StageFormats(
            fleet, self.precision, self.formats, values, scales_gradients
        )
        self.dispatch = DispatchCosts(
            fleet,
            self.spec,
            self.links,
            self.stage_formats,
            self._load_spread,
            self.parameters.sequence_parallel,
            self.parameters.may_cut_sequence,
        )
        self._stages = StageCosts(
            fleet,
            self.spec,
            self.links,
            self.parameters,
            self._times,
            self._memory,
            self.fixed_bytes,
            self.limit_bytes,
            self.stage_formats,
            self.offloaded_s,
            self.recompute,
            self.dispatch,
            self._terms,
        )
        self._boundaries = BoundaryCosts(
            fleet,
            self.links,
            self.stage_formats,
            self.work_s,
            self.parameters.sliced_boundaries,
            self._ways,
        )
        named = known_zones({node.node_type.zone for node in fleet.nodes})
        self.zones = () if self.links.zones.ignored else named
        self._ends: dict[tuple[object, int], tuple[float, ...]] = {}
        self._predictions: dict[Plan, Prediction] = {}
        self.memory_of = PlanMemory(
            self.spec, self.parameters, self._stages, self._boundaries, self._synced
        )

    def _load_spread(self) -> float | None:
        """Measured spread of the experts' loads; a method, so that a model can be pickled."""
        return self.layer_time_model(self.precision).load_spread

    def on(self, fleet: Fleet) -> "CostModel":
        """Return this model on another fleet of its node types, or of some of them.

        Layers' seconds and bytes are shared, not recomputed.

        Raises:
            ConfigError: the fleet has a node type that this one does not have.
        """
        unknown = {node.node_type for node in fleet.nodes} - set(self.node_types)
        if unknown:
            raise ConfigError(
                f"node type '{min(kind.name for kind in unknown)}' is not among those that the cost"
                " model knows"
            )
        other = copy.copy(self)
        other.__dict__.pop("node_types", None)
        other.fleet = fleet
        other._place_again(fleet)
        return other

    def varied(self, kinds: Mapping[NodeType, NodeType]) -> "CostModel":
        """Return this model with some node types replaced, on the same nodes.

        The replacements are slower or faster, or have other links or memories. The tensor-parallel
        communication in a layer's time scales with the layer.
        """
        other = copy.copy(self)
        other.__dict__.pop("node_types", None)
        nodes = (
            replace(node, node_type=kinds.get(node.node_type, node.node_type))
            for node in self.fleet.nodes
        )
        other.fleet = replace(self.fleet, nodes=tuple(nodes))
        other._costs = {}
        other.links = self.links.varied(kinds)
        other._place(other.fleet)
        return other

    def assuming(self, assumed: Assumed) -> "CostModel":
        """Return this model with `layer_costs` under another assumption.

        Predictions do not change: they use what a plan itself says.
        """
        other = copy.copy(self)
        other.assumed = assumed
        other._costs = {}
        return other

    def cutting_sequences(self) -> "CostModel":
        """Return this model with all tensor-parallel stages sequence parallel, none selective."""
        other = copy.copy(self)
        other.parameters = replace(self.parameters, sequence_parallel=True)
        kinds = tuple(kind for kind in self.choices.recompute if kind != "selective")
        other.choices = replace(self.choices, recompute=kinds)
        other._costs = {}
        other._memories = {}
        other._place(self.fleet)
        return other

    def offloading(self) -> "CostModel":
        """Return the same model with masters and moments of all plans in host memory."""
        other = copy.copy(self)
        other.parameters = replace(self.parameters, offload_optimizer=True)
        other._costs = {}
        other._memories = {}
        other._place(self.fleet)
        return other

    # ---- queries of a search ----

    @cached_property
    def node_types(self) -> tuple[NodeType, ...]:
        """Node types of the fleet, in order of appearance."""
        return tuple(dict.fromkeys(node.node_type for node in self.fleet.nodes))

    def layer_costs(
        self, node_type: NodeType, tp_degree: int, microbatch: int, share: TensorShare | None = None
    ) -> LayerCosts:
        """Return seconds and bytes of every layer on `tp_degree` GPUs of one node of that type.

        The arrays follow `assumed` and are cached. share: the share of one of the GPUs, if they are
        uneven.
        """
        key = (node_type, tp_degree, microbatch, share)
        if key not in self._costs:
            compute = self.stage_formats.of_type(node_type.gpu_type)
            times = self._times(
                node_type.gpu_type, compute, tp_degree, microbatch, self.assumed.recompute, share
            )
            slowdown = node_type.slowdown
            forward_s = times.forward_s * slowdown
            backward_s = times.backward_s * slowdown
            if tp_degree > 1 and self.choices.expert_dispatch != "sum":
                added = self._dispatch_s(times, node_type, tp_degree, microbatch)
                forward_s = forward_s + added[0]
                backward_s = backward_s + added[1]
            memory = self._assumed_memory(compute, tp_degree, microbatch, share)
            self._costs[key] = LayerCosts(
                forward_s=forward_s,
                backward_s=backward_s,
                update_s=self._update_s(node_type, times, memory) / self.assumed.holders,
                state_bytes=memory.state_bytes,
                activation_bytes=memory.activation_bytes,
                peak_bytes=memory.peak_bytes,
                sync_bytes=self._sync_bytes(tp_degree if share is None else 1 / share.fraction),
                fixed_bytes=self.fixed_bytes(node_type) + self._assumed_communicators(tp_degree),
                border_bytes=self.parameters.border_messages
                * self.stage_formats.border_bytes(microbatch, compute, compute),
                limit_bytes=self.limit_bytes(node_type),
                estimated=times.estimated,
            )
        return self._costs[key]

    def _dispatch_s(
        self, times: LayerTimes, node_type: NodeType, tp_degree: int, microbatch: int
    ) -> tuple[Floats, Floats]:
        """Return the seconds that the way which `choices` allows adds to each layer's passes.

        auto: the faster way of each layer, so that no stage of a plan is faster.
        """
        recomputes = self.assumed.recompute != "none"
        group = self.dispatch.even_group(node_type, tp_degree, microbatch, recomputes=recomputes)
        forward_s, backward_s = self.dispatch.added_by_layer(times, group)
        if self.choices.expert_dispatch == "auto":
            is_faster = forward_s + backward_s < 0
            forward_s = forward_s * is_faster
            backward_s = backward_s * is_faster
        return forward_s, backward_s

    def _update_s(self, kind: NodeType, times: LayerTimes, memory: MemoryTerms) -> Floats:
        """Return the seconds of each layer's update where its state is, with whole state on a
        worker.
        """
        if self.parameters.offload_optimizer:
            compute = self.stage_formats.of_type(kind.gpu_type)
            return memory.host_bytes / OPTIMIZER_BYTES * self.offloaded_s(kind, compute)
        return times.update_s * kind.slowdown

    def offloaded_s(self, kind: NodeType, compute: str) -> float:
        """Return the seconds of one parameter's update in host memory.

        compute: format of the weights that go up.
        """
        return offloaded_update_s(kind, VALUE_BYTES[compute], self.parameters)

    def layer_times(self, gpu_type: str, tp_degree: int, microbatch: int) -> LayerTimes:
        """Return forward, backward and update seconds of every layer.

        The backward includes what stages with the default recomputation recompute.
        """
        compute = self.stage_formats.of_type(gpu_type)
        return self._times(gpu_type, compute, tp_degree, microbatch, self.recompute)

    def _times(
        self,
        gpu_type: str,
        compute: str,
        tp_degree: int,
        microbatch: int,
        recompute: Recompute,
        share: TensorShare | None = None,
    ) -> LayerTimes:
        """Return the seconds of every layer where it computes in one format."""
        return self.layer_time_model(compute).times(
            gpu_type, tp_degree, microbatch, recompute, share
        )

    def layer_time_model(self, compute: str) -> LayerTimeModel:
        """Return the model of layer times in one format."""
        if compute not in self._layer_times:
            self._layer_times[compute] = LayerTimeModel(
                self.profile,
                self.spec,
                self.model,
                compute,
                self.sequence_length,
                self.parameters,
                partial(self._tp_communication_s, compute),
            )
        return self._layer_times[compute]

    def rates(self, plan: Plan) -> dict[str, dict[str, str]]:
        """Return precision, basis and source of block times by GPU type in use.

        The precision is the format of the type's first stage. The basis is measured or estimated;
        the source is what the times are made from.
        """
        formats = self.formats_in_use(plan)
        found = {}
        for gpu_type, used in sorted(formats.items()):
            basis, source = self.layer_time_model(used[0]).basis(gpu_type)
            found[gpu_type] = {"precision": used[0], "basis": basis, "source": source}
        return found

    def formats_in_use(self, plan: Plan) -> dict[str, list[str]]:
        """Return the formats in which the stages of each GPU type compute, in plan order."""
        found: dict[str, list[str]] = {}
        for stage in plan.stages:
            compute = self.stage_formats.of(stage)
            for gpu_type in sorted({self.fleet.gpu_type(worker) for worker in stage.workers}):
                used = found.setdefault(gpu_type, [])
                if compute not in used:
                    used.append(compute)
        return found

    def fixed_bytes(self, node_type: NodeType) -> float:
        """Return bytes that any worker needs, independent of its layers."""
        return (
            self.parameters.context_bytes
            + self.parameters.context_share * node_type.gpu_memory_bytes
        )

    def limit_bytes(self, node_type: NodeType) -> float:
        """Return bytes of a GPU that a plan may use: its memory less the margin."""
        return (1.0 - self.parameters.memory_margin) * node_type.gpu_memory_bytes

    def _assumed_memory(
        self, compute: str, tp_degree: int, microbatch: int, share: TensorShare | None
    ) -> MemoryTerms:
        memory = self._memory(compute, tp_degree, microbatch, self.assumed.recompute, share).shared(
            self.assumed.holders
        )
        if self.assumed.at_least is not None:
            least = self._memory(compute, tp_degree, microbatch, self.assumed.at_least, share)
            memory = replace(
                memory, activation_bytes=np.minimum(memory.activation_bytes, least.activation_bytes)
            )
        return memory

    def _assumed_communicators(self, tp_degree: int) -> float:
        """Return bytes of a worker's communicators: at least, or in most plans."""
        alone = len(self.fleet.workers) == 1 or self.assumed.at_least is not None
        if tp_degree > 1:
            number = LEAST_OF_A_GROUP
        else:
            number = 0 if alone else MOSTLY
        return number * self.parameters.communicator_bytes

    @property
    def stage_overhead_s(self) -> float:
        """Seconds that each forward and each backward of a stage takes beyond its layers."""
        return self.parameters.stage_overhead_s

    def activation_message_bytes(self, microbatch: int) -> float:
        """Return bytes of one microbatch's hidden states in the job's precision.

        Their gradient has as many.
        """
        return self.stage_formats.inside_bytes(microbatch, self.precision)

    def boundary_s(
        self,
        sender: NodeType,
        receiver: NodeType,
        microbatch: int,
        *,
        same_node: bool = False,
        tp_degree: int = 1,
        leaving: float = 1.0,
        arriving: float = 1.0,
    ) -> float:
        """Return seconds of one microbatch's transfer over a stage boundary, in one direction.

        The receiver is a group of `tp_degree` GPUs of one node. leaving, arriving: such groups for
        which transfers leave the sender's node, and arrive at the receiver's node.
        """
        slices = tp_degree if self.parameters.sliced_boundaries and not same_node else 1
        each = 0.0 if same_node else float(tp_degree)
        formats = (self.stage_formats.of_type(kind.gpu_type) for kind in (sender, receiver))
        return self._boundaries.hop_s(
            sender,
            receiver,
            self.stage_formats.border_bytes(microbatch, *formats),
            same_node,
            slices,
            max(1.0, leaving * each),
            max(1.0, arriving * each),
        )

    def sync_s(
        self,
        members: Sequence[tuple[str, NodeType]],
        num_bytes: float,
        *,
        flows: float | Mapping[str, float] = 1.0,
    ) -> float:
        """Return seconds of one gradient all-reduce of `num_bytes` over workers.

        members: (node name, node type). flows: rings that share each NIC, or a mapping of node to
        the rings that share its NIC.
        """
        return self.links.all_reduce_s(members, num_bytes, flows)

    def tied_sync_bytes(self, tp_degree: float) -> float:
        """Return gradient bytes of the tied embedding on one worker.

        They are in `sync_bytes` of the embedding and of the head, although a stage that holds both
        sums them once.
        """
        return self.spec.tied_parameters / tp_degree * self.parameters.sync_bytes_per_parameter

    def _sync_bytes(self, tp_degree: float) -> Floats:
        layers = (self.spec.embedding, *self.spec.blocks, self.spec.head)
        width = self.parameters.sync_bytes_per_parameter
        found = np.array([layer.parameters_per_worker(tp_degree) * width for layer in layers])
        found[-1] += self.tied_sync_bytes(tp_degree)
        return found

    def _memory(
        self,
        compute: str,
        tp_degree: int,
        microbatch: int,
        recompute: Recompute,
        share: TensorShare | None = None,
    ) -> MemoryTerms:
        key = (compute, tp_degree, microbatch, recompute, share)
        if key not in self._memories:
            spec, cut = (
                (self.spec, tp_degree)
                if share is None
                else (self.spec.with_share(share), 1 / share.fraction)
            )
            memory = memory_terms(
                spec,
                self.sequence_length,
                compute,
                cut,
                microbatch,
                recompute,
                self.parameters,
            )
            if self.parameters.sequence_parallel and tp_degree > 1 and recompute != "selective":
                inside = self.stage_formats.inside_bytes(microbatch, compute)
                value_bytes = inside / self.spec.hidden_size
                by_modules = self.parameters.autograd_activations
                memory = with_cut_sequence(
                    memory, spec, value_bytes, tp_degree, recompute, by_modules
                )
            if self.parameters.offload_optimizer:
                memory = memory.offloaded()
            self._memories[key] = memory
        return self._memories[key]

    def decoder(self, microbatch: int) -> Decoder | None:
        """Return the model's graph for a microbatch, for SPMD programs; None if none is known."""
        if microbatch not in self._decoders:
            self._decoders[microbatch] = self._decoder(microbatch)
        return self._decoders[microbatch]

    def _tp_communication_s(
        self, compute: str, gpu_type: str, tp_degree: int, microbatch: int
    ) -> float:
        """Return seconds of the two all-reduces of the hidden states, a block and direction.

        Source: Shoeybi et al., Megatron-LM, 2019, section 3.
        """
        kind = next((k for k in self.node_types if k.gpu_type == gpu_type), None)
        if tp_degree == 1 or kind is None:
            return 0.0
        members = [("node", kind)] * tp_degree
        num_bytes = self.stage_formats.inside_bytes(microbatch, compute)
        return 2 * self.links.all_reduce_s(members, num_bytes)

    # ---- the whole plan ----

    def predict(self, plan: Plan) -> Prediction:
        """Cost a plan with its batch and microbatches.

        The latest predictions are cached. ConfigError if the plan is not whole or names unknown
        workers.
        """
        known = self._predictions.get(plan)
        if known is None:
            known = self._predictions[plan] = self._predict(plan)
            while len(self._predictions) > max(1, _REMEMBERED // len(self.fleet.workers)):
                del self._predictions[next(iter(self._predictions))]
        return known

    def _predict(self, plan: Plan) -> Prediction:
        check_plan(plan, self.spec.num_layers, exact_batch=False)
        self.dispatch.check(plan)
        if self.parameters.full_shard:
            plan = share_out_all(plan)
        if plan.spmd is not None:
            breakdown, used, estimated = breakdown_of_program(self, plan)
            step = sum(breakdown.values())
        else:
            simulation = self.simulate(plan)
            step = simulation.step_time_s
            breakdown = self._breakdown(simulation)
            used = self.memory_by_worker(plan)
            terms = [each for p in plan.pipelines for each in self._stages.every_terms(p)]
            estimated = tuple(dict.fromkeys(note for each in terms for note in each.estimated))
        sequences = sum(pipeline.num_sequences for pipeline in plan.pipelines)
        tokens = sequences * self.sequence_length
        nodes_usd = self.nodes_usd_per_hour(plan)
        transfers = self.zone_transfers(plan)
        transfers_usd = sum(each.usd for each in transfers) / step * 3600
        usd = None if nodes_usd is None else nodes_usd + transfers_usd
        limits = {w: int(self.limit_bytes(self.fleet.node_of(w).node_type)) for w in plan.workers}
        return Prediction(
            step_time_s=step,
            sequences_per_s=sequences / step,
            tokens_per_s=tokens / step,
            usd_per_hour=usd,
            nodes_usd_per_hour=nodes_usd,
            transfers=transfers,
            usd_per_million_tokens=None if usd is None else usd / 3600 * step / tokens * 1e6,
            breakdown_s=breakdown,
            memory_bytes_by_worker=used,
            memory_limit_bytes_by_worker=limits,
            estimated=estimated,
            plan=plan,
            not_staged=self.memory_of.not_staged(plan) if plan.spmd is None else None,
            not_offloaded=self.memory_of.not_offloaded(plan) if plan.offloads else None,
            tied_embeddings=self.spec.tied_embeddings,
            key_value_units=self.spec.key_value_units if plan.spmd is None else 0,
        )

    def simulate(self, plan: Plan) -> Simulation:
        """Simulate one step: every pipeline's 1F1B, then gradient sync, then updates."""
        ends_s = tuple(self._ends_of_stages(plan, pipeline) for pipeline in plan.pipelines)
        ends: dict[str, float] = {}
        for pipeline, stage_ends_s in zip(plan.pipelines, ends_s, strict=True):
            for stage, end_s in zip(pipeline.stages, stage_ends_s, strict=True):
                ends.update(dict.fromkeys(stage.workers, end_s))
        # with all of it shared out, gradients are reduced beside the backward (`pipeline_times`)
        jobs = () if self.parameters.full_shard else self.memory_of.sync_jobs(plan)
        update = dict[str, float]()
        sharing = sharing_of(plan)
        for pipeline in plan.pipelines:
            terms = self._stages.every_terms(pipeline, sharing)
            for stage, each in zip(pipeline.stages, terms, strict=True):
                update.update(dict.fromkeys(stage.workers, each.update_s))
        sync = simulate_sync(jobs, ends, update, self.fleet, self.links, self._rings)
        return Simulation(ends_s, sync, sync.end_s + self.parameters.step_overhead_s)

    def pipelines_s(self, plan: Plan) -> list[float]:
        """Return the seconds at which each pipeline has done its part of a step."""
        return [max(self._ends_of_stages(plan, pipeline)) for pipeline in plan.pipelines]

    def pipelines_at_least_s(self, plan: Plan) -> float:
        """A lower bound of the slowest pipeline's part of a step, without simulating it."""
        return max(
            pipeline_bound_s(self.pipeline_times(plan, pipeline), pipeline.num_microbatches)
            for pipeline in plan.pipelines
        )

    def work_at_least_s(self, plan: Plan) -> float:
        """A lower bound of the slowest pipeline's part of a step, from its stages' work alone.

        It holds for any number of microbatches in flight.
        """
        slowest_s = 0.0
        for pipeline in plan.pipelines:
            before_s = 0.0
            for terms in self._stages.every_terms(pipeline):
                work_s = terms.forward_s + terms.backward_s
                slowest_s = max(slowest_s, before_s + pipeline.num_microbatches * work_s)
                before_s += work_s
            slowest_s = max(slowest_s, before_s)
        return slowest_s

    def step_at_least_s(self, plan: Plan) -> float:
        """A lower bound of the step time, without simulating it.

        The first stage of a pipeline ends last. Its gradients are summed after that, then those of
        a tied embedding, and no update starts before: each sum takes as long as its ring alone.
        """
        ends_s = [
            pipeline_bound_s(self.pipeline_times(plan, pipeline), pipeline.num_microbatches)
            for pipeline in plan.pipelines
        ]
        slowest = max(range(len(ends_s)), key=ends_s.__getitem__)
        if self.parameters.full_shard:
            return ends_s[slowest]
        worker = plan.pipelines[slowest].stages[0].workers[0]
        rings = Rings(self.fleet, self.links, self._rings)
        summed_s = {False: 0.0, True: 0.0}
        for job in self.memory_of.sync_jobs(plan):
            if worker in job.members:
                summed_s[job.tied] = max(summed_s[job.tied], rings.of(job).seconds)
        sharing = sharing_of(plan)
        updates_s: list[float] = []
        for pipeline in plan.pipelines:
            updates_s += [terms.update_s for terms in self._stages.every_terms(pipeline, sharing)]
        return (ends_s[slowest] + sum(summed_s.values()) + max(updates_s)) * (1 - 1e-9)

    def _breakdown(self, simulation: Simulation) -> dict[str, float]:
        pipeline = max(map(max, simulation.ends_s))
        sync = simulation.sync
        return {
            "pipeline": pipeline,
            "grad_sync": max(0.0, sync.gradients_end_s - pipeline),
            "tied_embedding_sync": max(0.0, sync.tied_end_s - max(pipeline, sync.gradients_end_s)),
            "optimizer": sync.end_s - max(pipeline, sync.gradients_end_s, sync.tied_end_s),
            "overhead": self.parameters.step_overhead_s,
        }

    def _ends_of_stages(self, plan: Plan, pipeline: Pipeline) -> tuple[float, ...]:
        times = self.pipeline_times(plan, pipeline)
        key = (times, pipeline.num_microbatches)
        if (known := self._ends.get(key)) is None:
            known = self._ends[key] = ends_of_stages(times, pipeline.num_microbatches)
            if len(self._ends) > _PIPELINES:
                del self._ends[next(iter(self._ends))]
        return known

    def pipeline_times(self, plan: Plan, pipeline: Pipeline) -> PipelineTimes:
        """Return stage and boundary seconds of one pipeline of a plan.

        NICs are shared with the plan's other pipelines.
        """
        terms = self._stages.every_terms(pipeline)
        seconds = [(each.forward_s, each.backward_s) for each in terms]
        if self.parameters.full_shard:
            seconds = [
                self._gathered_s(plan, stage, *each)
                for stage, each in zip(pipeline.stages, seconds, strict=True)
            ]
        send_forward, send_backward = self._boundaries.of(plan, pipeline)
        return PipelineTimes(
            forward_s=tuple(f for f, _ in seconds),
            backward_s=tuple(b for _, b in seconds),
            send_forward_s=tuple(self.spec.forward_passes * each for each in send_forward),
            send_backward_s=tuple(send_backward),
            transfers=self.parameters.transfers,
            most_in_flight=pipeline.most_in_flight,
        )

    def _gathered_s(
        self, plan: Plan, stage: Stage, forward_s: float, backward_s: float
    ) -> tuple[float, float]:
        """Return seconds of a microbatch in a stage that gathers weights and reduces gradients.

        Both run beside its work.
        """
        all_reduce_s = 0.0
        for job in self.memory_of.sync_jobs(plan):
            if stage.workers[0] in job.members:
                nodes = map(self.fleet.node_of, job.members)
                members = [(node.name, node.node_type) for node in nodes]
                all_reduce_s += self.sync_s(members, job.num_bytes)
        return overlapped_s(forward_s, backward_s, all_reduce_s, stage.num_layers)

    def working_ahead(self, plan: Plan, most: int = MOST_AHEAD) -> Plan:
        """Return the plan as it would be run.

        Each stage computes in the format of its GPU types. Shares of uneven stages follow what
        their GPUs can carry. Stages then get what they do for memory, if there is a choice
        (`Assumed.choices`), and those with experts the faster way of tokens to them. State goes to
        host memory if all plans have it there. Last, if transfers run beside the work, stages keep
        as many microbatches in flight as fit, at most `most` more at each stage than at the next.
        """
        if self.parameters.offload_optimizer:
            plan = plan.offloading()
        plan = self.with_formats(plan)
        plan = self.memory_of.with_shares(plan)
        if self.assumed.choices:
            plan = self.memory_of.with_choices(plan, self.assumed.choices, self.assumed.holders > 1)
        plan = self.with_dispatch(plan)
        return (
            plan
            if self.parameters.transfers != "none"
            else self.memory_of.working_ahead(plan, most)
        )

    def with_formats(self, plan: Plan) -> Plan:
        """Return the plan with the format of each stage's GPU types, where not the precision."""
        if not self.formats or plan.spmd is not None:
            return plan
        pipelines = []
        for pipeline in plan.pipelines:
            stages = tuple(self._with_format(stage) for stage in pipeline.stages)
            pipelines.append(replace(pipeline, stages=stages))
        return replace(plan, pipelines=tuple(pipelines))

    def _with_format(self, stage: Stage) -> Stage:
        compute = self.stage_formats.of(replace(stage, compute=None))
        for each in COMPUTE_FORMATS:
            if each == compute != self.precision:
                return replace(stage, compute=each)
        return replace(stage, compute=None)

    def with_dispatch(self, plan: Plan) -> Plan:
        """Return the plan with the way of tokens to experts that `choices` gives each stage."""
        if self.choices.expert_dispatch == "sum" or plan.spmd is not None:
            return plan
        pipelines = []
        for pipeline in plan.pipelines:
            numbers = range(len(pipeline.stages))
            stages = tuple(self._with_dispatch(pipeline, number) for number in numbers)
            pipelines.append(replace(pipeline, stages=stages))
        return replace(plan, pipelines=tuple(pipelines))

    def _with_dispatch(self, pipeline: Pipeline, index: int) -> Stage:
        by_sum, sending = self._ways_of(pipeline.stages[index])
        if not self.dispatch.applies(by_sum):
            return by_sum
        if self.choices.expert_dispatch == "all_to_all":
            return sending
        if self.dispatch_gain_s(pipeline, index) <= 0:
            return by_sum
        terms = self._stages.terms(_with_stage(pipeline, index, sending), index)
        return sending if terms.room(0.0) >= pipeline.in_flight(index) else by_sum

    def _ways_of(self, stage: Stage) -> tuple[Stage, Stage]:
        """Return the stage with a sum, and with all-to-all.

        The latter is sequence parallel if it can be: its ranks then have their parts of the tokens
        already. A sum carries the same bytes either way.
        """
        was_cut = stage.sequence_parallel and stage.expert_dispatch != "all_to_all"
        by_sum = replace(stage, expert_dispatch=None, sequence_parallel=was_cut)
        recompute = stage.recompute or self.recompute
        may_cut = self.parameters.may_cut_sequence and recompute != "selective"
        sending = replace(
            by_sum, expert_dispatch="all_to_all", sequence_parallel=was_cut or may_cut
        )
        return by_sum, sending

    def dispatch_gain_s(self, pipeline: Pipeline, index: int) -> float:
        """Return the seconds that all-to-all saves over a sum in one stage.

        They are those of a microbatch in both passes.
        """
        by_sum, sending = (
            sum(self.stage_seconds(_with_stage(pipeline, index, each), index))
            for each in self._ways_of(pipeline.stages[index])
        )
        return by_sum - sending

    def ways_ahead(self, plan: Plan) -> list[Plan]:
        """Return the plan for each number by which stages may keep more microbatches than the next.

        Fewest in flight first; each plan once.
        """
        return list(
            dict.fromkeys(self.working_ahead(plan, most) for most in range(1, MOST_AHEAD + 1))
        )

    def stage_seconds(
        self, pipeline: Pipeline, index: int, *, rated: bool = False
    ) -> tuple[float, float]:
        """Return forward and backward seconds of one microbatch in one stage.

        They are its slowest worker's. rated: as if no node were slowed down.
        """
        if rated:
            return self._stages.seconds(pipeline, index, rated=True)
        terms = self._stages.terms(pipeline, index)
        return terms.forward_s, terms.backward_s

    def work_s(self, pipeline: Pipeline) -> float:
        """Forward and backward seconds of one microbatch in the slowest stage."""
        return max(each.forward_s + each.backward_s for each in self._stages.every_terms(pipeline))

    def memory_by_worker(self, plan: Plan) -> dict[str, int]:
        """Peak bytes of every worker of a plan."""
        return self.memory_of.by_worker(plan)

    def zone_transfers(self, plan: Plan) -> tuple[ZoneTransfer, ...]:
        """Return the bytes of a step between zones.

        Empty for SPMD programs, which stay in one zone.
        """
        if len(self.zones) < 2 or plan.spmd is not None:
            return ()
        carried = bytes_between_zones(
            plan,
            self.fleet,
            self.memory_of.sync_jobs(plan),
            self.stage_formats,
            sliced=self.parameters.sliced_boundaries,
        )
        zones = self.links.zones
        return tuple(
            ZoneTransfer(pair, num_bytes, zones.usd_per_gb(*pair))
            for pair, num_bytes in sorted(carried.items())
        )

    def ignoring_zones(self) -> "CostModel":
        """Return this model as if all nodes were in one zone."""
        other = copy.copy(self)
        other.links = replace(self.links, zones=ZoneTable(ignored=True))
        other._place(self.fleet)
        return other

    def nodes_usd_per_hour(self, plan: Plan) -> float | None:
        """Return the price of the nodes in use; None if one has none."""
        nodes = {
            node.name: node.node_type.usd_per_hour for node in map(self.fleet.node_of, plan.workers)
        }
        prices = list(nodes.values())
        return (
            None
            if any(price is None for price in prices)
            else sum(price for price in prices if price is not None)
        )


def _with_stage(pipeline: Pipeline, index: int, stage: Stage) -> Pipeline:
    """Return the pipeline with another stage in a place."""
    stages = (*pipeline.stages[:index], stage, *pipeline.stages[index + 1 :])
    return replace(pipeline, stages=stages)
