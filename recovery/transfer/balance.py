"""Assignment of sources to needs by greedy list scheduling on the loads of links.

Every resource (a node's card in and out, its disk, its memory, its link to durable storage, a
capped pair of nodes) is a line that is busy for bytes / speed; all lines work at once, so the
restore takes as long as the busiest (the makespan). Shards with the fewest alternatives are placed
first, larger ones before smaller, each at the source whose line then ends first (Graham's longest
processing time rule, Graham 1969, SIAM J. Appl. Math. 17(2)). The result carries a lower bound,
too.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from recovery.state.holdings import Source
from recovery.transfer.bounds import Demand, lower_bound_s
from recovery.transfer.links import Lines, LinkRates
from recovery.transfer.messages import Send
from recovery.transfer.placement import Placement, SourceOrder
from recovery.transfer.source_choices import SourceChoices

MEMORY, DISK, PEER, S3 = range(4)
_Group = tuple[str, tuple[str, ...]]
"""A node that lacks a shard, and its workers that get the shard together."""


@dataclass(frozen=True)
class Assignment:
    """Assignment of reads and messages to every worker. Shards are indices of the placement.

    `fetches` and `received` map a worker to {ordered sources: shards}: the worker reads the former
    itself, the latter come in messages.
    """

    fetches: Mapping[str, Mapping[SourceOrder, list[int]]]
    received: Mapping[str, Mapping[SourceOrder, list[int]]]
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
    just given it change.
    """

    def __init__(self, lines: Lines, num_bytes: int, sources: Sequence[Source]) -> None:
        self.sources: list[Source] = []
        self._lines = lines
        self._num_bytes = num_bytes
        self.until: list[float] = []
        """Each source's end time in seconds."""
        self._at: dict[str, list[int]] = {}
        for source in sources:
            self.add(source)

    def add(self, source: Source) -> None:
        self._at.setdefault(source.node, []).append(len(self.sources))
        self.sources.append(source)
        self.until.append(self._lines.until(source, self._num_bytes))

    def refresh(self, node: str) -> None:
        """Update the end times of sources on `node`, after one of them has given something."""
        for at in self._at.get(node, ()):
            self.until[at] = self._lines.until(self.sources[at], self._num_bytes)


class _Balancer:
    """Greedy assignment, used once; its state is the lines' loads and the decisions so far."""

    def __init__(self, placement: Placement, links: LinkRates) -> None:
        self.placement = placement
        self.holders = placement.holders
        self.num_bytes = placement.num_bytes
        self.links = links
        self.lines = Lines(links)
        self.choices = SourceChoices(placement)

        self.fetches: dict[str, dict[SourceOrder, list[int]]] = {}
        self.received: dict[str, dict[SourceOrder, list[int]]] = {}
        self.sends: list[Send] = []
        self.tier_bytes = [0, 0, 0, 0]
        self.busy_bytes: defaultdict[str, int] = defaultdict(int)
        self.reserved_s: defaultdict[str, float] = defaultdict(float)
        self.remote: dict[int, list[_Group]] = {}

    # -- what lies on the worker's own node

    def take_local(self) -> None:
        """Give each need a local source if the worker's own node has one.

        The other needs are grouped by node.
        """
        wanting: dict[tuple[int, str], list[str]] = {}
        for worker in sorted(self.placement.needs):
            node = self.placement.node_by_worker[worker]
            for shard in self.placement.needs[worker]:
                source = self.choices.local(self.holders[shard], node)
                if source is None:
                    wanting.setdefault((shard, node), []).append(worker)
                    continue

                tier = DISK if source.kind == "disk" else MEMORY
                self._take(worker, shard, source, tier)

        for (shard, node), workers in wanting.items():
            groups = self.remote.setdefault(shard, [])
            if self._comes_once(shard, node):
                groups.append((node, tuple(workers)))
            else:
                groups.extend((node, (worker,)) for worker in workers)

    def _comes_once(self, shard: int, node: str) -> bool:
        """Return True if one worker of `node` gets a shard and passes it on to its neighbours."""
        if self.links.memory_bytes_per_s > self.links.network(node):
            return True
        return self._only_durable(shard)

    def _only_durable(self, shard: int) -> bool:
        return not self.choices.peers(self.holders[shard])

    # -- what must come from elsewhere

    def take_remote(self) -> None:
        """Choose among peers, and durable storage for what no peer holds.

        Most constrained and largest shards first.
        """
        self.target_s = lower_bound_s(self._demand(), self.links)
        self.reader_of = self._durable_readers()
        for shard in self.remote:
            self._reserve(shard, 1.0)

        for shard in sorted(self.remote, key=self._priority):
            self._spread(shard, self.remote[shard])

    def _priority(self, shard: int) -> tuple[int, int, int]:
        num_peers = len(self.choices.peers(self.holders[shard]))
        return (num_peers, -self.num_bytes[shard], shard)

    def _durable_readers(self) -> dict[int, str]:
        """Choose the reader of each shard that several nodes lack and only durable storage holds.

        Every node takes whole runs of neighbouring shards, up to one common level of its line to
        storage. Neighbours are contiguous there, and one request brings many.
        """
        loads: defaultdict[str, float] = defaultdict(float)
        shared: dict[tuple[str, ...], list[int]] = {}
        for shard, groups in sorted(self.remote.items()):
            if not self._only_durable(shard):
                continue

            nodes = tuple(sorted({node for node, _ in groups}))
            if len(nodes) == 1:
                node = nodes[0]
                loads[node] += self.num_bytes[shard] / self.links.s3(node)
            else:
                shared.setdefault(nodes, []).append(shard)

        readers: dict[int, str] = {}
        # Fewest nodes first: the shards that more nodes lack can still level the loads.
        for nodes, shards in sorted(shared.items(), key=lambda item: (len(item[0]), item)):
            readers.update(self._runs(nodes, shards, loads))
        return readers

    def _runs(
        self, nodes: tuple[str, ...], shards: list[int], loads: defaultdict[str, float]
    ) -> Iterator[tuple[int, str]]:
        """Assign `shards`, in order, to `nodes` so that their `loads` end as level as possible.

        `loads` are in seconds and are updated; shards stay whole.
        """
        num_bytes = self.num_bytes
        speed = self.links.s3
        lines = [(loads[node], speed(node)) for node in nodes]
        level = _level(lines, sum(num_bytes[shard] for shard in shards))

        left = sorted(nodes, key=lambda node: (loads[node], node))
        for shard in shards:
            while len(left) > 1:
                seconds = num_bytes[shard] / speed(left[0])
                is_full = loads[left[0]] + 0.5 * seconds > level
                if not is_full:
                    break
                left.pop(0)

            node = left[0]
            loads[node] += num_bytes[shard] / speed(node)
            yield shard, node

    def _reserve(self, shard: int, sign: float) -> None:
        """Reserve (or, with -1, release) the seconds that a shard's holders must send it at least.

        One transfer of the shard is shared among its holders' nodes.
        """
        num_bytes = self.num_bytes[shard]
        nodes = self.choices.nodes(self.holders[shard])
        for node in nodes:
            seconds = num_bytes / self.links.network(node) / len(nodes)
            self.reserved_s[node] += sign * seconds

    def _demand(self) -> Demand:
        destinations = {}
        for shard, groups in self.remote.items():
            destinations[shard] = [node for node, _ in groups]

        return Demand(
            placement=self.placement,
            destinations=destinations,
            memory_s=dict(self.lines.memory),
            disk_s=dict(self.lines.disk),
        )

    def _spread(self, shard: int, groups: list[_Group]) -> None:
        """Bring one shard to every node that lacks it.

        It comes from its holders, or from a node that has just received it.
        """
        originals = self.choices.peers(self.holders[shard])
        self._reserve(shard, -1.0)
        if len(groups) > 1:
            groups = sorted(groups, key=partial(self._turn, self.reader_of.get(shard)))

        served: list[tuple[Source, int]] = []
        held = self._ends(shard, originals)
        relayed = self._ends(shard, ())
        for node, workers in groups:
            leader = workers[0]
            if len(workers) > 1:
                leader = min(workers, key=lambda worker: (self._busy_bytes(worker), worker))
            source, depth = self._best(shard, held, relayed, served)
            tier = S3 if source.kind == "s3" else PEER
            self._take(leader, shard, source, tier, depth)

            arrived = 1
            if source.kind == "worker":
                arrived = depth + 1
            here = Source("worker", node, leader, self.placement.step)
            served.append((here, arrived))
            relayed.add(here)
            held.refresh(source.node)
            relayed.refresh(source.node)

            for worker in workers:
                if worker != leader:
                    self._take(worker, shard, here, MEMORY, arrived)

    def _turn(self, reader: str | None, group: _Group) -> tuple[bool, float, _Group]:
        """Return the sort key of a group: the reader of durable storage, then idle cards first."""
        node, _ = group
        return (node != reader, self.lines.out.get(node, 0.0), group)

    def _busy_bytes(self, worker: str) -> int:
        return self.busy_bytes.get(worker, 0)

    def _ends(self, shard: int, sources: Sequence[Source]) -> _Ends:
        return _Ends(self.lines, self.num_bytes[shard], sources)

    def _best(
        self, shard: int, held: _Ends, relayed: _Ends, served: list[tuple[Source, int]]
    ) -> tuple[Source, int]:
        """Return the source whose lines end first, and the depth of its sends.

        Of several, the one that does least is taken. Relays are used only once the holders' lines
        are too long.
        """
        holder: Source | None = None
        holder_until = math.inf
        holders_until = held.until
        if holders_until:
            holder_until = min(holders_until)
            holder = self._idlest(held.sources, holders_until, holder_until)

        if holder is None:
            is_late = True
        else:
            is_late = holder_until + self.reserved_s.get(holder.node, 0.0) > self.target_s

        if served and is_late:
            relays_until = relayed.until
            relay_until = min(relays_until)
            if relay_until < holder_until:
                return served[relays_until.index(relay_until)]

        if holder is None:
            return self.choices.durable(self.holders[shard]), 0
        return holder, 0

    def _idlest(self, sources: Sequence[Source], until: Sequence[float], earliest: float) -> Source:
        """Return the source that does least of those that end at `earliest`, else the first."""
        first = until.index(earliest)
        if until.count(earliest) == 1:
            return sources[first]

        equal = []
        for source, end in zip(sources, until, strict=True):
            if end == earliest:
                equal.append(source)
        return min(equal, key=lambda source: self._busy_bytes(source.name))

    # -- book-keeping

    def _take(self, worker: str, shard: int, source: Source, tier: int, depth: int = 0) -> None:
        node = self.placement.node_by_worker[worker]
        num_bytes = self.num_bytes[shard]
        self.tier_bytes[tier] += num_bytes
        self.busy_bytes[worker] += num_bytes

        if tier == MEMORY:
            self.lines.take_memory(node, num_bytes)
        elif tier == DISK:
            self.lines.take_disk(node, num_bytes)
        elif tier == PEER:
            self.lines.take_peer(source, node, num_bytes)
        else:
            self.lines.take_s3(node, num_bytes)

        # A worker's process serves nobody: what it gives comes in messages.
        table = self.fetches
        if source.kind == "worker":
            table = self.received
            self.busy_bytes[source.name] += num_bytes
            self.sends.append(Send(shard, source.name, worker, depth))

        sources = self.choices.with_fallbacks(self.holders[shard], node, source)
        table.setdefault(worker, {}).setdefault(sources, []).append(shard)

    def result(self) -> Assignment:
        memory, disk, peer, s3 = self.tier_bytes
        makespan_s = self.lines.busiest()
        return Assignment(
            fetches=self.fetches,
            received=self.received,
            sends=self.sends,
            tier_bytes=(memory, disk, peer, s3),
            makespan_s=makespan_s,
            # Rounding may put the bound above the schedule that reaches it.
            lower_bound_s=min(self.target_s, makespan_s),
            lines=self.lines,
        )


def _level(lines: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Return the seconds at which lines are level after `num_bytes` are spread over them.

    Each line is (load in seconds, bytes per second).
    """
    ordered = sorted(lines)
    for count in range(1, len(ordered) + 1):
        filled = ordered[:count]
        speed = sum(rate for _, rate in filled)
        bytes_before = sum(load * rate for load, rate in filled)
        level = (num_bytes + bytes_before) / speed

        is_last = count == len(ordered)
        if is_last or level <= ordered[count][0]:
            return level
    return 0.0
