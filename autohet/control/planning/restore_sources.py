"""Copies of training state that a restore may read, and the speed at which nodes send them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from recovery.state.holdings import Holding, Source
from recovery.state.layout import ShardId
from recovery.transfer.links import LinkRates

if TYPE_CHECKING:
    from autohet.control.values.observation import Observation

BadCopy = tuple[Source, ShardId]
"""Shard of one source that failed, or was wrong, in a restore."""


def name_as_held(bad: Iterable[BadCopy], generation: int, seen: Observation) -> Iterable[BadCopy]:
    """Name bad copies as holdings name them.

    What a worker handed on in the restore of `generation` is held under that generation. If the
    worker had state of the same step live, it may be held under that state's generation
    (`OrderBuilder._arrived`).
    """
    for source, shard in bad:
        relay = None
        # A worker that hands on what it has just received names no generation.
        if source.kind == "worker" and not source.generation:
            relay = seen.reports.get(source.name)
        if relay is None:
            yield source, shard
            continue

        generations: set[int | None] = {generation}
        if relay.step == source.step:
            generations.add(relay.live_generation)
        for known in generations - {None}:
            yield replace(source, generation=known or 0), shard


def links_of(seen: Observation, slow: Mapping[str, float]) -> LinkRates:
    """Return the network speed of each living node.

    This is the speed that labels or the catalogue give its card, or at which a restore found it
    (`slow`). Unequal nodes give unequal shares; a node that is ill is asked only for what no other
    has.
    """
    rates = {}
    for name, view in seen.nodes.items():
        labeled = view.node_type.inter_node_bytes_per_s
        rates[name] = min(labeled, slow.get(name, labeled))
    return LinkRates(network_by_node=rates)


def without(holdings: Iterable[Holding], bad: Collection[BadCopy]) -> list[Holding]:
    """Return the holdings without the copies that proved bad."""
    shards_by_source: dict[Source, set[ShardId]] = {}
    for source, shard in bad:
        shards_by_source.setdefault(source, set()).add(shard)

    found = []
    for holding in holdings:
        if holding.source in shards_by_source:
            good = holding.shards - shards_by_source[holding.source]
            found.append(replace(holding, shards=good))
        else:
            found.append(holding)
    return found


def spare_leavers(
    holdings: Iterable[Holding], step: int, leaving: Collection[str]
) -> list[Holding]:
    """Return holdings in which workers of leaving nodes keep only their unique shards.

    These are the shards that are in no other node's memory at `step`. They then have the leaving
    nodes' network for themselves.
    """
    holdings = list(holdings)
    elsewhere: set[ShardId] = set()
    for holding in holdings:
        source = holding.source
        # A disk is too slow to take the place of a leaver's memory.
        is_in_memory = source.kind in ("worker", "memory")
        if holding.step == step and is_in_memory and source.node not in leaving:
            elsewhere |= holding.shards

    found = []
    for holding in holdings:
        source = holding.source
        if source.kind == "worker" and source.node in leaving:
            found.append(replace(holding, shards=holding.shards - elsewhere))
        else:
            found.append(holding)
    return found
