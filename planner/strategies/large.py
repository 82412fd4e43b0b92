"""Large fleets: families of pipelines that are all cut at the same walls, each solved by one integer program.

On hundreds of GPUs gradient sync decides which pipelines go together. Pipelines that are cut at different blocks sync one
layer after the other; pipelines that all are cut at every g-th block sync g blocks after each other, and the g-block pieces
side by side. So the search runs over families (g, least TP degree): the relaxation's time and the chain of g blocks rank
them, and the integer program runs for the best.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.strategies.drafts import Draft, Estimator, assign_microbatches
from planner.strategies.refine import draft_fits
from planner.strategies.segments import Relaxed, Segments
from planner.strategies.tables import Ints, Tables

_SPACINGS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 20)
_SYNC_SHARE = 0.15


@dataclass(frozen=True)
class LargeEffort:
    """How much to look at: families packed, bottlenecks and nodes of each integer program."""

    packed: int = 6
    lanes: int = 6
    nodes: int = 10


@dataclass(frozen=True)
class Family:
    """Pipelines cut at every `spacing`-th block, of groups of at least `degree` GPUs; estimated seconds of a step."""

    spacing: int
    degree: int
    seconds: float
    relaxed_s: float
    relaxed: Relaxed
    program: Segments


class LargeSearch:
    """Drafts for a fleet of hundreds of GPUs and more."""

    def __init__(
        self, tables: Tables, batch: int, supply: Ints, max_stages: int, estimator: Estimator, hurry: Callable[[], bool],
        mixed_microbatch: bool = True, mixed_tp: bool = True, least_pipelines: int = 1, effort: LargeEffort = LargeEffort(),
    ):  # fmt: skip
        self.tables, self.batch, self.supply, self.max_stages = tables, batch, supply, max_stages
        self.estimator, self.hurry, self.effort = estimator, hurry, effort
        self.mixed_microbatch, self.mixed_tp, self.least_pipelines = mixed_microbatch, mixed_tp, least_pipelines
        self.degrees = sorted({kind.tp_degree for kind in tables.kinds})

    def drafts(self) -> Iterator[Draft]:
        """The drafts of the best families, by the relaxation; one whose relaxation is above a draft's time cannot beat it."""
        best = np.inf
        families = sorted(self._families(), key=lambda family: (family.seconds, family.spacing, family.degree))
        for family in families[: self.effort.packed]:
            if family.seconds > best or self.hurry():
                return
            for draft in self._pack(family):
                best = min(best, self.estimator.draft_s(draft))
                yield draft

    def _families(self) -> Iterator[Family]:
        """Those that the relaxation does not rule out, in rising order of their sync."""
        sizes = sorted({row.microbatch for row in self.tables.rows})
        for size in [[b] for b in sizes] if not self.mixed_microbatch else [sizes]:
            yield from self._families_of(size)

    def _families_of(self, sizes: Sequence[int]) -> Iterator[Family]:
        guess, best = self._guess(), np.inf
        for sync, spacing, degree in sorted(self._options()):
            if sync > _SYNC_SHARE * guess or sync + 0.8 * guess > best or self.hurry():
                continue
            degrees = [d for d in self.degrees if (d >= degree if self.mixed_tp else d == degree)]
            program = Segments(self.tables, self.batch, self.supply, self.max_stages, spacing, degrees, sizes)
            found = program.least_time(min(guess, best - sync), best * 1.02 - sync)
            if found is not None:
                sizes = program.used_sizes(found[1])
                best = min(best, found[0] + sync)
                yield Family(spacing, degree, found[0] + sync, found[0], found[1], program)

    def _options(self) -> Iterator[tuple[float, int, int]]:
        """(seconds of the chain, spacing, least degree) of the families there are."""
        tables, ring = self.tables, self.tables.ring_s
        each = max(float((row.sync_bytes[1:-1] * tables.kinds[row.kind].tp_degree).max()) for row in tables.rows)
        everyone = frozenset(range(len(tables.resources)))
        for degree in self.degrees:
            for spacing in _SPACINGS:
                if spacing < tables.num_blocks:
                    yield (ring(everyone, each * spacing / degree, 8) if ring else 0.0, spacing, degree)

    def _guess(self) -> float:
        """A step time from the fleet's speed alone."""
        tables, speed = self.tables, np.zeros(len(self.supply))
        for row, whole in zip(tables.rows, tables.time_sums[:, -1], strict=True):
            kind = tables.kinds[row.kind]
            speed[kind.resource] = max(speed[kind.resource], row.microbatch / float(whole) / kind.tp_degree)
        return self.batch / float(speed @ self.supply) * 1.2

    def _pack(self, family: Family) -> Iterator[Draft]:
        effort = self.effort
        shapes = family.program.whole(
            family.relaxed_s, family.relaxed, effort.nodes, effort.lanes, self.least_pipelines
        )
        draft = assign_microbatches(self.estimator, shapes, self.batch) if shapes else None
        if draft is not None and draft_fits(self.estimator, draft):
            yield draft
