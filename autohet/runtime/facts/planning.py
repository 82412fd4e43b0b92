"""Conversion of a job document to the planner's inputs: model spec, profile, links, precision."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from autohet.runtime.facts.model_facts import (
    decoder,
    planned_spec,
    training_refusal,
    with_adapter,
    with_muon,
)
from autohet.runtime.job import Job
from autohet.runtime.job.emulated_profile import emulated_profile
from autohet.runtime.step.precision import other_formats
from planner.cost.basis import Measurements, Workload
from planner.cost.layers.layer_costs import MemoryChoices
from planner.cost.links.traffic import LinkTable, read_links
from planner.cost.memory.host_memory import Kept
from planner.cost.model import CostModel
from planner.cost.parameters import MIN_COMPILED_PARAMETERS, CostParameters
from planner.errors import ConfigError
from planner.inputs.fleet import Fleet
from planner.inputs.profile import ProfileTable, read_profile
from planner.inputs.zones import EC2_ZONES, ZoneTable
from planner.plans.communicators import COMMUNICATOR_BYTES
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import ComputeFormat, Recompute

MAX_EMULATED_MICROBATCH = 64


@dataclass(frozen=True)
class PlanningInputs:
    """Planner inputs of a job.

    profile: None means the bundled measurements. links: None means labels and catalogue. zones:
    links between zones, from the cluster file.
    """

    job: Job
    spec: ModelSpec
    profile: ProfileTable | None
    links: LinkTable | None
    parameters: CostParameters
    zones: ZoneTable = EC2_ZONES

    def cost_model(
        self,
        fleet: Fleet,
        *,
        sequence_length: int | None = None,
        parameters: CostParameters | None = None,
        model: str | None = None,
        one_format: bool = False,
    ) -> CostModel:
        """Return the cost model of a fleet.

        A plan's own sequence length and model name may replace the job's. one_format: GPU types
        compute in the job's precision, whatever the job says of formats.
        """
        training = self.job.training
        types = () if one_format else fleet.gpu_types
        # What the job says of a type is looked up once.
        found: dict[str, ComputeFormat] = {}
        for gpu_type in types:
            if gpu_type not in self._formats_by_type:
                self._formats_by_type[gpu_type] = other_formats(self.job, [gpu_type])
            found |= self._formats_by_type[gpu_type]
        workload = Workload(
            self.spec,
            sequence_length or training.sequence_length,
            training.precision,
            recompute=self._stage_recompute,
            formats=found,
            decoder=partial(decoder, self.job),
        )
        measurements = Measurements(
            self.profile, model=model or self.job.name, links=self.links, zones=self.zones
        )
        return CostModel(
            fleet,
            workload,
            measurements,
            parameters or self.parameters,
            choices=self._choices,
        )

    @property
    def kept(self) -> Kept:
        """State that the job keeps in host memory."""
        return Kept(
            self.job.checkpoint.snapshot_every_steps > 0, self.job.checkpoint.replication_steps > 0
        )

    @cached_property
    def _formats_by_type(self) -> dict[str, dict[str, ComputeFormat]]:
        return {}

    @cached_property
    def _stage_recompute(self) -> Recompute:
        return self.job.training.stage_recompute

    @cached_property
    def _choices(self) -> MemoryChoices:
        """Memory choices that the job leaves to the planner.

        If `recompute` or `optimizer_sharding` is `if_needed`, an `auto` of the other means that
        too.
        """
        training = self.job.training
        recomputes: tuple[Recompute, ...] = (self._stage_recompute,)
        if training.recompute in ("auto", "if_needed"):
            recomputes = ("none", "selective", "full")
        # The state of adapters is small: sharing it out or offloading it would save nothing.
        trains_all = self.job.model.adapter is None
        wishes = {training.recompute, training.optimizer_sharding}
        dispatch = self.job.parallelism.expert_dispatch
        return MemoryChoices(
            recomputes,
            training.optimizer_sharding != "off" and trains_all,
            offload=training.offload == "if_needed" and trains_all and not self.spec.uses_muon,
            offload_inputs=training.recompute in ("auto", "if_needed"),
            only_if_needed="if_needed" in wishes,
            # without experts there is no choice, which searches need not look for
            expert_dispatch="sum" if self.spec.experts is None else dispatch,
        )

    def fleet(self, fleet: Fleet) -> Fleet:
        """Return the fleet that the planner sees.

        With an emulation, GPU memories are scaled by its `memory_scale`, and the host memory of
        nodes is unknown, since all nodes share this machine's.
        """
        emulation = self.job.emulation
        if emulation is None:
            return fleet
        scale = emulation.memory_scale
        scaled = {}
        for kind in {node.node_type for node in fleet.nodes}:
            memory_bytes = int(kind.gpu_memory_bytes * scale)
            scaled[kind] = replace(kind, gpu_memory_bytes=memory_bytes, host_memory_bytes=None)
        nodes = [replace(node, node_type=scaled[node.node_type]) for node in fleet.nodes]
        return Fleet(fleet.generation, tuple(nodes))

    @cached_property
    def training_refusal(self) -> str | None:
        """Reason why `autohet train` cannot run the job's model; None: it can."""
        return training_refusal(self.job)

    @property
    def activation_memory(self) -> str:
        """Source of predicted activation memory: `counted` or `estimated`.

        counted: on a traced block of the library; estimated: by a rule for all transformers.
        """
        return "estimated" if self.spec.blocks[0].autograd is None else "counted"

    @cached_property
    def training_flops(self) -> float:
        """FLOPs of one sequence, forward and backward."""
        return self.spec.training_flops(self.job.training.sequence_length)


def planning_inputs(
    job: Job,
    *,
    profile: str | Path | None = None,
    links: str | Path | None = None,
    zones: ZoneTable | None = None,
) -> PlanningInputs:
    """Read the files that the job names and return the planner's inputs.

    profile, links: paths that replace the job's. zones: from the cluster file, if there is one.
    """
    spec = planned_spec(job).at_length(job.training.sequence_length)
    spec = with_adapter(_with_data(with_muon(spec, job), job), job)
    if job.parallelism.expert_dispatch == "all_to_all" and spec.experts is None:
        raise ConfigError(
            "parallelism.expert_dispatch is all_to_all, but the model has no routed experts; leave"
            " it out"
        )
    profile = profile or job.parallelism.profile
    links = links or job.parallelism.links
    parameters = replace(
        CostParameters(),
        context_bytes=float(job.parallelism.memory_reserve_bytes),
        offload_optimizer=job.training.offload == "optimizer",
    )
    table = read_profile(profile) if profile else None
    if job.emulation is not None:
        table = table or _emulated(job)
        parameters = replace(parameters, context_bytes=0.0, context_share=0.0)
    elif job.training.device != "cpu":
        # On an H200 a share of 3% is 4.5 GB, where context and workspace take less than
        # memory_reserve_bytes (measured). Communicators are counted apart, so what is left of the
        # share is room for fragmentation: a margin of the limit, no part of the prediction.
        parameters = replace(
            parameters,
            compiles_blocks=_compiles_blocks(job, spec),
            communicator_bytes=float(COMMUNICATOR_BYTES),
            context_share=0.0,
            memory_margin=parameters.memory_margin + parameters.context_share,
        )
    measured = read_links(links) if links else None
    table_of_zones = zones or EC2_ZONES
    return PlanningInputs(job, spec, table, measured, parameters, table_of_zones)


def _compiles_blocks(job: Job, spec: ModelSpec) -> bool:
    """Return True if workers on GPUs compile their blocks, as `kernels.wants_compiled` decides."""
    adapter = job.model.adapter
    has_dropout = spec.has_dropout or (adapter is not None and adapter.dropout > 0)
    if has_dropout or job.training.compile_blocks is False:
        return False
    if job.training.compile_blocks is True:
        return True
    block = spec.blocks[0]
    return block.parameters >= MIN_COMPILED_PARAMETERS and block.experts is None


def _with_data(spec: ModelSpec, job: Job) -> ModelSpec:
    """Return the spec with attention over the lengths of the job's documents.

    It stays as it is, with attention over whole rows, unless documents are isolated and their data
    set is built on this machine.
    """
    if job.data is None or not job.data.isolates:
        return spec
    from autohet.runtime.data.build import find_dataset
    from autohet.runtime.step.length_work import with_lengths

    length = job.training.sequence_length
    dataset = find_dataset(job.data, length)
    squares = None if dataset is None else dataset.facts.mean_squared_length
    if squares is None:
        return spec
    return with_lengths(spec, length, squares)


def _emulated(job: Job) -> ProfileTable:
    """Return the profile of the job's emulation, in which all formats are as fast."""
    assert job.emulation is not None
    formats = (job.training.precision, *job.parallelism.named_formats.values())
    return emulated_profile(
        job.emulation,
        model=job.name,
        dtypes=tuple(dict.fromkeys(formats)),
        sequence_length=job.training.sequence_length,
        max_microbatch_sequences=MAX_EMULATED_MICROBATCH,
    )
