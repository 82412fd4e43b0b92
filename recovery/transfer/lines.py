"""Loads of the links and devices of a restore, in seconds."""

from __future__ import annotations

from collections import defaultdict

from recovery.state.holdings import Source
from recovery.transfer.links import LinkRates


class Lines:
    """Seconds that each resource is busy so far."""

    def __init__(self, links: LinkRates) -> None:
        self._links = links
        self.out: defaultdict[str, float] = defaultdict(float)
        self.into: defaultdict[str, float] = defaultdict(float)
        self.disk: defaultdict[str, float] = defaultdict(float)
        self.memory: defaultdict[str, float] = defaultdict(float)
        self.s3: defaultdict[str, float] = defaultdict(float)
        self.pair: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.s3_total = 0.0

    def until(self, source: Source, node: str, num_bytes: int) -> float:
        """Return the seconds until the source's lines end if it gives `num_bytes` to `node`."""
        links = self._links
        at = source.node
        until = self.out.get(at, 0.0) + num_bytes / links.network(at)

        if source.kind == "disk":
            disk_until = self.disk.get(at, 0.0) + num_bytes / links.disk(at)
            until = max(until, disk_until)

        if links.pair_bytes_per_s:
            pair_until = self.pair.get((at, node), 0.0) + num_bytes / links.pair(at, node)
            until = max(until, pair_until)
        return until

    def take_peer(self, source: Source, node: str, num_bytes: int) -> None:
        links = self._links
        at = source.node
        self.out[at] += num_bytes / links.network(at)
        self.into[node] += num_bytes / links.network(node)
        if source.kind == "disk":
            self.take_disk(at, num_bytes)
        if links.pair_bytes_per_s:
            self.pair[at, node] += num_bytes / links.pair(at, node)

    def take_s3(self, node: str, num_bytes: int) -> None:
        links = self._links
        self.s3[node] += num_bytes / links.s3(node)
        self.into[node] += num_bytes / links.network(node)
        self.s3_total += num_bytes / links.s3_total_bytes_per_s

    def take_disk(self, node: str, num_bytes: int) -> None:
        self.disk[node] += num_bytes / self._links.disk(node)

    def take_memory(self, node: str, num_bytes: int) -> None:
        self.memory[node] += num_bytes / self._links.memory_bytes_per_s

    def busy_until(self, source: Source, node: str) -> float:
        """Return the end in seconds of the busiest line between `source` and `node`."""
        into = self.into.get(node, 0.0)
        if source.kind == "s3":
            return max(self.s3.get(node, 0.0), into, self.s3_total)

        at = source.node
        disk = 0.0
        if source.kind == "disk":
            disk = self.disk.get(at, 0.0)

        if at == node:
            return max(disk, self.memory.get(node, 0.0))

        out = self.out.get(at, 0.0)
        pair = self.pair.get((at, node), 0.0)
        return max(disk, out, into, pair)

    def busiest(self) -> float:
        """Return the end in seconds of the busiest line of all."""
        latest = self.s3_total
        for table in (self.out, self.into, self.disk, self.memory, self.s3, self.pair):
            latest = max(latest, max(table.values(), default=0.0))
        return latest
