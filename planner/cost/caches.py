"""Results that several cost models of one workload share."""

from dataclasses import dataclass, field, replace

from planner.cost.layers.layer_cost_model import CostsByUse
from planner.cost.layers.layer_times import ModelsByFormat
from planner.cost.links.boundaries import WaysByLikeness
from planner.cost.links.sync import KnownRings
from planner.cost.memory.plan_memory import Synced
from planner.cost.memory.worker_memory import TermsByUse
from planner.cost.stage_costs import TermsByStage
from planner.inputs.fleet import NodeType
from planner.spmd.decoder import Decoder


@dataclass(frozen=True)
class CostCaches:
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

    def without_stages(self) -> "CostCaches":
        """Return the same caches, but for empty ones of stages, boundaries and rings."""
        return replace(self, stage_terms={}, ways={}, rings={})
