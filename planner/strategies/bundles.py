"""Plans of a few different pipelines, each several times side by side, so that most gradients are summed inside nodes.

What each set of GPUs does is in the lattice (`lattice.py`), for groups of any sizes and node types in any order; what is left is to
divide one copy's share of the fleet into such sets (`divisions.py`). The linear program over all sets says what that promises, and the
prices of GPUs.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from planner.plan import Plan
from planner.strategies.divisions import divisions
from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches
from planner.strategies.lattice import BestOf, Lattice
from planner.strategies.packing import Packer
from planner.strategies.placement import place, place_by_stage
from planner.strategies.refine import refine_shape
from planner.strategies.request import Request
from planner.strategies.side_by_side import SideBySide
from planner.strategies.tables import Floats, Ints, Tables

BUNDLED_GPUS = 128  # beyond
_A_COPY_GPUS = 96
_DEGREES = 3
_SYNC = 0.007  # of the step: how long sums may last after the pipelines
_LIMITS = 160
_KEPT = 50
_LOST = 0.015
_EVERY = 4  # of the first limits, one in so many is tried again
_STATES = (40_000, 300_000)  # of the first lattice and the second
_ENTRIES = 8_000_000  # states times limits
_SETS = 3  # about so many pipelines are different
_PLACED = 3
_BEAM, _MOST_SETS = 600, 8
_WORTH = 0.99
_PACKED = 1.005  # what whole pipelines take, times what fractions of them promise


def bundled_plans(
    request: Request, tables: Tables, size: int, known_s: float, hurry: Callable[[], bool]
) -> Iterator[Plan]:
    """The best few by the tables, of pipelines with microbatches of so many sequences; nothing where they promise little less than
    `known_s`. First with many copies of each pipeline, whose lattice is small, then with half of them at the bottlenecks that were best."""
    copies, about_s, limits = 2, known_s, None
    while len(request.fleet.workers) > copies * _A_COPY_GPUS:
        copies *= 2
    for number, states in zip((copies, copies // 2), _STATES, strict=True):
        bundle = _Bundle(request, tables, size, about_s, number, limits, states)
        if hurry() or _WORTH * known_s < bundle.promised_s < np.inf:
            return
        if bundle.promised_s < np.inf:
            yield from bundle.plans()
            about_s, limits = min(known_s, _PACKED * bundle.promised_s), bundle.best_limits()


class _Bundle:
    """Pipelines of which there are so many copies each. step_s: about what a step takes; limits: bottlenecks to try, None: any.
    states: sets of GPUs at most."""

    def __init__(
        self,
        request: Request,
        tables: Tables,
        size: int,
        step_s: float,
        copies: int,
        limits: Floats | None,
        states: int,
    ):
        self.request, self.tables, self.copies = request, tables, copies
        self.batch, self.refined = request.global_batch_sequences, dict[int, Shape | None]()
        self.supply = np.array([each.num_gpus // copies for each in tables.resources], dtype=np.int64)
        self.side = SideBySide(request, tables, _SETS)
        sync_s = _SYNC * step_s
        rates = np.array([self.side.byte_s(_SETS * copies, row) for row in range(len(tables.rows))])
        self.promised_s = np.inf
        if not (rows := _rows(tables, size, self.supply, states)):
            return
        lattice = Lattice(
            tables, rows, self.supply, request.deepest(tables.num_blocks), step_s - sync_s, (sync_s, rates),
            _LIMITS if limits is None else limits, _ENTRIES,
        )  # fmt: skip
        self.sets = lattice.sets()
        if len(self.sets.sequences):
            relaxed = Packer(self.sets.usage, self.supply).relax(self.sets.sequences)
            self.prices, self.promised_s = relaxed.prices, step_s * self.batch / copies / relaxed.value

    def best_limits(self) -> Floats:
        """Those at which some set loses little, by the prices of GPUs, and a few in between."""
        sets, limits = self.sets, self.sets.lattice.limits
        lost = np.full(len(limits), np.inf)
        np.minimum.at(lost, sets.lanes, sets.usage @ self.prices / sets.sequences - 1)
        best = np.argsort(lost, kind="stable")[:_KEPT]
        some = np.arange(0, len(limits), _EVERY)
        return np.asarray(limits[np.union1d(best[lost[best] < _LOST], some)])

    def plans(self) -> Iterator[Plan]:
        """The best few by the tables."""
        timing, found = Estimator(self.tables), list[tuple[float, int, Draft]]()
        best_of, sets = BestOf(self.sets), self.sets
        divided = divisions(sets.usage, sets.sequences, self.supply, self.prices, best_of.within, _BEAM, _MOST_SETS)
        for number, chosen in enumerate(divided):
            draft = self._draft(timing, chosen)
            if draft is not None:
                after = max(self.side.after_one_s(timing, len(draft.pipelines), s) for s, _ in set(draft.pipelines))
                found.append((max(timing.pipeline_s(*p) for p in set(draft.pipelines)) + after, number, draft))
        yield from itertools.islice(self._placed(draft for _, _, draft in sorted(found)), _PLACED)

    def _draft(self, timing: Estimator, chosen: Sequence[int]) -> Draft | None:
        """The pipeline of each set so many times; None where one has none or the batch is not met."""
        shapes = [self._refined(timing, i, len(chosen) * self.copies) for i in chosen]
        if None in shapes:
            return None
        several = [shape for shape in shapes if shape is not None for _ in range(self.copies)]
        return assign_microbatches(timing, several, self.batch)

    def _refined(self, timing: Estimator, i: int, number: int) -> Shape | None:
        """The pipeline of a set with single blocks moved, as one of so many; remembered for other divisions."""
        if i not in self.refined:
            shape, after_s = self.sets.shape(i), partial(self.side.after_one_s, timing, number)
            if shape is not None:
                microbatches = max(1, int(self.sets.sequences[i]) // timing.microbatch(shape))
                shape = refine_shape(timing, shape, microbatches, after_s)
            self.refined[i] = shape
        return self.refined[i]

    def _placed(self, drafts: Iterable[Draft]) -> Iterator[Plan]:
        about = self.request.spec.name, self.batch, self.request.sequence_length
        for draft in drafts:
            parts = len(draft.pipelines) // self.copies
            plan = place_by_stage(self.tables, draft, parts, *about) or place(self.tables, draft, *about)
            if plan is not None:
                yield plan


def _rows(tables: Tables, size: int, supply: Ints, states: int) -> list[int]:
    """Table rows of the smallest degrees for which the lattice has no more states; none where it does with any."""
    kinds = [tables.kinds[row.kind] for row in tables.rows]
    degree = {
        row: kind.tp_degree
        for row, kind in enumerate(kinds)
        if tables.rows[row].microbatch == size and kind.tp_degree <= supply[kind.resource]
    }
    for least in sorted(set(degree.values())):
        if np.prod(supply // least + 1.0) <= states:
            return [row for row in degree if least <= degree[row] < least * 2**_DEGREES]
    return []
