"""Schedule of a restore: the source of each shard that each worker gets.

A pure function of needs, holders and link speeds. No torch, no clock.

Every shard that a worker needs and lacks in its own memory comes from the nearest tier that holds
it: its own node's memory, its own node's disk, a peer, and durable storage only for what no living
worker or agent holds. Within a tier the sources are chosen so that the slowest link finishes first.
A node fetches a shard once and passes it on to its other workers. A shard that several nodes lack
is passed on between them if its holders' links would be the slowest.
"""

import pickle
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from recovery.state.holdings import Holding, Source
from recovery.state.layout import Layout, ShardId
from recovery.transfer.balance import Assignment, assign
from recovery.transfer.links import LinkRates
from recovery.transfer.messages import Message, make_messages
from recovery.transfer.placement import Placement

TIERS = ("memory", "disk", "peer", "s3")


@dataclass(frozen=True)
class Fetch:
    """Shards that one worker is to get from the first of `sources` that gives them.

    The other sources are fallbacks, nearest first. `expected_s`, from the start of the restore, is
    when the busiest line of the first source's bytes is to have done all its work.
    """

    sources: tuple[Source, ...]
    shards: tuple[ShardId, ...]
    expected_s: float = 0.0


def shards_of(fetches: Iterable[Fetch]) -> list[ShardId]:
    """Return the shards of all `fetches`, in order."""
    shards: list[ShardId] = []
    for fetch in fetches:
        shards += fetch.shards
    return shards


@dataclass(frozen=True)
class WorkerPart:
    """Part of one worker in a restore: keep, fetch by itself, and exchange with other workers.

    `keep` are shards in its own live memory. `fetches` have a first source that the worker reads
    itself (its node's memory or disk, a peer's agent, s3). `messages` are its sends and receives
    over the group, in the order that all workers share, so that no two wait for each other.
    `message_fallbacks` are the other sources of received shards.
    """

    worker: str
    node: str
    step: int
    keep: tuple[ShardId, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    messages: tuple[Message, ...] = ()
    message_fallbacks: tuple[Fetch, ...] = ()


@dataclass(frozen=True)
class TransferSchedule:
    """Schedule of a whole restore.

    `makespan_s` is the busiest resource's time; no schedule of these tiers beats `lower_bound_s`.
    `bytes_by_tier` counts what each tier is to give, all workers together; kept shards move nothing
    and count nowhere. `checksums` are those that the holders' snapshots and manifests recorded: a
    reader believes them, not the sender.
    """

    step: int
    parts: Mapping[str, WorkerPart]
    makespan_s: float
    lower_bound_s: float
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[Source, Mapping[ShardId, int]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone, packed: orders take the schedule of all workers to each node."""
        values = [getattr(self, each.name) for each in fields(self)]
        return _unpack, (zlib.compress(pickle.dumps(values), 1),)

    def checksums_of(self, source: Source) -> Mapping[ShardId, int]:
        """Return the known checksums of the bytes that `source` must give.

        Each source has its own (see `schedule`).
        """
        return self.checksums.get(source, {})

    def checksums_of_message(self, worker: str, shard: ShardId) -> Collection[int]:
        """Return the checksums that a shard may have when `worker` gets it in a message.

        Empty if only live memory without a snapshot has the shard. A worker that passes on what
        this restore brings it has the shard from one of its own sources.
        """
        giver = self.sources_of(worker, shard)[0]
        known = set[int]()
        handed_on = self._sources_of_giver(giver, shard)
        while handed_on:
            giver, *others = handed_on
            for other in others:
                checksums = self.checksums_of(other)
                if shard in checksums:
                    known.add(checksums[shard])
            handed_on = self._sources_of_giver(giver, shard)

        first = self.checksums_of(giver).get(shard)
        if first is None:
            # Live memory without a snapshot may differ in rounding from every known copy.
            return ()
        return known | {first}

    def _sources_of_giver(self, giver: Source, shard: ShardId) -> tuple[Source, ...]:
        """Return the sources of a shard that `giver` passes on; empty if it has it by itself."""
        if giver.kind != "worker":
            return ()
        return self.sources_of(giver.name, shard)

    @cached_property
    def _sources(self) -> dict[tuple[str, ShardId], tuple[Source, ...]]:
        table: dict[tuple[str, ShardId], tuple[Source, ...]] = {}
        for part in self.parts.values():
            for fetch in (*part.fetches, *part.message_fallbacks):
                for shard in fetch.shards:
                    table[part.worker, shard] = fetch.sources
        return table

    def sources_of(self, worker: str, shard: ShardId) -> tuple[Source, ...]:
        """Return the ordered sources of a shard that `worker` must get; empty if kept."""
        return self._sources.get((worker, shard), ())


def _unpack(packed: bytes) -> TransferSchedule:
    """Return the schedule that `TransferSchedule.__reduce__` has packed."""
    return TransferSchedule(*pickle.loads(zlib.decompress(packed)))


@dataclass(frozen=True)
class EarlierRound:
    """Result of an earlier round of the same restore.

    excluded: copies that proved bad. obtained: shards that each worker already has.
    """

    excluded: Collection[tuple[Source, ShardId]] = ()
    obtained: Mapping[str, Collection[ShardId]] = field(default_factory=dict)


def schedule(
    layout: Layout,
    node_by_worker: Mapping[str, str],
    holdings: Iterable[Holding],
    step: int,
    links: LinkRates | None = None,
    earlier: EarlierRound | None = None,
) -> TransferSchedule:
    """Return the schedule that fills `layout` with the state of `step`.

    `node_by_worker` places every worker of the layout. `holdings` may hold any steps; those of
    `step` count. A source's bytes are checked against its own holding's checksum: replicas on
    different devices may differ in rounding. Live memory has that of its own snapshot of this step,
    if there is one.

    Raises:
        NotRestorable: some shard has no source left.
    """
    links = links or LinkRates()
    earlier = earlier or EarlierRound()
    held = [holding for holding in holdings if holding.step == step]
    placement = Placement.of(
        layout, node_by_worker, held, step, frozenset(earlier.excluded), earlier.obtained
    )
    assignment = assign(placement, links)
    return _as_schedule(placement, assignment, _checksums(placement.sources, held))


def _checksums(
    sources: Iterable[Source], held: Iterable[Holding]
) -> dict[Source, Mapping[ShardId, int]]:
    known: dict[Source, dict[ShardId, int]] = {}
    for holding in held:
        known.setdefault(holding.source, {}).update(holding.checksums)

    found: dict[Source, Mapping[ShardId, int]] = {}
    for source in sources:
        recorded_by = source
        if source.kind == "worker":
            # Live memory has the bytes of the worker's own snapshot of the same step.
            recorded_by = replace(source, kind="memory")
        checksums = known.get(recorded_by)
        if checksums:
            found[source] = checksums
    return found


def _as_schedule(
    placement: Placement, assignment: Assignment, checksums: Mapping[Source, Mapping[ShardId, int]]
) -> TransferSchedule:
    messages_by_worker: dict[str, list[Message]] = {}
    for message in make_messages(assignment.sends, placement):
        messages_by_worker.setdefault(message.source, []).append(message)
        messages_by_worker.setdefault(message.destination, []).append(message)

    parts = {}
    for worker in sorted({*placement.node_by_worker, *messages_by_worker}):
        fetches = assignment.fetches.get(worker, {})
        received = assignment.received.get(worker, {})
        parts[worker] = WorkerPart(
            worker=worker,
            node=placement.node_of(worker),
            step=placement.step,
            keep=placement.shards_at(placement.kept.get(worker, ())),
            fetches=_fetches(placement, worker, fetches, assignment),
            messages=tuple(messages_by_worker.get(worker, ())),
            message_fallbacks=_fetches(placement, worker, received, assignment),
        )

    return TransferSchedule(
        step=placement.step,
        parts=parts,
        makespan_s=assignment.makespan_s,
        lower_bound_s=assignment.lower_bound_s,
        bytes_by_tier=dict(zip(TIERS, assignment.tier_bytes, strict=True)),
        checksums=checksums,
    )


def _fetches(
    placement: Placement,
    worker: str,
    shards_by_sources: Mapping[tuple[Source, ...], list[int]],
    assignment: Assignment,
) -> tuple[Fetch, ...]:
    node = placement.node_of(worker)
    fetches = []
    for sources, numbers in shards_by_sources.items():
        expected_s = assignment.expected_s(sources[0], node)
        fetches.append(Fetch(sources, placement.shards_at(numbers), expected_s))
    return tuple(fetches)
