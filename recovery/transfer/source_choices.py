"""Sources that a shard may come from, nearest first, by the set of its holders."""

from collections.abc import Mapping

from recovery.state.holdings import Source
from recovery.transfer.placement import HolderSet, Placement, SourceOrder

_DISTANCE_AT_HOME: Mapping[str, int] = {"memory": 0, "worker": 1, "disk": 2}
_DISTANCE_OF_PEER: Mapping[str, int] = {"worker": 3, "memory": 4, "disk": 5}
_DISTANCE_OF_S3 = 6


class SourceChoices:
    """Sources of each set of holders, computed once: many shards have the same holders."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._local: dict[tuple[HolderSet, str], Source | None] = {}
        self._peers: dict[HolderSet, SourceOrder] = {}
        self._nodes: dict[HolderSet, tuple[str, ...]] = {}
        self._nearest: dict[tuple[HolderSet, str], SourceOrder] = {}
        self._ordered: dict[tuple[HolderSet, str, Source], SourceOrder] = {}

    def local(self, holders: HolderSet, node: str) -> Source | None:
        """Return the nearest source on `node` itself; None if there is none."""
        key = (holders, node)
        if key not in self._local:
            here = []
            for source in self._placement.sources_at(holders):
                if source.node == node and source.kind in _DISTANCE_AT_HOME:
                    here.append(source)

            nearest = min(
                here, key=lambda source: (_DISTANCE_AT_HOME[source.kind], source), default=None
            )
            self._local[key] = nearest
        return self._local[key]

    def peers(self, holders: HolderSet) -> SourceOrder:
        """Return all sources but durable storage, as a worker on another node prefers them."""
        if holders not in self._peers:
            sources = self._placement.sources_at(holders)
            peers = [source for source in sources if source.kind != "s3"]
            peers.sort(key=lambda source: (_DISTANCE_OF_PEER[source.kind], source))
            self._peers[holders] = tuple(peers)
        return self._peers[holders]

    def nodes(self, holders: HolderSet) -> tuple[str, ...]:
        """Return the nodes that hold the shard, sorted."""
        if holders not in self._nodes:
            nodes = {source.node for source in self.peers(holders)}
            self._nodes[holders] = tuple(sorted(nodes))
        return self._nodes[holders]

    def durable(self, holders: HolderSet) -> Source:
        for source in self._placement.sources_at(holders):
            if source.kind == "s3":
                return source
        raise AssertionError("a placement's shards all have a source")

    def with_fallbacks(self, holders: HolderSet, node: str, first: Source) -> SourceOrder:
        """Return `first` and then the other sources, the nearest to `node` first."""
        key = (holders, node, first)
        if key not in self._ordered:
            nearest = self._by_distance(holders, node)
            others = [source for source in nearest if source != first]
            self._ordered[key] = (first, *others)
        return self._ordered[key]

    def _by_distance(self, holders: HolderSet, node: str) -> SourceOrder:
        key = (holders, node)
        if key not in self._nearest:
            sources = self._placement.sources_at(holders)
            sources.sort(key=lambda source: (_distance(source, node), source))
            self._nearest[key] = tuple(sources)
        return self._nearest[key]


def _distance(source: Source, node: str) -> int:
    """Return the distance rank of a source from a worker on `node`."""
    if source.kind == "s3":
        return _DISTANCE_OF_S3
    if source.node == node:
        return _DISTANCE_AT_HOME[source.kind]
    return _DISTANCE_OF_PEER[source.kind]
