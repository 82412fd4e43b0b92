"""Event of the fleet that ends a generation."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class FleetEvent:
    """Event that ends the present generation.

    `workers` are gone or about to go. `happened_at` is the last moment at which all was well as far
    as the driver can tell.
    """

    cause: str
    nodes: tuple[str, ...]
    workers: tuple[str, ...]
    happened_at: float
    reason: str

    def joined(self, other: FleetEvent) -> FleetEvent:
        """Merge with a later event, so that one change answers both.

        The search for a better plan is no event of its own: `other` replaces it.
        """
        if self.cause == "search":
            return other
        nodes = {*self.nodes, *other.nodes}
        reason = f"{self.reason}, {other.reason}"
        return replace(other, nodes=tuple(sorted(nodes)), reason=reason)
