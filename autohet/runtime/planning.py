"""From a job document to what the planner needs: model spec, profile, links, precision."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from autohet.runtime.job import EmulationSection, Job
from autohet.runtime.model_spec import model_spec_from_config
from planner.catalogue import canonical_gpu_type
from planner.cluster import Fleet
from planner.communication import LinkTable, read_links
from planner.cost import CostModel
from planner.errors import ConfigError
from planner.model_spec import ModelSpec
from planner.parameters import CostParameters
from planner.profile import Measurement, ProfileTable, read_profile

# Share of a block's time that the emulation's profile gives embedding and head; what is emulated is the blocks.
_OUTSIDE_SHARE = 1e-3


@dataclass(frozen=True)
class PlanningInputs:
    """What a job says to the planner; profile None means the bundled measurements, links None labels and catalogue."""

    job: Job
    spec: ModelSpec
    profile: ProfileTable | None
    links: LinkTable | None
    parameters: CostParameters

    def cost_model(
        self,
        fleet: Fleet,
        *,
        sequence_length: int | None = None,
        parameters: CostParameters | None = None,
        model: str | None = None,
    ) -> CostModel:
        """The cost model of a fleet; a plan's own sequence length and model name may replace the job's."""
        return CostModel(
            fleet,
            self.spec,
            self.profile or self._emulated(fleet),
            sequence_length=sequence_length or self.job.training.sequence_length,
            precision=self.job.training.precision,
            recompute=self.job.training.recompute == "full",
            links=self.links,
            parameters=parameters or self.parameters,
            model=model or self.job.name,
        )

    def _emulated(self, fleet: Fleet) -> ProfileTable | None:
        """The table of an emulated fleet's speeds, if the job emulates speeds without a profile."""
        emulation = self.job.emulation
        if emulation is None or emulation.profile is not None:
            return None
        kinds = tuple(dict.fromkeys(node.node_type.gpu_type for node in fleet.nodes))
        return emulated_profile(self.job, emulation, kinds, self.spec.max_tp_degree)

    @cached_property
    def training_flops(self) -> float:
        """FLOPs of one sequence, forward and backward."""
        return self.spec.training_flops(self.job.training.sequence_length)


def planning_inputs(job: Job, *, profile: str | Path | None = None, links: str | Path | None = None) -> PlanningInputs:
    """Reads what the job names; `profile` and `links` (paths) replace the job's."""
    model = job.model
    source = model.config if model.config is not None else model.pretrained
    if source is None:
        raise ConfigError("model needs config or pretrained")
    spec = model_spec_from_config(job.name, source, precision=job.training.precision, revision=model.revision)
    emulated = job.emulation.profile if job.emulation else None
    profile = profile or job.parallelism.profile or emulated
    links = links or job.parallelism.links
    return PlanningInputs(
        job=job,
        spec=spec,
        profile=read_profile(profile) if profile else None,
        links=read_links(links) if links else None,
        parameters=replace(CostParameters(), context_bytes=float(job.parallelism.memory_reserve_bytes)),
    )


def emulated_profile(
    job: Job, emulation: EmulationSection, gpu_types: tuple[str, ...], max_tp_degree: int
) -> ProfileTable:
    """The seconds that the emulation gives its GPU types: blocks in proportion to sequences and inverse to TP workers."""
    speeds = {canonical_gpu_type(name): speed for name, speed in emulation.relative_speed_by_gpu_type.items()}
    rows: list[Measurement] = []
    for gpu_type in gpu_types:
        if gpu_type not in speeds:
            raise ConfigError(
                f"emulation.relative_speed_by_gpu_type has no '{gpu_type}'; "
                f"it names {', '.join(sorted(speeds)) or 'nothing'}"
            )
        for degree in (2**i for i in range(max_tp_degree.bit_length())):
            for size in (1, 64):
                seconds = emulation.block_forward_s * emulation.scale / speeds[gpu_type] * size / degree
                rows += _emulated_rows(job, gpu_type, degree, size, seconds)
    return ProfileTable(rows)


def _emulated_rows(job: Job, gpu_type: str, degree: int, size: int, seconds: float) -> list[Measurement]:
    shares = {"embedding": _OUTSIDE_SHARE, "block": 1.0, "head": _OUTSIDE_SHARE}
    training = job.training
    return [
        Measurement(
            model=job.name,
            gpu_type=gpu_type,
            dtype=training.precision,
            tp_degree=degree,
            sequence_length=training.sequence_length,
            microbatch_sequences=size,
            layer=layer,
            forward_s=seconds * share,
            backward_s=2 * seconds * share,
            update_s=_OUTSIDE_SHARE * seconds / size * degree,
            source="emulation",
        )
        for layer, share in shares.items()
    ]
