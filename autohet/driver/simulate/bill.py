"""SIMULATED: what the machines of a run cost, and how much of their GPUs nobody used."""

from __future__ import annotations

from dataclasses import dataclass, field

from autohet.driver.simulate.prices import Prices
from planner.cluster import NodeType

IDLE_FROM_S = 600.0
"""Idle GPUs are counted from here on: until then a fleet boots, installs and begins."""


@dataclass
class Bill:
    """Machines are paid from their arrival to their end, booting or not, each second at the price
    of then.
    """

    prices: Prices
    usd: float = 0.0
    paid_gpu_s: float = 0.0
    idle_gpu_s: float = 0.0
    machines: dict[str, tuple[NodeType, float]] = field(default_factory=dict)
    """Type of each running machine, and the second since which it runs."""

    def count_gpus(self, begin_s: float, end_s: float, used: int) -> None:
        """GPU-seconds that are paid for in that time, and those of GPUs beyond the `used` ones."""
        seconds = end_s - max(begin_s, IDLE_FROM_S)
        if seconds > 0:
            paid = sum(kind.num_gpus for kind, _ in self.machines.values())
            self.paid_gpu_s += seconds * paid
            self.idle_gpu_s += seconds * max(0, paid - used)

    def pay(self, name: str, until_s: float) -> None:
        """The machine ends; one that has ended is not paid again."""
        kind, since_s = self.machines.pop(name, (None, 0.0))
        if kind is not None:
            self.usd += self.prices.usd(kind.name, since_s, until_s)

    def settle(self, end_s: float) -> None:
        """The simulation ends: what still runs is paid."""
        for name in list(self.machines):
            self.pay(name, end_s)
