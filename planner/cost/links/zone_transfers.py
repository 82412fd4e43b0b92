"""Dollars of a plan: its nodes, and the bytes that a step carries between zones.

Hidden states cross a boundary of stages with each microbatch, and their gradients cross it back. A
ring all-reduce of n bytes over p members sends 2 (p - 1) / p n bytes over each of its links
(Patarasu and Yuan 2009). Laid out node by node, in the order of its members, it goes from zone to
zone where neighbouring nodes are in two.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.cost.basis import CostBasis
from planner.cost.links.traffic import ring_bytes, transfers_between
from planner.cost.memory.plan_memory import PlanMemory
from planner.inputs.zones import GB, ZonePair, are_apart, zone_pair
from planner.plans.plan import Pipeline, Plan


@dataclass(frozen=True, slots=True)
class ZoneTransfer:
    """Bytes of one step between two zones, both ways together."""

    zones: ZonePair
    bytes_per_step: float
    usd_per_gb: float

    @property
    def usd(self) -> float:
        """Price of one step."""
        return self.bytes_per_step / GB * self.usd_per_gb

    def to_document(self, step_time_s: float) -> dict[str, Any]:
        steps_an_hour = 3600 / step_time_s
        return {
            "zones": list(self.zones),
            "bytes_per_step": self.bytes_per_step,
            "gb_per_hour": self.bytes_per_step * steps_an_hour / GB,
            "usd_per_gb": self.usd_per_gb,
            "usd_per_hour": self.usd * steps_an_hour,
        }


@dataclass(frozen=True)
class PlanPrices:
    """Prices of plans on one fleet.

    zones: those of the fleet's nodes; at most one: nothing is carried between zones. memory: gives
    the all-reduces of a plan.
    """

    basis: CostBasis
    zones: tuple[str, ...]
    memory: PlanMemory

    def nodes_usd_per_hour(self, plan: Plan) -> float | None:
        """Return the price of the nodes in use; None if one has none."""
        total = 0.0
        for kind in dict(self.basis.fleet.members_of(plan.workers)).values():
            if kind.usd_per_hour is None:
                return None
            total += kind.usd_per_hour
        return total

    def zone_transfers(self, plan: Plan) -> tuple[ZoneTransfer, ...]:
        """Return the bytes of a step between zones.

        Empty for SPMD programs, which stay in one zone.
        """
        if len(self.zones) < 2 or plan.spmd is not None:
            return ()
        carried = defaultdict[ZonePair, float](float)
        for pipeline in plan.pipelines:
            crossings = defaultdict[ZonePair, float](float)
            for pair, num_bytes in self._crossings(pipeline):
                crossings[pair] += num_bytes
            for pair, num_bytes in crossings.items():
                carried[pair] += num_bytes * pipeline.num_microbatches

        for job in self.memory.sync_jobs(plan):
            num_bytes = ring_bytes(len(job.members), job.num_bytes)
            # a ring goes from node to node, and from the last one back to the first
            kinds = dict(self.basis.fleet.members_of(job.members))
            ring = [kind.zone for kind in kinds.values()]
            for i, zone in enumerate(ring):
                if are_apart(zone, ring[i - 1]):
                    carried[zone_pair(zone, ring[i - 1])] += num_bytes

        transfers = []
        for pair, num_bytes in sorted(carried.items()):
            transfers.append(
                ZoneTransfer(pair, num_bytes, self.basis.links.zones.usd_per_gb(*pair))
            )
        return tuple(transfers)

    def _crossings(self, pipeline: Pipeline) -> Iterator[tuple[ZonePair, float]]:
        """Yield bytes of a microbatch's hidden states and gradients that cross between zones."""
        size = pipeline.microbatch_sequences
        formats = self.basis.formats
        for one, other in itertools.pairwise(pipeline.stages):
            message = formats.border_bytes(size, formats.of(one), formats.of(other))
            hidden_states = transfers_between(one, other)
            gradients = transfers_between(other, one)
            for transfer in (*hidden_states, *gradients):
                source = self.basis.fleet.node_of(transfer.source).node_type.zone
                target = self.basis.fleet.node_of(transfer.target).node_type.zone
                if are_apart(source, target):
                    part = 1 / transfer.slices if self.basis.parameters.sliced_boundaries else 1.0
                    yield zone_pair(source, target), part * message
