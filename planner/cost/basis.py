"""Values that every part of a cost model is made from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.cost.links.traffic import Links, LinkTable
from planner.cost.parameters import CostParameters
from planner.cost.stage_formats import StageFormats
from planner.inputs.fleet import Fleet
from planner.inputs.profile import ProfileTable
from planner.inputs.zones import EC2_ZONES, ZoneTable
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import ComputeFormat, Recompute, Stage
from planner.spmd.graph import Decoder


@dataclass(frozen=True)
class Workload:
    """Model that a job trains, and how.

    formats: number formats of GPU types that do not compute in the precision, by canonical name.
    recompute: recomputation of stages that define none. decoder: gives the model's graph at a
    microbatch size, for SPMD programs; None: no graph is known.
    """

    spec: ModelSpec
    sequence_length: int
    precision: str = "bf16"
    recompute: Recompute = "none"
    formats: Mapping[str, ComputeFormat] = field(default_factory=dict)
    decoder: Callable[[int], Decoder | None] | None = None

    @property
    def other_formats(self) -> dict[str, ComputeFormat]:
        """`formats` without the GPU types that compute in the precision all the same."""
        others = {}
        for gpu_type, compute in self.formats.items():
            if compute != self.precision:
                others[gpu_type] = compute
        return others

    def recompute_of(self, stage: Stage) -> Recompute:
        """Return a stage's recomputation."""
        return stage.recompute or self.recompute


@dataclass(frozen=True)
class Measurements:
    """Tables of measured times and links.

    profile: layer times; None: the bundled ones. model: name of this model in the profile's rows;
    None: the spec's name, else the profile's only model. links: bandwidths, which replace those of
    labels and catalogue; None: none are measured. zones: links between zones.
    """

    profile: ProfileTable | None = None
    model: str | None = None
    links: LinkTable | None = None
    zones: ZoneTable = EC2_ZONES


@dataclass(frozen=True)
class CostBasis:
    """Values that seconds and bytes of plans on one fleet depend on."""

    fleet: Fleet
    workload: Workload
    parameters: CostParameters
    links: Links
    formats: StageFormats
