"""Assignment of sources to needs by greedy list scheduling on the loads of links.

Every resource (a node's card in and out, its disk, its memory, its link to durable storage, a
capped pair of nodes) is a line that is busy for bytes / speed; all lines work at once, so the
restore takes as long as the busiest (the makespan). Shards with the fewest alternatives are placed
first, larger ones before smaller, each at the source whose line then ends first (Graham's longest
processing time rule, Graham 1969, SIAM J. Appl. Math. 17(2)). The result carries a lower bound,
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recovery.state.holdings import Source
from recovery.transfer.bounds import Demand, lower_bound_s
from recovery.transfer.links import LinkRates
from recovery.transfer.messages import Send
from recovery.transfer.placement import Placement

MEMORY, DISK, PEER, S3 = range(4)


class Lines:
    """Seconds that each resource is busy so far."""

    def __init__(self, links: LinkRates) -> None:
        self._links = links
        self.out: dict[str, float] = {}
        self.into: dict[str, float] = {}
        self.disk: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self.s3: dict[str, float] = {}
        self.pair: dict[tuple[str, str], float] = {}
        self.s3_total = 0.0

    def until(self, source: Source, node: str, num_bytes: int) -> float:
        """Return the seconds until the source's lines end if it gives `num_bytes` to `node`."""
        at = source.node
        until = self.out.get(at, 0.0) + num_bytes / self._links.network(at)
        if source.kind == "disk":
            until = max(until, self.disk.get(at, 0.0) + num_bytes / self._links.disk(at))
        if self._links.pair_bytes_per_s:
            until = max(
                until, self.pair.get((at, node), 0.0) + num_bytes / self._links.pair(at, node)
            )
        return until

    def take_peer(self, source: Source, node: str, num_bytes: int) -> None:
        at = source.node
        self.out[at] = self.out.get(at, 0.0) + num_bytes / self._links.network(at)
        self.into[node] = self.into.get(node, 0.0) + num_bytes / self._links.network(node)
        if source.kind == "disk":
            self.take_disk(at, num_bytes)
        if self._links.pair_bytes_per_s:
            self.pair[at, node] = self.pair.get((at, node), 0.0) + num_bytes / self._links.pair(
                at, node
            )

    def take_s3(self, node: str, num_bytes: int) -> None:
        self.s3[node] = self.s3.get(node, 0.0) + num_bytes / self._links.s3(node)
        self.into[node] = self.into.get(node, 0.0) + num_bytes / self._links.network(node)
        self.s3_total += num_bytes / self._links.s3_total_bytes_per_s

    def take_disk(self, node: str, num_bytes: int) -> None:
        self.disk[node] = self.disk.get(node, 0.0) + num_bytes / self._links.disk(node)

    def take_memory(self, node: str, num_bytes: int) -> None:
        self.memory[node] = self.memory.get(node, 0.0) + num_bytes / self._links.memory_bytes_per_s

    def busy_until(self, source: Source, node: str) -> float:
        """Return the end in seconds of the busiest line between `source` and `node`."""
        at = source.node
        if source.kind == "s3":
            return max(self.s3.get(node, 0.0), self.into.get(node, 0.0), self.s3_total)
        own = self.disk.get(at, 0.0) if source.kind == "disk" else 0.0
        if at == node:
            return max(own, self.memory.get(node, 0.0))
        return max(
            own, self.out.get(at, 0.0), self.into.get(node, 0.0), self.pair.get((at, node), 0.0)
        )

    def busiest(self) -> float:
        tables = (self.out, self.into, self.disk, self.memory, self.s3)
        loads = [load for table in tables for load in table.values()]
        return max([*loads, *self.pair.values(), self.s3_total])


@dataclass(frozen=True)
class Assignment:
    """Assignment of reads and messages to every worker. Shards are indices of the placement.

    `fetches` and `received` map a worker to {ordered sources: shards}: the worker reads the former
    itself, the latter come in messages.
    """

    fetches: Mapping[str, Mapping[tuple[Source, ...], list[int]]]
    received: Mapping[str, Mapping[tuple[Source, ...], list[int]]]
    sends: Sequence[Send]
    tier_bytes: tuple[int, int, int, int]
    makespan_s: float
    lower_bound_s: float
    lines: Lines

    def expected_s(self, source: Source, node: str) -> float:
        """Return the seconds until the lines from `source` to `node` end all assigned bytes."""
        return self.lines.busy_until(source, node)


def assign(placement: Placement, links: LinkRates) -> Assignment:
    """Choose a source for every need of `placement` (see the module's docstring)."""
    balancer = _Balancer(placement, links)
    balancer.take_local()
    balancer.take_remote()
    return balancer.result()


class _Ends:
    """End times in seconds of the lines of several sources of one shard, if each gave the shard.

    They are kept while the shard goes to one node after another: only those of the node that has
    just given it change. If pairs of nodes have speeds of their own, the times are computed again
    for each destination.
    """

    def __init__(
        self, lines: Lines, by_pair: bool, num_bytes: int, sources: Sequence[Source]
    ) -> None:
        self.sources: list[Source] = []
        self._lines = lines
        self._by_pair = by_pair
        self._num_bytes = num_bytes
        self._until: list[float] = []
        self._at: dict[str, list[int]] = {}
        for source in sources:
            self.add(source)

    def add(self, source: Source) -> None:
        self._at.setdefault(source.node, []).append(len(self.sources))
        self.sources.append(source)
        self._until.append(self._lines.until(source, "", self._num_bytes))

    def refresh(self, node: str) -> None:
        """Update the end times of sources on `node`, after one of them has given something."""
        for at in self._at.get(node, ()):
            self._until[at] = self._lines.until(self.sources[at], "", self._num_bytes)

    def for_node(self, node: str) -> list[float]:
        """Return each source's end time in seconds for this destination."""
        if self._by_pair:
            return [self._lines.until(source, node, self._num_bytes) for source in self.sources]
        return self._until


class _Balancer:
    """Greedy assignment, used once; its state is the lines' loads and the decisions so far."""

    def __init__(self, placement: Placement, links: LinkRates) -> None:
        self.placement = placement
        self.links = links
        self.lines = Lines(links)
        self.fetches: dict[str, dict[tuple[Source, ...], list[int]]] = {}
        self.received: dict[str, dict[tuple[Source, ...], list[int]]] = {}
        self.sends: list[Send] = []
        self.tier_bytes = [0, 0, 0, 0]
        self.busy_bytes: dict[str, int] = {}
        self.remote: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
        self._ordered: dict[tuple[tuple[int, ...], str, Source], tuple[Source, ...]] = {}
        self._nearest: dict[tuple[tuple[int, ...], str], tuple[Source, ...]] = {}
        self._local: dict[tuple[tuple[int, ...], str], Source | None] = {}
        self.reserved_s: dict[str, float] = {}
        self._nodes: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._originals: dict[tuple[int, ...], tuple[Source, ...]] = {}

    # -- what lies on the worker's own node

    def take_local(self) -> None:
        """Give each need a local source if the worker's own node has one.

        The other needs are grouped by node.
        """
        wanting: dict[tuple[int, str], list[str]] = {}
        for worker in sorted(self.placement.needs):
            node = self.placement.node_by_worker[worker]
            for shard in self.placement.needs[worker]:
                source = self._local_source(self.placement.holders[shard], node)
                if source is None:
                    wanting.setdefault((shard, node), []).append(worker)
                else:
                    self._take(worker, shard, source, DISK if source.kind == "disk" else MEMORY)
        for (shard, node), workers in wanting.items():
            relay = self.links.memory_bytes_per_s > self.links.network(node) or self._only_durable(
                shard
            )
            groups = [tuple(workers)] if relay else [(worker,) for worker in workers]
            self.remote.setdefault(shard, []).extend((node, group) for group in groups)

    def _local_source(self, holders: tuple[int, ...], node: str) -> Source | None:
        key = (holders, node)
        if key not in self._local:
            rank = {"memory": 0, "worker": 1, "disk": 2}
            sources = [self.placement.sources[number] for number in holders]
            local = [source for source in sources if source.node == node]
            here = [source for source in local if source.kind in rank]
            self._local[key] = min(
                here, key=lambda source: (rank[source.kind], source), default=None
            )
        return self._local[key]

    def _only_durable(self, shard: int) -> bool:
        return not self._peers(self.placement.holders[shard])

    def _peers(self, holders: tuple[int, ...]) -> tuple[Source, ...]:
        if holders not in self._originals:
            sources = map(self.placement.sources.__getitem__, holders)
            rank = {"worker": 0, "memory": 1, "disk": 2}
            peers = sorted(
                (s for s in sources if s.kind != "s3"),
                key=lambda source: (rank[source.kind], source),
            )
            self._originals[holders] = tuple(peers)
        return self._originals[holders]

    # -- what must come from elsewhere

    def take_remote(self) -> None:
        """Choose among peers, and durable storage for what no peer holds.

        Most constrained and largest shards first.
        """
        self.target_s = lower_bound_s(self._demand(), self.links)
        self.reader_of = self._durable_readers()
        for shard in self.remote:
            self._reserve(shard, 1.0)
        num_bytes = self.placement.num_bytes
        holders = self.placement.holders
        order = sorted(self.remote, key=lambda s: (len(self._peers(holders[s])), -num_bytes[s], s))
        for shard in order:
            self._spread(shard, self.remote[shard])

    def _durable_readers(self) -> dict[int, str]:
        """Choose the reader of each shard that several nodes lack and only durable storage holds.

        Every node takes whole runs of neighbouring shards, up to one common level of its line to
        storage. Neighbours are contiguous there, and one request brings many.
        """
        alone: dict[str, float] = {}
        shared: dict[tuple[str, ...], list[int]] = {}
        for shard, groups in sorted(self.remote.items()):
            nodes = tuple(sorted({node for node, _ in groups}))
            if not self._only_durable(shard):
                continue
            if len(nodes) == 1:
                alone[nodes[0]] = alone.get(nodes[0], 0.0) + self.placement.num_bytes[
                    shard
                ] / self.links.s3(nodes[0])
            else:
                shared.setdefault(nodes, []).append(shard)
        readers: dict[int, str] = {}
        for nodes, shards in sorted(shared.items(), key=lambda item: (len(item[0]), item)):
            readers.update(self._runs(nodes, shards, alone))
        return readers

    def _runs(
        self, nodes: tuple[str, ...], shards: list[int], loads: dict[str, float]
    ) -> Iterator[tuple[int, str]]:
        """Assign `shards`, in order, to `nodes` so that their `loads` end as level as possible.

        `loads` are in seconds and are updated; shards stay whole.
        """
        num_bytes = self.placement.num_bytes
        speed = self.links.s3
        level = _level(
            [(loads.get(node, 0.0), speed(node)) for node in nodes],
            sum(num_bytes[s] for s in shards),
        )
        left = sorted(nodes, key=lambda node: (loads.get(node, 0.0), node))
        for shard in shards:
            node = left[0]
            seconds = num_bytes[shard] / speed(node)
            while len(left) > 1 and loads.get(node, 0.0) + 0.5 * seconds > level:
                left.pop(0)
                node = left[0]
                seconds = num_bytes[shard] / speed(node)
            loads[node] = loads.get(node, 0.0) + seconds
            yield shard, node

    def _reserve(self, shard: int, sign: float) -> None:
        """Reserve (or, with -1, release) the seconds that a shard's holders must send it at least.

        One transfer of the shard is shared among its holders' nodes.
        """
        nodes = self._holding_nodes(self.placement.holders[shard])
        for node in nodes:
            seconds = self.placement.num_bytes[shard] / self.links.network(node) / len(nodes)
            self.reserved_s[node] = self.reserved_s.get(node, 0.0) + sign * seconds

    def _holding_nodes(self, holders: tuple[int, ...]) -> tuple[str, ...]:
        if holders not in self._nodes:
            self._nodes[holders] = tuple(sorted({source.node for source in self._peers(holders)}))
        return self._nodes[holders]

    def _demand(self) -> Demand:
        return Demand(
            placement=self.placement,
            destinations={
                shard: [node for node, _ in groups] for shard, groups in self.remote.items()
            },
            memory_s=dict(self.lines.memory),
            disk_s=dict(self.lines.disk),
        )

    def _spread(self, shard: int, groups: list[tuple[str, tuple[str, ...]]]) -> None:
        """Bring one shard to every node that lacks it.

        It comes from its holders, or from a node that has just received it.
        """
        originals = self._peers(self.placement.holders[shard])
        self._reserve(shard, -1.0)
        if len(groups) > 1:
            first = self.reader_of.get(shard)
            out = self.lines.out
            groups = sorted(
                groups, key=lambda group: (group[0] != first, out.get(group[0], 0.0), group)
            )
        served: list[tuple[Source, int]] = []
        held, relayed = self._ends(shard, originals), self._ends(shard, ())
        for node, workers in groups:
            leader = (
                workers[0]
                if len(workers) == 1
                else min(workers, key=lambda w: (self.busy_bytes.get(w, 0), w))
            )
            source, depth = self._best(shard, node, held, relayed, served)
            tier = S3 if source.kind == "s3" else PEER
            self._take(leader, shard, source, tier, depth)
            arrived = depth + 1 if source.kind == "worker" else 1
            here = Source("worker", node, leader, self.placement.step)
            served.append((here, arrived))
            relayed.add(here)
            for ends in (held, relayed):
                ends.refresh(source.node)
            for worker in workers:
                if worker != leader:
                    self._take(worker, shard, here, MEMORY, arrived)

    def _ends(self, shard: int, sources: Sequence[Source]) -> _Ends:
        return _Ends(
            self.lines, bool(self.links.pair_bytes_per_s), self.placement.num_bytes[shard], sources
        )

    def _best(
        self, shard: int, node: str, held: _Ends, relayed: _Ends, served: list[tuple[Source, int]]
    ) -> tuple[Source, int]:
        """Return the source whose lines end first, and the depth of its sends.

        Of several, the one that does least is taken. Relays are used only once the holders' lines
        are too long.
        """
        best = None
        depth = 0
        best_until = float("inf")
        if until := held.for_node(node):
            best_until = min(until)
            at = until.index(best_until)
            if until.count(best_until) > 1:
                equal = (other for other, ends in enumerate(until) if ends == best_until)
                at = min(
                    equal,
                    key=lambda other: (self.busy_bytes.get(held.sources[other].name, 0), other),
                )
            best = held.sources[at]
        late = best is None or best_until + self.reserved_s.get(best.node, 0.0) > self.target_s
        if served and late and min(until := relayed.for_node(node)) < best_until:
            best, depth = served[until.index(min(until))]
        return (best, depth) if best is not None else (self._durable(shard), 0)

    def _durable(self, shard: int) -> Source:
        holders = self.placement.holders[shard]
        sources = (self.placement.sources[number] for number in holders)
        return next(source for source in sources if source.kind == "s3")

    # -- book-keeping

    def _take(self, worker: str, shard: int, source: Source, tier: int, depth: int = 0) -> None:
        node = self.placement.node_by_worker[worker]
        num_bytes = self.placement.num_bytes[shard]
        self.tier_bytes[tier] += num_bytes
        self.busy_bytes[worker] = self.busy_bytes.get(worker, 0) + num_bytes
        if tier == MEMORY:
            self.lines.take_memory(node, num_bytes)
        elif tier == DISK:
            self.lines.take_disk(node, num_bytes)
        elif tier == PEER:
            self.lines.take_peer(source, node, num_bytes)
        else:
            self.lines.take_s3(node, num_bytes)
        table = self.fetches
        if source.kind == "worker":
            table = self.received
            self.busy_bytes[source.name] = self.busy_bytes.get(source.name, 0) + num_bytes
            self.sends.append(Send(shard, source.name, worker, depth))
        sources = self._with_fallbacks(self.placement.holders[shard], node, source)
        table.setdefault(worker, {}).setdefault(sources, []).append(shard)

    def _with_fallbacks(
        self, holders: tuple[int, ...], node: str, first: Source
    ) -> tuple[Source, ...]:
        key = (holders, node, first)
        if key not in self._ordered:
            self._ordered[key] = (
                first,
                *(source for source in self._by_distance(holders, node) if source != first),
            )
        return self._ordered[key]

    def _by_distance(self, holders: tuple[int, ...], node: str) -> tuple[Source, ...]:
        key = (holders, node)
        if key not in self._nearest:
            sources = map(self.placement.sources.__getitem__, holders)
            self._nearest[key] = tuple(
                sorted(sources, key=lambda source: (distance(source, node), source))
            )
        return self._nearest[key]

    def result(self) -> Assignment:
        memory, disk, peer, s3 = self.tier_bytes
        makespan_s = self.lines.busiest()
        return Assignment(
            self.fetches,
            self.received,
            self.sends,
            (memory, disk, peer, s3),
            makespan_s,
            min(self.target_s, makespan_s),
            self.lines,
        )


def _level(lines: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Return the seconds at which lines are level after `num_bytes` are spread over them.

    Each line is (load in seconds, bytes per second).
    """
    ordered = sorted(lines)
    for count in range(1, len(ordered) + 1):
        speed = sum(rate for _, rate in ordered[:count])
        level = (num_bytes + sum(load * rate for load, rate in ordered[:count])) / speed
        if count == len(ordered) or level <= ordered[count][0]:
            return level
    return 0.0


def distance(source: Source, node: str) -> int:
    """Return the distance rank of a source from a worker on `node`.

    Its node's memory 0 and 1, its disk 2, peers 3 to 5, durable storage 6.
    """
    if source.kind == "s3":
        return 6
    here = source.node == node
    return {"memory": 0 if here else 4, "worker": 1 if here else 3, "disk": 2 if here else 5}[
        source.kind
    ]
