"""SIMULATED copies of training state on nodes: rounds of copies between agents, and snapshots."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from autohet.runtime.messages import Phase
from autohet.simulate.fleet.generation import SimulatedGeneration
from planner.inputs.fleet import node_of
from recovery.state.holdings import Holding, Source


class SimulatedCopies:
    """Copies that agents hold in memory and on disk, and the newest answer on them."""

    def __init__(self) -> None:
        self.inventories: dict[str, list[Holding]] | None = None
        """Same as `Observation.inventories`."""
        self._holdings: list[Holding] = []

    def answer_inventories(self, nodes: Iterable[str]) -> None:
        """Have the agents of these nodes, which are reachable, answer which copies they hold."""
        self.inventories = {node: [] for node in nodes}
        for copy in self._holdings:
            if copy.source.node in self.inventories:
                self.inventories[copy.source.node].append(copy)

    def keep_newest_round(self, generation: SimulatedGeneration | None) -> None:
        """Record the copies that other nodes' agents hold of this generation.

        They are those of the newest round of copies that had time to arrive.
        """
        if generation is None or generation.phase is Phase.BUILDING:
            return
        step = _newest_copied_step(generation)
        if step is None:
            return

        found = []
        for worker, order in generation.orders.items():
            for target in order.replication_targets:
                source = Source("memory", target.peers[0], worker, step, order.generation)
                found.append(Holding(source, frozenset(target.shards)))

            if order.replication_targets:
                # The other nodes hold a part only; the node's own snapshot of that round
                # completes it.
                source = Source("memory", node_of(worker), worker, step, order.generation)
                held = order.layout.shards_by_worker.get(worker, frozenset())
                found.append(Holding(source, held))
        self._replace("memory", found)

    def keep_checkpoint(self, step: int, generation: int, layout: Any) -> None:
        """Record the copies on disk of a committed checkpoint."""
        found = []
        for worker, shards in layout.shards_by_worker.items():
            source = Source("disk", node_of(worker), worker, step, generation)
            found.append(Holding(source, shards))
        self._replace("disk", found)

    def _replace(self, kind: str, found: list[Holding]) -> None:
        kept = [copy for copy in self._holdings if copy.source.kind != kind]
        self._holdings = kept + found

    def forget(self, node: str) -> None:
        self._holdings = [copy for copy in self._holdings if copy.source.node != node]


def _newest_copied_step(generation: SimulatedGeneration) -> int | None:
    """Return the step of the newest round of copies that has arrived; None if none has."""
    first_step = generation.order.start_step
    steps_on_the_way = max(1, math.ceil(generation.push_s / generation.step_s))
    arrived = generation.step - steps_on_the_way + 1
    if arrived < first_step:
        return None

    # Rounds begin with the generation's first step.
    every = max(1, generation.order.replicate_every_steps)
    return arrived - (arrived - first_step) % every
