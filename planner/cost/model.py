"""Cost model: the seconds, bytes and dollars of a plan's step.

All of it is a function of the arguments alone. A search asks the model's parts: `layers` for arrays
over the layers of one way to use a node type, `boundaries` for transfers between stages, `links`
for all-reduces.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.cost.basis import CostBasis, Measurements, Workload
from planner.cost.eviction import evict_oldest
from planner.cost.layers.expert_dispatch import DispatchCosts
from planner.cost.layers.layer_cost_model import CostsByUse, LayerCostModel
from planner.cost.layers.layer_costs import Assumed, MemoryChoices
from planner.cost.layers.layer_seconds import require_dtype
from planner.cost.layers.layer_times import LayerTimesByFormat, ModelsByFormat
from planner.cost.links.boundaries import BoundaryCosts, WaysByLikeness
from planner.cost.links.sync import KnownRings
from planner.cost.links.traffic import Links
from planner.cost.links.zone_transfers import PlanPrices
from planner.cost.memory.plan_memory import PlanMemory, Synced
from planner.cost.memory.worker_memory import TermsByUse, WorkerMemory
from planner.cost.parameters import CostParameters
from planner.cost.prediction import Prediction
from planner.cost.programs import ProgramCosts
from planner.cost.stage_choices import StageChoices
from planner.cost.stage_costs import StageCosts, TermsByStage
from planner.cost.stage_formats import StageFormats
from planner.cost.step_times import StepTimes
from planner.errors import ConfigError
from planner.inputs.fleet import Fleet, NodeType
from planner.inputs.zones import ZoneTable, known_zones
from planner.plans.plan import Plan
from planner.plans.plan_checks import check_plan
from planner.spmd.graph import Decoder

_REMEMBERED = 4096  # predictions times GPUs


@dataclass(frozen=True)
class _Caches:
    """Caches of a cost model.

    A model that differs from another one shares those that the difference does not affect. nodes: a
    node type of each GPU type, by which `layer_times` costs all-reduces.
    """

    layer_times: ModelsByFormat = field(default_factory=dict)
    nodes: dict[str, NodeType] = field(default_factory=dict)
    layer_costs: CostsByUse = field(default_factory=dict)
    memory_terms: TermsByUse = field(default_factory=dict)
    synced: Synced = field(default_factory=dict)
    stage_terms: TermsByStage = field(default_factory=dict)
    ways: WaysByLikeness = field(default_factory=dict)
    rings: KnownRings = field(default_factory=dict)
    decoders: dict[int, Decoder | None] = field(default_factory=dict)

    def without_stages(self) -> "_Caches":
        """Return the same caches, but for empty ones of stages, boundaries and rings."""
        return replace(self, stage_terms={}, ways={}, rings={})


class CostModel:
    """Costs plans of one workload on one fleet.

    choices: savings of memory and ways to experts among which a search may choose; None: none.

    The parts own what they answer: `layer_times` and `layers` the seconds and all costs of single
    layers, `worker_memory` what a worker always needs and may use, `stages` and `boundaries` the
    stages of a plan and what lies between them, `memory_of` the bytes of a plan, `steps` its
    seconds, `prices` its dollars, and `stage_choices` what a search leaves open.
    """

    def __init__(
        self,
        fleet: Fleet,
        workload: Workload,
        measurements: Measurements | None = None,
        parameters: CostParameters | None = None,
        choices: MemoryChoices | None = None,
    ) -> None:
        require_dtype(workload.precision)
        self.fleet = fleet
        self.workload = workload
        self.spec = workload.spec
        self.precision = workload.precision
        self.sequence_length = workload.sequence_length
        self.formats = workload.other_formats
        self.measurements = measurements or Measurements()
        self.parameters = parameters or CostParameters()
        self.choices = choices or MemoryChoices((workload.recompute,))
        self.assumed = Assumed(workload.recompute)
        self.links = Links(self.parameters, self.measurements.links, self.measurements.zones)
        self._caches = _Caches()
        self._make_parts()

    def _make_parts(self) -> None:
        """Make all parts from the attributes that the constructor sets."""
        workload = self.workload
        parameters = self.parameters
        caches = self._caches
        self.zones: tuple[str, ...] = ()
        if not self.links.zones.ignored:
            self.zones = known_zones({kind.zone for kind in self.fleet.node_types})
        self.stage_formats = StageFormats(
            self.fleet,
            workload.precision,
            self.formats,
            workload.sequence_length * workload.spec.hidden_size,
            parameters.scales_gradients,
        )
        self._basis = CostBasis(self.fleet, workload, parameters, self.links, self.stage_formats)
        self.layer_times = LayerTimesByFormat(
            self._basis, self.measurements, caches.layer_times, caches.nodes
        )
        self.worker_memory = WorkerMemory(self._basis, caches.memory_terms)
        self.dispatch = DispatchCosts(
            self._basis, self.layer_times.load_spread, self.choices.expert_dispatch
        )
        self.stages = StageCosts(
            self._basis, self.layer_times, self.worker_memory, self.dispatch, caches.stage_terms
        )
        self.boundaries = BoundaryCosts(
            self.fleet,
            self.links,
            self.stage_formats,
            self.stages.work_s,
            parameters.sliced_boundaries,
            caches.ways,
        )
        self.memory_of = PlanMemory(
            workload.spec, parameters, self.stages, self.boundaries, caches.synced
        )
        self.prices = PlanPrices(self._basis, self.zones, self.memory_of)
        self.steps = StepTimes(
            self._basis, self.stages, self.boundaries, self.memory_of, caches.rings
        )
        self._predictions: dict[Plan, Prediction] = {}
        self._make_assuming_parts()

    def _make_assuming_parts(self) -> None:
        """Make the parts that depend on what is assumed of stages."""
        self.layers = LayerCostModel(
            self._basis,
            self.layer_times,
            self.worker_memory,
            self.dispatch,
            self.assumed,
            self._caches.layer_costs,
        )
        self.stage_choices = StageChoices(
            self._basis, self.stages, self.memory_of, self.dispatch, self.assumed
        )
        self.programs = ProgramCosts(
            self._basis, self.layers, self.worker_memory, self._caches.decoders
        )

    # ---- the same workload otherwise ----

    def with_fleet(self, fleet: Fleet) -> "CostModel":
        """Return this model on another fleet of its node types, or of some of them.

        Layers' seconds and bytes are shared, not recomputed.

        Raises:
            ConfigError: the fleet has a node type that this one does not have.
        """
        unknown = set(fleet.node_types) - set(self.fleet.node_types)
        if unknown:
            raise ConfigError(
                f"node type '{min(kind.name for kind in unknown)}' is not among those that the cost"
                " model knows"
            )
        other = copy.copy(self)
        other.fleet = fleet
        other._make_parts()
        return other

    def with_node_types(self, kinds: Mapping[NodeType, NodeType]) -> "CostModel":
        """Return this model with some node types replaced, on the same nodes.

        The replacements are slower or faster, or have other links or memories. The tensor-parallel
        communication in a layer's time scales with the layer.
        """
        other = copy.copy(self)
        nodes = []
        for node in self.fleet.nodes:
            kind = kinds.get(node.node_type, node.node_type)
            nodes.append(replace(node, node_type=kind))
        other.fleet = replace(self.fleet, nodes=tuple(nodes))
        other.links = self.links.with_node_types(kinds)
        # times and bytes of layers stay: they are by GPU type and format, not by node type
        other._caches = replace(self._caches.without_stages(), layer_costs={})
        other._make_parts()
        return other

    def with_assumption(self, assumed: Assumed) -> "CostModel":
        """Return this model with `layers` and `stage_choices` under another assumption.

        Predictions do not change: they use what a plan itself says.
        """
        other = copy.copy(self)
        other.assumed = assumed
        other._caches = replace(self._caches, layer_costs={})
        other._make_assuming_parts()
        return other

    def with_cut_sequences(self) -> "CostModel":
        """Return this model with all tensor-parallel stages sequence parallel, none selective."""
        others = tuple(each for each in self.choices.recompute if each != "selective")
        other = self._with_parameters(replace(self.parameters, sequence_parallel=True))
        # searches read these choices; the parts are made with the parameters alone
        other.choices = replace(self.choices, recompute=others)
        return other

    def with_offloading(self) -> "CostModel":
        """Return the same model with masters and moments of all plans in host memory."""
        return self._with_parameters(replace(self.parameters, offload_optimizer=True))

    def with_offloaded_inputs(self) -> "CostModel":
        """Return the same model whose stages may also keep inputs of blocks in host memory."""
        other = copy.copy(self)
        other.choices = replace(self.choices, recompute=(*self.choices.recompute, "offload"))
        return other

    def _with_parameters(self, parameters: CostParameters) -> "CostModel":
        """Return this model with other bytes of layers, and with the same links."""
        other = copy.copy(self)
        other.parameters = parameters
        other._caches = replace(self._caches.without_stages(), layer_costs={}, memory_terms={})
        other._make_parts()
        return other

    def without_zones(self) -> "CostModel":
        """Return this model as if all nodes were in one zone."""
        other = copy.copy(self)
        other.links = replace(self.links, zones=ZoneTable(ignored=True))
        other._caches = self._caches.without_stages()
        other._make_parts()
        return other

    # ---- the whole plan ----

    def predict(self, plan: Plan) -> Prediction:
        """Cost a plan with its batch and microbatches.

        The latest predictions are cached. ConfigError if the plan is not whole or names unknown
        workers.
        """
        known = self._predictions.get(plan)
        if known is None:
            known = self._predictions[plan] = self._predict(plan)
            # a prediction has entries for each worker, so large fleets keep fewer
            most = max(1, _REMEMBERED // len(self.fleet.workers))
            evict_oldest(self._predictions, most)
        return known

    def _predict(self, plan: Plan) -> Prediction:
        check_plan(plan, self.spec.num_layers, exact_batch=False)
        self.dispatch.check(plan)
        if self.parameters.full_shard:
            plan = plan.map_stages(lambda stage: replace(stage, shard_optimizer=True))
        if plan.spmd is not None:
            breakdown, used, estimated = self.programs.breakdown(plan)
            step = sum(breakdown.values())
        else:
            simulation = self.steps.simulate(plan)
            step = simulation.step_time_s
            breakdown = self.steps.breakdown(simulation)
            used = self.memory_of.by_worker(plan)
            estimated = self.stages.estimates(plan)

        sequences = sum(pipeline.num_sequences for pipeline in plan.pipelines)
        tokens = sequences * self.sequence_length
        nodes_usd = self.prices.nodes_usd_per_hour(plan)
        transfers = self.prices.zone_transfers(plan)
        usd = None
        usd_per_million_tokens = None
        if nodes_usd is not None:
            transfers_usd = sum(each.usd for each in transfers) / step * 3600
            usd = nodes_usd + transfers_usd
            usd_per_million_tokens = usd / 3600 * step / tokens * 1e6

        return Prediction(
            step_time_s=step,
            sequences_per_s=sequences / step,
            tokens_per_s=tokens / step,
            usd_per_hour=usd,
            nodes_usd_per_hour=nodes_usd,
            transfers=transfers,
            usd_per_million_tokens=usd_per_million_tokens,
            breakdown_s=breakdown,
            memory_bytes_by_worker=used,
            memory_limit_bytes_by_worker=self._limits_bytes(plan),
            estimated=estimated,
            plan=plan,
            not_staged=self.memory_of.not_staged(plan) if plan.spmd is None else None,
            not_offloaded=self.memory_of.not_offloaded(plan),
            tied_embeddings=self.spec.tied_embeddings,
            key_value_units=self.spec.key_value_units if plan.spmd is None else 0,
        )

    def over_full(self, plan: Plan) -> dict[str, float]:
        """Return the share of its memory that each worker needs which does not fit.

        It takes a fraction of a prediction's time.
        """
        if self.parameters.full_shard:
            plan = plan.map_stages(lambda stage: replace(stage, shard_optimizer=True))
        used = self.memory_of.by_worker(plan)
        most = self._limits_bytes(plan)
        return {
            worker: used[worker] / most[worker] for worker in most if used[worker] > most[worker]
        }

    def _limits_bytes(self, plan: Plan) -> dict[str, int]:
        """Return the bytes that a plan may use of each worker's memory."""
        found = dict[str, int]()
        for worker in plan.workers:
            kind = self.fleet.node_of(worker).node_type
            found[worker] = int(self.worker_memory.limit_bytes(kind))
        return found
