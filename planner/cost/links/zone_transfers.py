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

from planner.cost.links.sync import SyncJob
from planner.cost.links.traffic import ring_bytes, transfers_between
from planner.cost.stage_formats import StageFormats
from planner.inputs.fleet import Fleet
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
    zone_of = {}
    for worker in plan.workers:
        zone_of[worker] = fleet.node_of(worker).node_type.zone
    found: dict[ZonePair, float] = {}
    known_zones = set(zone_of.values()) - {""}
    if len(known_zones) < 2:
        return found

    for pipeline in plan.pipelines:
        crossings = _crossings(pipeline, zone_of, formats, sliced=sliced)
        for pair, num_bytes in crossings.items():
            _add(found, pair, num_bytes * pipeline.num_microbatches)

    for job in sums:
        carried = ring_bytes(len(job.members), job.num_bytes)
        # a ring goes from node to node, and from the last one back to the first
        kinds = dict(fleet.members_of(job.members))
        ring = [kind.zone for kind in kinds.values()]
        for i, zone in enumerate(ring):
            before = ring[i - 1]
            if are_apart(zone, before):
                _add(found, zone_pair(zone, before), carried)
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
        hidden_states = transfers_between(one, other)
        gradients = transfers_between(other, one)
        for transfer in (*hidden_states, *gradients):
            source = zone_of[transfer.source]
            target = zone_of[transfer.target]
            if are_apart(source, target):
                part = 1 / transfer.slices if sliced else 1.0
                _add(found, zone_pair(source, target), part * message)
    return found


def _add(found: dict[ZonePair, float], pair: ZonePair, amount: float) -> None:
    found[pair] = found.get(pair, 0.0) + amount
