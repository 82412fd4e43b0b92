"""Dollars of a plan: its nodes, and what it carries between zones."""

from planner.cost.basis import CostBasis
from planner.cost.links.zone_transfers import ZoneTransfer, bytes_between_zones
from planner.cost.memory.plan_memory import PlanMemory
from planner.plans.plan import Plan


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
        transfers = []
        for pair, num_bytes in sorted(carried.items()):
            transfers.append(ZoneTransfer(pair, num_bytes, zones.usd_per_gb(*pair)))
        return tuple(transfers)

    def nodes_usd_per_hour(self, plan: Plan) -> float | None:
        """Return the price of the nodes in use; None if one has none."""
        kinds = dict(self._basis.fleet.members_of(plan.workers))
        total = 0.0
        for kind in kinds.values():
            if kind.usd_per_hour is None:
                return None
            total += kind.usd_per_hour
        return total
