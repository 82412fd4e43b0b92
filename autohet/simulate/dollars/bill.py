"""SIMULATED bill of a run's machines, and the share of their GPUs that was idle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autohet.simulate.dollars.prices import PriceHistory
from planner.inputs.fleet import NodeType

IDLE_FROM_S = 600.0
"""Second from which idle GPUs are counted: until then a fleet boots, installs and begins."""


@dataclass
class Bill:
    """Bill of machines, which are paid from their arrival to their end, booting or not.

    Each second has the price of its time.
    """

    prices: PriceHistory
    usd: float = 0.0
    paid_gpu_s: float = 0.0
    idle_gpu_s: float = 0.0
    machines: dict[str, tuple[NodeType, float]] = field(default_factory=dict)
    """Type of each running machine, and the second since which it runs."""
    lives: list[dict[str, Any]] = field(default_factory=list)
    """Machines that have ended, with the seconds for which they are paid."""

    def count_gpus(self, begin_s: float, end_s: float, used: int) -> None:
        """Add the GPU-seconds paid for in that time, and those of GPUs beyond the `used` ones."""
        seconds = end_s - max(begin_s, IDLE_FROM_S)
        if seconds > 0:
            paid = sum(kind.num_gpus for kind, _ in self.machines.values())
            self.paid_gpu_s += seconds * paid
            self.idle_gpu_s += seconds * max(0, paid - used)

    def pay(self, name: str, until_s: float) -> None:
        """Pay for a machine that ends; no-op if it has ended before."""
        kind, since_s = self.machines.pop(name, (None, 0.0))
        if kind is not None:
            self.usd += self.prices.usd(kind.name, since_s, until_s)
            life = {"node": name, "node_type": kind.name, "begin_s": since_s, "end_s": until_s}
            self.lives.append(life)

    def settle(self, end_s: float) -> None:
        """Pay for all running machines at the end of the simulation."""
        for name in list(self.machines):
            self.pay(name, end_s)
