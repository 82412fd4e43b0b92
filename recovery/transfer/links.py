"""Speeds of the links that state can take, as the schedule sees them.

One number per node and direction, or per pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second of each link to a worker; all transfers over a resource share it.

    A node's network card carries `network_bytes_per_s` out and, at the same time, as much in (full
    duplex); what comes from durable storage also enters through it. `pair_bytes_per_s` caps single
    (from node, to node) paths, e.g. between zones. The defaults are a 25 Gb/s cloud node with NVMe;
    they only weigh sources against each other and are not measurements.
    """

    memory_bytes_per_s: float = 10e9
    disk_bytes_per_s: float = 1.5e9
    network_bytes_per_s: float = 25e9 / 8
    s3_bytes_per_s: float = 1e9
    s3_total_bytes_per_s: float = math.inf
    network_by_node: Mapping[str, float] = field(default_factory=dict)
    disk_by_node: Mapping[str, float] = field(default_factory=dict)
    s3_by_node: Mapping[str, float] = field(default_factory=dict)
    pair_bytes_per_s: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = {
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "disk_bytes_per_s": self.disk_bytes_per_s,
            "network_bytes_per_s": self.network_bytes_per_s,
            "s3_bytes_per_s": self.s3_bytes_per_s,
            "s3_total_bytes_per_s": self.s3_total_bytes_per_s,
        }
        for name, rate in rates.items():
            _require_positive(name, rate)

        for table in (self.network_by_node, self.disk_by_node, self.s3_by_node):
            for node, rate in table.items():
                _require_positive(f"speed of {node}", rate)

        for pair, rate in self.pair_bytes_per_s.items():
            _require_positive(f"speed of {pair}", rate)

    def network(self, node: str) -> float:
        return self.network_by_node.get(node, self.network_bytes_per_s)

    def disk(self, node: str) -> float:
        return self.disk_by_node.get(node, self.disk_bytes_per_s)

    def s3(self, node: str) -> float:
        """Return the speed from durable storage to `node`, which its network card limits, too."""
        rate = self.s3_by_node.get(node, self.s3_bytes_per_s)
        return min(rate, self.network(node))

    def pair(self, source: str, destination: str) -> float:
        return self.pair_bytes_per_s.get((source, destination), math.inf)


def _require_positive(name: str, rate: float) -> None:
    # Not `rate <= 0`, which a NaN passes.
    if not rate > 0:
        raise ValueError(f"{name} must be above 0 bytes per second, not {rate}")
