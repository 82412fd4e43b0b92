"""Spacing of the rounds of copies to other nodes: what a round costs against what it averts.

A round averts the loss of the steps since the round before, if a node dies without notice. With C
seconds of training (or their price) a round, and a node that dies every L seconds, rounds sqrt(2 C
L) apart cost least in sum (Young, "A first order approximation to the optimum checkpoint interval",
CACM 1974).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.inputs.zones import ZonePair, ZoneTable, are_apart, zone_pair

if TYPE_CHECKING:
    from recovery.peers.replication_targets import ReplicationTarget
    from recovery.state.layout import Layout

FLEET_SHARE = 0.05
"""Default limit on the price of copies to other zones, as a part of the fleet's price."""
NEGLIGIBLE = 0.03
"""Part of training's time that rounds may take without being spaced further."""


@dataclass(frozen=True)
class RoundTraffic:
    """Traffic of one round of copies.

    seconds: time of the slowest node's part. bytes_by_zones: bytes between nodes of two zones.
    """

    num_bytes: int
    seconds: float
    bytes_by_zones: Mapping[ZonePair, int]

    def usd(self, zones: ZoneTable) -> float:
        """Return the price of one round in USD."""
        prices = [zones.usd(num_bytes, *pair) for pair, num_bytes in self.bytes_by_zones.items()]
        return sum(prices)


@dataclass(frozen=True)
class CopiedTraining:
    """Training during which copies are made.

    sync_share: part of a step that waits for the network. fleet_usd_per_hour: None where a node has
    no price. change_s: expected time until a node leaves.
    """

    step_s: float
    sync_share: float
    fleet_usd_per_hour: float | None
    change_s: float


@dataclass(frozen=True)
class RoundSpacing:
    """Steps between two rounds; 0: no rounds.

    usd_per_hour: what the copies cost at that pace. why: a sentence where rounds are further apart
    than asked for; else empty.
    """

    every_steps: int
    usd_per_hour: float = 0.0
    why: str = ""


def traffic_of(
    targets: Mapping[str, Iterable[ReplicationTarget]],
    layout: Layout,
    node_by_worker: Mapping[str, str],
    zone_by_node: Mapping[str, str],
    bytes_per_s_by_worker: Mapping[str, float],
) -> RoundTraffic:
    """Return the traffic of a round: every target's shards go to its first peer."""
    by_zones: Counter[ZonePair] = Counter()
    total = 0
    slowest_s = 0.0
    for worker, mine in targets.items():
        pushed = 0
        node = node_by_worker[worker]
        zone = zone_by_node.get(node, "")
        for target in mine:
            num_bytes = sum(layout.shard_bytes(shard) for shard in target.shards)
            pushed += num_bytes
            other = zone_by_node.get(target.peers[0], "")
            if are_apart(zone, other):
                by_zones[zone_pair(zone, other)] += num_bytes
        total += pushed
        pushed_s = pushed / bytes_per_s_by_worker[worker]
        slowest_s = max(slowest_s, pushed_s)
    return RoundTraffic(total, slowest_s, dict(by_zones))


def spacing_of(
    traffic: RoundTraffic,
    training: CopiedTraining,
    zones: ZoneTable,
    *,
    least_steps: int,
    bandwidth_share: float,
    usd_per_hour: float | None,
) -> RoundSpacing:
    """Return the spacing of rounds of this traffic.

    least_steps: as the job asks. bandwidth_share: part of the network that copies take.
    usd_per_hour: what copies to other zones may cost; None: FLEET_SHARE of the fleet's price.
    """
    usd = traffic.usd(zones)
    fleet_usd = training.fleet_usd_per_hour or 0.0

    # Copies share the network with the gradients, which then take this much longer.
    slower = bandwidth_share / max(1.0 - bandwidth_share, 0.1)
    lost_s = traffic.seconds * training.sync_share * slower
    least_s = max(least_steps * training.step_s, traffic.seconds)
    is_slow = lost_s > NEGLIGIBLE * least_s
    worth_s = 0.0
    if is_slow or (usd and fleet_usd):
        # A round's price in seconds of training that cost as much.
        price_s = usd / fleet_usd * 3600 if fleet_usd else 0.0
        worth_s = math.sqrt(2 * (lost_s + price_s) * training.change_s)

    allowed_s = 0.0
    if usd:
        allowed_usd = usd_per_hour
        if allowed_usd is None:
            allowed_usd = FLEET_SHARE * fleet_usd
        if allowed_usd <= 0:
            limit = "replicate_usd_per_hour is 0"
            if usd_per_hour is None:
                limit = "the fleet's nodes have no price"
            why = (
                f"no copies go to other nodes: a round to another zone costs {usd:.2f} $, and"
                f" {limit}; set checkpoint.replicate_usd_per_hour"
            )
            return RoundSpacing(0, why=why)
        allowed_s = usd / allowed_usd * 3600

    # Rounding errors of the division cost no step.
    steps = math.ceil(max(worth_s, allowed_s) / training.step_s - 1e-9)
    every = max(least_steps, steps)
    between_s = max(every * training.step_s, traffic.seconds)
    hourly = usd * 3600 / between_s
    why = _spaced(every, least_steps, usd, allowed_s > worth_s, hourly)
    return RoundSpacing(every, hourly, why)


def _spaced(every: int, least: int, usd: float, by_price: bool, hourly: float) -> str:
    if every <= least:
        return ""
    price = ""
    if usd:
        price = f" (a round to another zone costs {usd:.2f} $, {hourly:.2f} $/h)"
    reason = "more would cost more than the steps that they may save"
    if by_price:
        reason = "checkpoint.replicate_usd_per_hour allows no more"
    return f"copies go to other nodes every {every} steps: {reason}{price}"
