"""Dollars of a plan: its nodes, and what it carries between zones."""

from planner.cost.basis import CostBasis
from planner.cost.plan_memory import PlanMemory
from planner.cost.zone_transfers import ZoneTransfer, bytes_between_zones
from planner.plan import Plan


class PlanPrices:
    """Prices of plans on one fleet.

    zones: those of the fleet's nodes; at most one: nothing is carried between zones. memory: gives
    the all-reduces of a plan.
    """

    def __init__(self, basis: CostBasis, zones: tuple[str, ...], memory: PlanMemory) -> None:
        self._basis = basis
        self._zones = zones
        self._memory = memory

    def zone_transfers(self, plan: Plan) -> tuple[ZoneTransfer, ...]:
        """Return the bytes of a step between zones.

        Empty for SPMD programs, which stay in one zone.
        """
        if len(self._zones) < 2 or plan.spmd is not None:
            return ()
        carried = bytes_between_zones(
            plan,
            self._basis.fleet,
            self._memory.sync_jobs(plan),
            self._basis.formats,
            sliced=self._basis.parameters.sliced_boundaries,
        )
        zones = self._basis.links.zones
        return tuple(
            ZoneTransfer(pair, num_bytes, zones.usd_per_gb(*pair))
            for pair, num_bytes in sorted(carried.items())
        )

    def nodes_usd_per_hour(self, plan: Plan) -> float | None:
        """Return the price of the nodes in use; None if one has none."""
        nodes = {
            node.name: node.node_type.usd_per_hour
            for node in map(self._basis.fleet.node_of, plan.workers)
        }
        prices = [price for price in nodes.values() if price is not None]
        return sum(prices) if len(prices) == len(nodes) else None
