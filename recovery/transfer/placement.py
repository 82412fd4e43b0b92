"""Needs and holders of a restore, with shards and sources as small integers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from recovery.errors import NotRestorable
from recovery.state.holdings import Holding, Source
from recovery.state.layout import Layout, ShardId

HolderSet = tuple[int, ...]
"""Indices of the sources that hold one shard, ascending."""
SourceOrder = tuple[Source, ...]
"""SourceOrder of a shard in the order in which they are asked."""


@dataclass(frozen=True)
class Placement:
    """Needs and holders at one step.

    Shards and sources are indices into `shards` and `sources`, both sorted. `kept` and `needs`
    split each worker's shards into those in its own live memory and those that it must get;
    `holders` gives each shard's sources, ascending.
    """

    step: int
    node_by_worker: Mapping[str, str]
    shards: tuple[ShardId, ...]
    num_bytes: tuple[int, ...]
    sources: tuple[Source, ...]
    holders: tuple[HolderSet, ...]
    kept: Mapping[str, tuple[int, ...]]
    needs: Mapping[str, tuple[int, ...]]

    def node_of(self, worker: str) -> str:
        """Return the node of a worker of the layout, or of a live source that only gives."""
        node = self.node_by_worker.get(worker)
        if node is not None:
            return node

        for source in self.sources:
            if source.kind == "worker" and source.name == worker:
                return source.node
        raise KeyError(worker)

    def sources_at(self, numbers: Iterable[int]) -> list[Source]:
        """Return the sources with these indices, in the same order."""
        return [self.sources[number] for number in numbers]

    def shards_at(self, numbers: Iterable[int]) -> tuple[ShardId, ...]:
        """Return the shards with these indices, in the same order."""
        return tuple(self.shards[number] for number in numbers)

    @staticmethod
    def of(
        layout: Layout,
        node_by_worker: Mapping[str, str],
        holdings: Iterable[Holding],
        step: int,
        excluded: frozenset[tuple[Source, ShardId]],
        obtained: Mapping[str, Collection[ShardId]],
    ) -> Placement:
        unplaced = [worker for worker in layout.workers if worker not in node_by_worker]
        if unplaced:
            raise ValueError(f"workers {', '.join(unplaced)} of the layout have no node")

        wanted_shards: set[ShardId] = set().union(*layout.shards_by_worker.values())
        shards = tuple(sorted(wanted_shards))
        index = {shard: number for number, shard in enumerate(shards)}

        by_source = _shards_by_source(holdings, step, excluded, obtained, node_by_worker)
        sources = tuple(sorted(by_source))
        holders = _holders(index, [by_source[source] for source in sources])

        live = {source.name: by_source[source] for source in sources if source.kind == "worker"}

        kept: dict[str, tuple[int, ...]] = {}
        needs: dict[str, tuple[int, ...]] = {}
        for worker, wanted in layout.shards_by_worker.items():
            own = live.get(worker, frozenset())
            kept[worker] = tuple(sorted(index[shard] for shard in wanted & own))
            needs[worker] = tuple(sorted(index[shard] for shard in wanted - own))

        missing = _without_holder(needs, holders)
        if missing:
            raise NotRestorable(step, tuple(sorted(shards[number] for number in missing)))

        return Placement(
            step=step,
            node_by_worker={worker: node_by_worker[worker] for worker in layout.workers},
            shards=shards,
            num_bytes=tuple(layout.shard_bytes(shard) for shard in shards),
            sources=sources,
            holders=holders,
            kept=kept,
            needs=needs,
        )


def _shards_by_source(
    holdings: Iterable[Holding],
    step: int,
    excluded: frozenset[tuple[Source, ShardId]],
    obtained: Mapping[str, Collection[ShardId]],
    node_by_worker: Mapping[str, str],
) -> dict[Source, frozenset[ShardId]]:
    held: dict[Source, frozenset[ShardId]] = {}
    for holding in holdings:
        if holding.step == step:
            so_far = held.get(holding.source, frozenset())
            held[holding.source] = so_far | holding.shards

    live = {source.name: source for source in held if source.kind == "worker"}
    for worker, shards in obtained.items():
        source = live.get(worker)
        if source is None:
            source = Source("worker", node_by_worker[worker], worker, step)
        held[source] = held.get(source, frozenset()) | frozenset(shards)

    bad: dict[Source, set[ShardId]] = {}
    for source, shard in excluded:
        bad.setdefault(source, set()).add(shard)

    for source, damaged in bad.items():
        if source in held:
            held[source] -= damaged
    return held


def _holders(
    index: Mapping[ShardId, int], shards_of_source: list[frozenset[ShardId]]
) -> tuple[HolderSet, ...]:
    """Return, for each shard of `index`, the indices of the sources that hold it, ascending."""
    lists: list[list[int]] = [[] for _ in index]
    for number, held in enumerate(shards_of_source):
        for shard in held:
            position = index.get(shard)
            if position is not None:
                lists[position].append(number)

    # One tuple object for each distinct holder set: there are few, and equality tests become
    # identity tests.
    interned: dict[HolderSet, HolderSet] = {}
    holders = []
    for numbers in lists:
        key = tuple(numbers)
        holders.append(interned.setdefault(key, key))
    return tuple(holders)


def _without_holder(
    needs: Mapping[str, Sequence[int]], holders: Sequence[Sequence[int]]
) -> set[int]:
    """Return the indices of the shards that some worker needs and no source holds."""
    missing = set()
    for numbers in needs.values():
        for number in numbers:
            if not holders[number]:
                missing.add(number)
    return missing
