"""What each copy of a scripted job's state truly is: kept beside what the controller is told, to
judge its orders by.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from autohet.control.planning.restore_sources import without
from autohet.runtime.messages import GenerationOrder
from recovery.state.holdings import Holding, Source, restorable_step
from recovery.state.layout import Layout, ShardId

History = tuple[int, ...]
"""The generation that ran each step: two states of one length are the same state only if these are
equal.
"""
Copy = tuple[Holding, History]
SNAPSHOTS = 2  # that a node keeps of each worker


@dataclass
class TrueCopies:
    """Snapshots by node, checkpoints by URI, what was uploaded; layouts and first steps of
    the generations; copies that were said to be bad.
    """

    agents: dict[str, dict[Source, Copy]] = field(default_factory=dict)
    durable: dict[str, Copy] = field(default_factory=dict)
    uploaded: dict[tuple[int, int], History] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    bad: set[tuple[Source, ShardId]] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)
    """Nodes whose agents take no more copies."""

    def begin(self, order: GenerationOrder) -> None:
        self.layouts[order.generation] = order.layout
        self.starts[order.generation] = order.start_step

    def live(self, worker: str, step: int, generation: int) -> Holding:
        source = Source("worker", worker.rsplit("/", 1)[0], worker, step, generation)
        return Holding(source, self.layouts[generation].shards_by_worker[worker])

    def takes(self, node: str) -> bool:
        return node not in self.refusing

    def keep(self, holding: Holding, history: History) -> None:
        """A node keeps the last snapshots of each worker."""
        store = self.agents.setdefault(holding.source.node, {})
        there = store.get(holding.source)
        if there is not None:
            holding = Holding(holding.source, holding.shards | there[0].shards)
        store[holding.source] = (holding, history)
        mine = sorted(
            (s for s in store if s.name == holding.source.name),
            key=lambda s: (s.generation, s.step),
        )
        for source in mine[:-SNAPSHOTS]:
            del store[source]

    def lose_newest(self, node: str) -> None:
        """The node's snapshots of the newest step that it keeps are gone."""
        store = self.agents.get(node, {})
        newest = max((source.step for source in store), default=None)
        for source in [source for source in store if source.step == newest]:
            del store[source]

    def push(self, order: GenerationOrder, history: History, nodes: Iterable[str]) -> bool:
        """Copies of what one node alone holds, at other nodes: of the step before.

        Whether all of them found a place.
        """
        step = len(history) - 1
        there = set(nodes)
        if step <= order.start_step:
            return False
        placed = True
        for target in order.replication_targets:
            peer = next((peer for peer in target.peers if peer in there and self.takes(peer)), None)
            placed = placed and peer is not None
            if peer is not None:
                source = Source("memory", peer, target.worker, step, order.generation)
                self.keep(Holding(source, frozenset(target.shards)), history[:step])
        return placed

    def read(self, sources: Iterable[Source], shard: ShardId) -> History | None:
        """The history of what the first source gives that is still there; None where there is
        none.
        """
        for source in sources:
            store = (
                self.durable.get(source.name)
                if source.kind == "s3"
                else self.agents.get(source.node, {}).get(source)
            )
            if store is not None:
                assert shard in store[0].shards, f"{source} never held {shard}"
                return store[1]
        return None

    def newest_whole_step(self, live: Iterable[Copy]) -> int | None:
        """The newest step of the run's present history of which every shard exists and was not said
        to be bad.
        """
        if not self.layouts:
            return None
        by_history: dict[History, list[Holding]] = {}
        kept = (copy for store in self.agents.values() for copy in store.values())
        for holding, history in (*live, *kept, *self.durable.values()):
            later = (
                start for other, start in self.starts.items() if other > holding.source.generation
            )
            if all(holding.step <= start for start in later):
                by_history.setdefault(history, []).extend(without([holding], self.bad))
        shards = next(iter(self.layouts.values())).shards
        whole = [restorable_step(shards, holdings) for holdings in by_history.values()]
        return max((step for step in whole if step is not None), default=None)
