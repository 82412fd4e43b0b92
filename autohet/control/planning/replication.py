"""Copies of shards to other nodes in one generation: which, where to, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autohet.control.planning.replication_price import (
    CopiedTraining,
    RoundSpacing,
    RoundTraffic,
    spacing_of,
    traffic_of,
)
from planner.inputs.fleet import Fleet
from recovery.peers.replication_targets import Peer, ReplicationTarget, replication_targets

if TYPE_CHECKING:
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values.observation import Observation
    from autohet.runtime.job.checkpoint import CheckpointSection
    from planner.inputs.zones import ZoneTable
    from recovery.state.layout import Layout, ShardId

Targets = Mapping[str, tuple[ReplicationTarget, ...]]
"""Shards that each worker's agent copies to other nodes, by worker."""
MIN_REPLICATION_BYTES_PER_S = 8e6
"""Least bandwidth of copies, in bytes/s: a shard server gives up peers slower than a quarter of it.
"""


@dataclass(frozen=True)
class Replication:
    """Copies to other nodes in one generation.

    lacking: a sentence where nodes that alone hold something may copy it nowhere; else empty.
    """

    traffic: RoundTraffic
    spacing: RoundSpacing
    zones: ZoneTable
    lacking: str = ""

    def sentences(self) -> list[str]:
        return [sentence for sentence in (self.spacing.why, self.lacking) if sentence]

    def to_document(self) -> dict[str, Any]:
        """Return the replication part of the event `plan`.

        It holds the bytes of a round between zones, and US dollars per hour.
        """
        by_zones = []
        for pair, num_bytes in sorted(self.traffic.bytes_by_zones.items()):
            usd_per_gb = self.zones.usd_per_gb(*pair)
            entry = {"zones": list(pair), "bytes": num_bytes, "usd_per_gb": usd_per_gb}
            by_zones.append(entry)
        return {
            "every_steps": self.spacing.every_steps,
            "bytes": self.traffic.num_bytes,
            "usd_per_hour": round(self.spacing.usd_per_hour, 4),
            "by_zones": by_zones,
        }


class ReplicationPlanner:
    """Planner of the copies that agents make, by the job's wishes and the prices of zones."""

    def __init__(self, wishes: CheckpointSection, zones: ZoneTable) -> None:
        self._wishes = wishes
        self._zones = zones

    def find_targets(self, layout: Layout, seen: Observation) -> Targets:
        """Return what each worker's agent copies to other nodes.

        That is whatever one node alone would hold. A plan that survives the loss of any node has no
        such copies.
        """
        if not self._wishes.replication_steps:
            return {}
        peers = []
        for name, view in seen.nodes.items():
            if view.endpoint is not None:
                # A copy there would soon be lost: others are preferred.
                may_leave = name in seen.notices or name in seen.risks
                peers.append(Peer(name, view.node_type.zone, may_leave))
        return replication_targets(
            layout,
            seen.nodes_of(layout.workers),
            peers,
            frozenset(seen.risks),
            zones=self._wishes.replicate_zone,
            connects=self._zones.connects,
        )

    def plan_rounds(
        self,
        layout: Layout,
        targets: Targets,
        seen: Observation,
        proposal: PlanProposal,
        change_s: float,
    ) -> Replication | None:
        """Return what these copies carry and cost, and how far apart their rounds are."""
        wishes = self._wishes
        if not wishes.replication_steps:
            return None
        zone_by_node = {name: view.node_type.zone for name, view in seen.nodes.items()}
        bytes_per_s = {worker: self.bandwidth(seen, worker) for worker in targets}
        node_by_worker = seen.nodes_of(layout.workers)
        traffic = traffic_of(targets, layout, node_by_worker, zone_by_node, bytes_per_s)

        lacking = self._lacking(layout, targets, seen)
        if not targets:
            if not lacking:
                return None
            return Replication(
                traffic=traffic, spacing=RoundSpacing(0), zones=self._zones, lacking=lacking
            )

        spacing = spacing_of(
            traffic,
            _training_of(proposal, seen, change_s),
            self._zones,
            least_steps=wishes.replication_steps,
            bandwidth_share=wishes.replicate_bandwidth_share,
            usd_per_hour=wishes.replicate_usd_per_hour,
        )
        return Replication(traffic=traffic, spacing=spacing, zones=self._zones, lacking=lacking)

    def _lacking(self, layout: Layout, targets: Targets, seen: Observation) -> str:
        """Return a sentence if nodes alone hold uncopied shards although there are other nodes.

        The string is empty otherwise.
        """
        if len(seen.agents()) < 2:
            return ""

        copied: set[ShardId] = set()
        for mine in targets.values():
            for target in mine:
                copied.update(target.shards)

        alone = set()
        node_by_worker = seen.nodes_of(layout.workers)
        for shard in layout.shards:
            nodes = {node_by_worker[worker] for worker in layout.holders(shard)}
            if len(nodes) == 1 and shard not in copied:
                alone |= nodes
        if not alone:
            return ""
        return (
            f"what {', '.join(sorted(alone))} alone hold has no copy: no other node is in their"
            f" zone (checkpoint.replicate_zone: {self._wishes.replicate_zone}); with `any`"
            " copies go to other zones of the region, within checkpoint.replicate_usd_per_hour"
        )

    def bandwidth(self, seen: Observation, worker: str) -> float:
        """Return the bytes per second that copies of this worker's node may take of its network."""
        view = seen.nodes.get(seen.node_of(worker))
        network = 0.0
        if view is not None:
            network = view.node_type.inter_node_bytes_per_s
        # The rest of the network is left to training.
        share = self._wishes.replicate_bandwidth_share * network
        return max(MIN_REPLICATION_BYTES_PER_S, share)


def _training_of(proposal: PlanProposal, seen: Observation, change_s: float) -> CopiedTraining:
    """Describe the training during which copies are made, as far as it is known."""
    nodes = [view.node for view in seen.nodes.values()]
    usd = Fleet(0, tuple(nodes)).usd_per_hour()
    prediction = proposal.prediction
    if prediction is None:
        return CopiedTraining(step_s=1.0, sync_share=0.0, fleet_usd_per_hour=usd, change_s=change_s)
    sync_s = prediction.breakdown_s.get("grad_sync", 0.0)
    sync_share = sync_s / prediction.step_time_s
    return CopiedTraining(
        step_s=prediction.step_time_s,
        sync_share=sync_share,
        fleet_usd_per_hour=usd,
        change_s=change_s,
    )
