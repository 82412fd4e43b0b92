"""SIMULATED preparation: a generation that is built while the one before trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autohet.runtime.messages import WITHDRAWN, GenerationOrder, PreparationOrder, Prepared
from autohet.simulate.costs import Costs
from autohet.simulate.fleet.clock import SimulatedClock


class SimulatedPreparation:
    """Newest preparation of a generation.

    starts: second at which each worker's process is up.
    """

    def __init__(self, costs: Costs, clock: SimulatedClock, starts: Mapping[str, float]) -> None:
        self.orders: Mapping[str, GenerationOrder] = {}
        """Orders to begin without a stop; empty: none are given."""
        self._costs = costs
        self._clock = clock
        self._starts = starts
        self._generation = 0
        self._participants: frozenset[str] = frozenset()
        self._ready_at = math.inf
        self._is_withdrawn = False

    def prepare(self, orders: Mapping[str, PreparationOrder]) -> None:
        self.end()
        self._generation = next(iter(orders.values())).generation
        self._participants = frozenset(orders)
        starts = [self._starts.get(worker, 0.0) for worker in orders]
        self._ready_at = max(self._clock.now, *starts) + self._costs.rebuild_s

    def withdraw(self, workers: Sequence[str], generation: int) -> None:
        if generation == self._generation:
            self._is_withdrawn = True
            self.orders = {}

    def end(self) -> None:
        """Drop what is prepared."""
        self.orders = {}
        self._participants = frozenset()
        self._ready_at = math.inf
        self._is_withdrawn = False

    @property
    def begins_at(self) -> float:
        """Step at which the next generation begins without a stop; inf: none does."""
        return min((order.start_step for order in self.orders.values()), default=math.inf)

    def due(self) -> list[float]:
        is_coming = self._clock.now < self._ready_at < math.inf
        return [self._ready_at] if is_coming else []

    def outcome(self, worker: str) -> Prepared | None:
        """Return what a worker reports of it; None while it is under way."""
        if worker not in self._participants or self._ready_at > self._clock.now:
            return None
        return Prepared(self._generation, WITHDRAWN if self._is_withdrawn else None)

    def is_ready(self, generation: int) -> bool:
        """Return True if this generation is prepared."""
        is_built = self._ready_at <= self._clock.now and not self._is_withdrawn
        return generation == self._generation and is_built

    def rebuild_s(self, generation: int) -> float:
        """Return the seconds to stop and to build this generation, without communicators."""
        costs = self._costs
        return costs.prepared_s if self.is_ready(generation) else costs.rebuild_s
