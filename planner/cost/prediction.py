"""Prediction of the cost model for one plan."""

from dataclasses import dataclass
from typing import Any

from planner.cost.links.zone_transfers import ZoneTransfer
from planner.plans.communicators import COMMUNICATOR_BYTES, communicators_by_worker
from planner.plans.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds, bytes and dollars of one plan.

    Seconds are for one step. Dollars cover the plan's nodes (`nodes_usd_per_hour`) and what a step
    carries between zones (`transfers`); None if a node in use has no price. not_staged: why a
    change from this plan to one of as much state finds too little host memory; None if there is
    enough, or if it is unknown. not_offloaded: why its masters and moments find too little host
    memory, or None.
    """

    step_time_s: float
    sequences_per_s: float
    tokens_per_s: float
    usd_per_hour: float | None
    usd_per_million_tokens: float | None
    breakdown_s: dict[str, float]
    memory_bytes_by_worker: dict[str, int]
    memory_limit_bytes_by_worker: dict[str, int]
    estimated: tuple[str, ...] = ()
    plan: Plan | None = None
    tied_embeddings: bool = False
    key_value_units: int = 0
    not_staged: str | None = None
    not_offloaded: str | None = None
    nodes_usd_per_hour: float | None = None
    transfers: tuple[ZoneTransfer, ...] = ()

    @property
    def transfers_usd_per_hour(self) -> float:
        """Price of what goes between zones."""
        return sum(each.usd for each in self.transfers) / self.step_time_s * 3600

    @property
    def fits(self) -> bool:
        """True if every worker fits in its memory, and each node's host memory holds its part.

        That part is what the plan keeps there, and the state that leaves devices in a change of
        plans.
        """
        return self.fits_devices and self.not_staged is None and self.not_offloaded is None

    @property
    def fits_devices(self) -> bool:
        """True if every worker fits in its memory."""
        used = self.memory_bytes_by_worker
        return all(used[w] <= limit for w, limit in self.memory_limit_bytes_by_worker.items())

    @property
    def tightest_worker(self) -> tuple[str, float]:
        """Fullest worker and the share of its memory that it needs.

        Above 1 it does not fit.
        """
        shares = {}
        for worker, limit in self.memory_limit_bytes_by_worker.items():
            shares[worker] = self.memory_bytes_by_worker[worker] / limit
        fullest = max(shares, key=lambda worker: shares[worker])
        return fullest, shares[fullest]

    @property
    def communicators_by_worker(self) -> dict[str, int]:
        """Number of communicators of each worker (`planner.plans.communicators`).

        Counted on access, since a search never needs it.
        """
        if self.plan is None:
            return {}
        return communicators_by_worker(
            self.plan, tied=self.tied_embeddings, key_value_units=self.key_value_units
        )

    def to_document(self) -> dict[str, Any]:
        """Return the contract's `predicted`, with `fits` and `estimated`.

        `estimated` lists what was not measured.
        """
        communicators = self.communicators_by_worker
        communicator_bytes = {w: n * COMMUNICATOR_BYTES for w, n in communicators.items()}
        return {
            "step_time_s": self.step_time_s,
            "sequences_per_s": self.sequences_per_s,
            "tokens_per_s": self.tokens_per_s,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "nodes_usd_per_hour": self.nodes_usd_per_hour,
            "transfers_usd_per_hour": self.transfers_usd_per_hour,
            "transfers": [each.to_document(self.step_time_s) for each in self.transfers],
            "breakdown_s": dict(self.breakdown_s),
            "memory_bytes_by_worker": dict(self.memory_bytes_by_worker),
            "memory_limit_bytes_by_worker": dict(self.memory_limit_bytes_by_worker),
            "communicators_by_worker": dict(communicators),
            "communicator_bytes_by_worker": communicator_bytes,
            "fits": self.fits,
            "estimated": list(self.estimated),
        }
