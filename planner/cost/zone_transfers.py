"""Bytes that a step of a plan carries between zones, and their price.

Hidden states cross a boundary of stages with each microbatch, and their gradients cross it back. A
ring all-reduce of n bytes over p members sends 2 (p - 1) / p n bytes over each of its links
(Patarasu and Yuan 2009). Laid out node by node, in the order of its members, it goes from zone to
zone where neighbouring nodes are in two.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.cluster import Fleet
from planner.cost.links import ring_bytes, transfers_between
from planner.cost.stage_formats import StageFormats
from planner.cost.sync import SyncJob
from planner.plan import Pipeline, Plan
from planner.zones import GB, ZonePair, are_apart, zone_pair


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


def bytes_between_zones(
    plan: Plan,
    fleet: Fleet,
    sums: Sequence[SyncJob],
    formats: StageFormats,
    *,
    sliced: bool,
) -> dict[ZonePair, float]:
    """Return bytes of one step by pair of zones.

    sums: the plan's all-reduces. formats: bytes of hidden states between stages. sliced: hidden
    states cross from node to node in slices.
    """
    zone_of = {worker: fleet.node_of(worker).node_type.zone for worker in plan.workers}
    found: dict[ZonePair, float] = {}
    if len(set(zone_of.values()) - {""}) < 2:
        return found
    for pipeline in plan.pipelines:
        for pair, num_bytes in _crossings(pipeline, zone_of, formats, sliced=sliced).items():
            _add(found, pair, num_bytes * pipeline.num_microbatches)
    for job in sums:
        count = len(job.members)
        nodes = dict.fromkeys((fleet.node_of(w).name, zone_of[w]) for w in job.members)
        zones = [zone for _, zone in nodes]
        for i, zone in enumerate(zones):
            if are_apart(zone, zones[i - 1]):
                carried = ring_bytes(count, job.num_bytes)
                _add(found, zone_pair(zone, zones[i - 1]), carried)
    return found


def _crossings(
    pipeline: Pipeline, zone_of: dict[str, str], formats: StageFormats, *, sliced: bool
) -> dict[ZonePair, float]:
    """Return bytes of a microbatch's hidden states and gradients that cross between zones."""
    found: dict[ZonePair, float] = {}
    for one, other in itertools.pairwise(pipeline.stages):
        message = formats.border_bytes(
            pipeline.microbatch_sequences, formats.of(one), formats.of(other)
        )
        for sender, receiver in ((one, other), (other, one)):
            for each in transfers_between(sender, receiver):
                ends = zone_of[each.source], zone_of[each.target]
                if are_apart(*ends):
                    part = 1 / each.slices if sliced else 1.0
                    _add(found, zone_pair(*ends), part * message)
    return found


def _add(found: dict[ZonePair, float], pair: ZonePair, amount: float) -> None:
    found[pair] = found.get(pair, 0.0) + amount
