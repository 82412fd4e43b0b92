"""Speeds of the links that state can take, as the schedule sees them.

One number per node and direction.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from recovery.state.holdings import Source


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second of each link to a worker; all transfers over a resource share it.

    A node's network card carries `network_bytes_per_s` out and, at the same time, as much in (full
    duplex); what comes from durable storage also enters through it. The
    defaults are a 25 Gb/s cloud node with NVMe; they only weigh sources against each other and are
    not measurements.
    """

    memory_bytes_per_s: float = 10e9
    disk_bytes_per_s: float = 1.5e9
    network_bytes_per_s: float = 25e9 / 8
    s3_bytes_per_s: float = 1e9
    network_by_node: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in ("memory", "disk", "network", "s3"):
            name = f"{kind}_bytes_per_s"
            _require_positive(name, getattr(self, name))
        for node, rate in self.network_by_node.items():
            _require_positive(f"speed of {node}", rate)

    def network(self, node: str) -> float:
        return self.network_by_node.get(node, self.network_bytes_per_s)

    def s3(self, node: str) -> float:
        """Return the speed from durable storage to `node`, which its network card limits, too."""
        return min(self.s3_bytes_per_s, self.network(node))


def _require_positive(name: str, rate: float) -> None:
    # Not `rate <= 0`, which a NaN passes.
    if not rate > 0:
        raise ValueError(f"{name} must be above 0 bytes per second, not {rate}")


class Lines:
    """Seconds that each resource is busy so far."""

    def __init__(self, links: LinkRates) -> None:
        self._links = links
        self.out: defaultdict[str, float] = defaultdict(float)
        self.into: defaultdict[str, float] = defaultdict(float)
        self.disk: defaultdict[str, float] = defaultdict(float)
        self.memory: defaultdict[str, float] = defaultdict(float)
        self.s3: defaultdict[str, float] = defaultdict(float)

    def until(self, source: Source, num_bytes: int) -> float:
        """Return the seconds until the source's lines end if it gives `num_bytes` to a node."""
        links = self._links
        at = source.node
        until = self.out.get(at, 0.0) + num_bytes / links.network(at)

        if source.kind == "disk":
            disk_until = self.disk.get(at, 0.0) + num_bytes / links.disk_bytes_per_s
            until = max(until, disk_until)
        return until

    def take_peer(self, source: Source, node: str, num_bytes: int) -> None:
        links = self._links
        at = source.node
        self.out[at] += num_bytes / links.network(at)
        self.into[node] += num_bytes / links.network(node)
        if source.kind == "disk":
            self.take_disk(at, num_bytes)

    def take_s3(self, node: str, num_bytes: int) -> None:
        links = self._links
        self.s3[node] += num_bytes / links.s3(node)
        self.into[node] += num_bytes / links.network(node)

    def take_disk(self, node: str, num_bytes: int) -> None:
        self.disk[node] += num_bytes / self._links.disk_bytes_per_s

    def take_memory(self, node: str, num_bytes: int) -> None:
        self.memory[node] += num_bytes / self._links.memory_bytes_per_s

    def busy_until(self, source: Source, node: str) -> float:
        """Return the end in seconds of the busiest line between `source` and `node`."""
        into = self.into.get(node, 0.0)
        if source.kind == "s3":
            return max(self.s3.get(node, 0.0), into)

        at = source.node
        disk = 0.0
        if source.kind == "disk":
            disk = self.disk.get(at, 0.0)

        if at == node:
            return max(disk, self.memory.get(node, 0.0))

        out = self.out.get(at, 0.0)
        return max(disk, out, into)

    def busiest(self) -> float:
        """Return the end in seconds of the busiest line of all."""
        latest = 0.0
        for table in (self.out, self.into, self.disk, self.memory, self.s3):
            latest = max(latest, max(table.values(), default=0.0))
        return latest
