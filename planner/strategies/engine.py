"""The search of `autohet`: bound every mix of GPUs, make the promising ones exact, pack them into the fleet, refine.

1. `columns.py` lists the mixes that a pipeline may be made of, each with a bound on its speed. The linear program over all of
   them gives the price of a GPU of each node type, and the lower bound where `bound.py` has none.
2. The columns that these prices do not rule out get their best order and cut (`exact.py`, `balance.py`).
3. Gradient sync depends on the whole plan. Up to a few GPUs the integer program runs once for each promising limit on the fullest
   stage, and all sets of few pipelines are compared (`few.py`); on larger fleets it runs by number of pipelines (`by_number.py`).
4. Each packing gets its microbatches exactly and single-layer moves under the 1F1B simulation (`refine.py`).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.bound import lower_bound_s
from planner.search.cost_tables import FEW_GPUS
from planner.search.cut import Balancer
from planner.search.draft import Draft, Estimator, assign_microbatches
from planner.search.tables import Floats, Ints, SyncShape, Tables
from planner.strategies.by_number import Problem, drafts_by_number
from planner.strategies.columns import ColumnMaker, Columns
from planner.strategies.effort import Effort
from planner.strategies.exact import Pipelines, make_exact
from planner.strategies.few import best_sets
from planner.strategies.least_sync import LateSync, late_sync, least_sync_s
from planner.strategies.packing import Packer, close_in, shortest
from planner.strategies.refine import FAR_BEHIND, refine
from planner.strategies.regroup import regrouped

COLUMNS_GPUS = 64  # at most, for a bound over listed columns
SEVERAL_DEGREES_GPUS = 8  # at most, for listing pipelines with several TP degrees on one node type
_REGROUPED = 2
_EFFORT = Effort()


@dataclass(frozen=True, slots=True)
class Level:
    """One limit on what a stage may hold, and the sync seconds that go with it."""

    allowed: Ints
    sync_s: float


@dataclass(frozen=True)
class Found:
    """Drafts, best estimate first, and the bound of the relaxation (0 where there is none)."""

    drafts: tuple[tuple[float, Draft], ...]
    lower_bound_s: float
    evaluated: int


class Engine:
    """One search. `hurry()` is asked between parts and ends the search with what it has."""

    def __init__(
        self, tables: Tables, batch: int, max_stages: int, effort: Effort = _EFFORT, hurry: Callable[[], bool] = lambda: False,
        mixed_microbatch: bool = True, mixed_tp: bool = True, supply: Sequence[int] | None = None,
        least_pipelines: int = 1,
    ):  # fmt: skip
        self.tables = tables
        self.batch = batch
        self.effort = effort
        self.hurry = hurry
        self.mixed_microbatch, self.mixed_tp = mixed_microbatch, mixed_tp
        self.max_stages = max(1, min(max_stages, tables.num_blocks, sum(r.num_gpus for r in tables.resources)))
        self.supply = np.array(supply or [r.num_gpus for r in tables.resources], dtype=np.int64)
        self.estimator = Estimator(tables)
        self.least_pipelines = least_pipelines

    def run(self, seeds: tuple[Draft, ...] = (), below_s: float = np.inf) -> Found:
        """All parts. `seeds` are drafts known beforehand (a previous plan): they bound the search from above. below_s: a step time that is
        known beforehand as well."""
        drafts = {seed: self.estimator.draft_s(seed) for seed in seeds}
        self._add(drafts, sorted(seeds, key=drafts.__getitem__))
        if self.tables.ring_s is None or int(self.supply.sum()) <= FEW_GPUS:
            return self._by_columns(drafts)
        problem = Problem(
            self.tables, self.batch, self.supply, self.max_stages, self.mixed_microbatch, self.mixed_tp, self.least_pipelines,
            self.effort, self.hurry, below_s,
        )  # fmt: skip
        self._add(drafts, drafts_by_number(problem, self.estimator))
        if self.mixed_tp and not self.hurry():
            self._add(drafts, self._regrouped(drafts))
        bound = self._bound() if self.effort.bounded else 0.0
        return Found(self._ranked(drafts), bound, self.estimator.evaluated)

    def _bound(self) -> float:
        """Over listed columns where most can be listed, else over paths."""
        if int(self.supply.sum()) > COLUMNS_GPUS:
            return lower_bound_s(
                self.tables, self.batch, self.supply, self.max_stages, self.least_pipelines, hurry=self.hurry
            )
        columns = ColumnMaker(self.tables, self.max_stages, self.effort.columns, self.supply).make()
        return self._lower_bound(columns)[0] if len(columns) else 0.0

    def _by_columns(self, drafts: dict[Draft, float]) -> Found:
        """Adds what packings of listed columns give; their relaxation is the bound."""
        several = self.mixed_tp and int(self.supply.sum()) <= SEVERAL_DEGREES_GPUS
        columns = ColumnMaker(
            self.tables, self.max_stages, self.effort.columns, self.supply, several_degrees=several
        ).make()
        if len(columns) == 0:
            return Found(self._ranked(drafts), 0.0, 0)
        bound, prices = self._lower_bound(columns)
        if bound == 0.0:
            return Found(self._ranked(drafts), 0.0, len(columns))
        exact = self._promising(columns, bound, prices)
        if len(exact):
            few = self._few(exact) if self.supply.sum() <= FEW_GPUS else iter(())
            self._add(drafts, itertools.chain(few, self._pack_levels(exact)))
        evaluated = len(columns) + self.estimator.evaluated
        return Found(self._ranked(drafts), bound, evaluated)

    def _add(self, drafts: dict[Draft, float], found: Iterable[Draft]) -> None:
        """Adds what is found, and what single moves make of it: beyond a few GPUs only where it is not far behind."""
        far = FAR_BEHIND if int(self.supply.sum()) > FEW_GPUS // 2 else np.inf
        for draft in found:
            drafts[draft] = self.estimator.draft_s(draft)
            if drafts[draft] <= far * min(drafts.values()):
                better = refine(self.estimator, draft, self.batch)
                drafts[better] = self.estimator.draft_s(better)

    def _regrouped(self, drafts: dict[Draft, float]) -> list[Draft]:
        """The best few, and the best of some numbers of pipelines, with other tensor-parallel groups on their GPUs."""
        ranked = [draft for _, draft in self._ranked(drafts)]
        number = {len(draft.pipelines): draft for draft in reversed(ranked)}  # the best of each
        some = dict.fromkeys(ranked[:_REGROUPED] + [draft for draft in ranked if number[len(draft.pipelines)] is draft])
        found = (
            regrouped(self.estimator, draft, self.batch, self.max_stages)
            for draft in itertools.islice(some, 2 * _REGROUPED)
        )
        return [draft for draft in found if draft is not None]

    def _ranked(self, drafts: dict[Draft, float]) -> tuple[tuple[float, Draft], ...]:
        order = sorted(drafts.items(), key=lambda item: (item[1], item[0].pipelines.__len__(), repr(item[0])))
        return tuple((seconds, draft) for draft, seconds in order)

    # -- the bound -----------------------------------------------------------------------------------------------------

    def _lower_bound(self, columns: Columns) -> tuple[float, Floats]:
        """The least step time that the relaxation allows, and the prices there. Zero if no step time meets the batch."""
        packer = Packer(columns.usage, self.supply)
        best, prices = np.inf, np.zeros(len(self.supply))
        for low, high in _ranges(self.least_pipelines, int(self.supply.sum())):
            sync = least_sync_s(self.tables, columns, low)
            late = late_sync(self.tables, columns, low) if self.tables.begun_ahead > 1 else None
            found = self._least_time(packer, columns, sync, late, high, best)
            if found is not None:
                best, prices = found
        return (float(best), prices) if np.isfinite(best) else (0.0, prices)

    def _least_time(
        self, packer: Packer, columns: Columns, sync: Floats, late: LateSync | None, most: int, best: float
    ) -> tuple[float, Floats] | None:
        every = np.arange(len(columns))

        def sequences(seconds: float, of: Ints | None = None) -> Floats:
            some, after = (columns, sync) if of is None else (columns.take(of), sync[of])
            microbatches = some.microbatches_in(seconds - after).astype(float)
            if late is not None:
                microbatches = np.minimum(microbatches, late.microbatches_in(seconds, every if of is None else of))
            return microbatches * some.microbatch

        if np.isfinite(best):
            if packer.relax(sequences(best * 0.9999), float(self.batch), most).value < self.batch * (1 - 1e-9):
                return None
            high = best
        else:
            rate = columns.bottleneck_s if late is None else np.maximum(columns.bottleneck_s, late.last_s)
            after = sync if late is None else np.maximum(sync, late.sync_s)
            high = float((columns.fill_s + after + rate * self.batch / columns.microbatch).min())
        found = close_in(packer, sequences, self.batch, high, most, 1e-3)
        if found is None:
            return None
        low, high = found
        return max(low, 1e-12), packer.relax(sequences(high), None, most).prices

    # -- promising pipelines -------------------------------------------------------------------------------------------

    def _promising(self, columns: Columns, bound: float, prices: Floats) -> Pipelines:
        """Exact pipelines of the columns that lose least at the bound's prices, at the bound and somewhat above it."""
        sync = least_sync_s(self.tables, columns, 1)
        picked: list[Ints] = []
        for factor in (1.0, 1.08, 1.3):
            room = np.maximum((bound * factor - sync - columns.fill_s) / columns.bottleneck_s + 1, 0.0)
            worth = np.where(columns.microbatches_in(bound * factor - sync) > 0, room * columns.microbatch, 0.0)
            cost = columns.usage @ prices
            ratio = worth / np.maximum(cost, 1e-9)
            ratio[worth <= 0] = -1.0
            order = np.argsort(-ratio, kind="stable")
            order = order[ratio[order] > 0]
            picked.append(order[: self.effort.exact])
            for r in range(len(self.supply)):
                mine = order[columns.usage[order, r] > 0]
                picked.append(mine[: self.effort.exact // 8])
        index = np.unique(np.concatenate(picked))
        balancer = Balancer(self.tables, self.max_stages)
        leanings = (0.0, 0.7, 2.0) if self.supply.sum() <= FEW_GPUS else (0.0,)
        return make_exact(self.tables, balancer, columns, index, bound * 1.1, self.effort.orders, leanings)

    # -- packing -------------------------------------------------------------------------------------------------------

    def _few(self, exact: Pipelines) -> Iterator[Draft]:
        """Every set of few pipelines, the best of them with their microbatches."""
        pool = exact
        if not self.mixed_tp:
            pool = exact.take(np.flatnonzero(exact.least_tp == exact.most_tp))
        sets = best_sets(self.tables, pool, self.supply, self.batch, self.effort.sets, self.least_pipelines)
        for chosen in sets:
            uneven = len(set(pool.microbatch[list(chosen)].tolist())) > 1 and not self.mixed_microbatch
            if (
                len(chosen) < self.least_pipelines
                or uneven
                or (not self.mixed_tp and len(set(pool.least_tp[list(chosen)].tolist())) > 1)
            ):
                continue
            draft = assign_microbatches(self.estimator, [pool.shape(i) for i in chosen], self.batch)
            if draft is not None:
                yield draft

    def _levels(self, exact: Pipelines) -> Iterator[Level]:
        """Limits on the smallest TP degree and on the fullest stage, with the sync seconds that they imply."""
        everyone = tuple(range(len(self.supply)))
        for least in sorted({int(t) for t in exact.least_tp}):
            mine = np.flatnonzero(exact.least_tp >= least)
            sizes = np.unique(exact.stage_bytes[mine])
            marks = np.unique(sizes[np.linspace(0, len(sizes) - 1, self.effort.levels + 1).astype(int)[1:]])
            for mark in marks:
                allowed = mine[exact.stage_bytes[mine] <= mark]
                if not self.mixed_tp:
                    allowed = allowed[exact.most_tp[allowed] == least]
                if len(allowed) == 0:
                    continue
                shape = SyncShape(float(exact.worker_bytes[allowed].max()), float(mark), least, 8, everyone)
                yield Level(allowed, self.tables.sync_s(shape))

    def _pack_levels(self, exact: Pipelines) -> Iterator[Draft]:
        relaxed: list[tuple[float, int, Level, Pipelines, Packer]] = []
        best = ceiling = np.inf
        for number, level in enumerate(self._levels(exact)):
            pool = exact.take(level.allowed)
            packer = Packer(pool.usage, self.supply)
            seconds = self._pool_time(packer, pool, level.sync_s, ceiling * 1.02)
            if seconds is not None:
                relaxed.append((seconds, number, level, pool, packer))
                ceiling = min(ceiling, seconds)
        relaxed.sort(key=lambda item: item[:2])
        for seconds, _, level, pool, packer in relaxed[: self.effort.candidates]:
            pick = self._pack(packer, pool, level.sync_s, seconds, best)
            draft = None
            if pick is not None:
                shapes = [pool.shape(i) for i, count in sorted(pick.items()) for _ in range(count)]
                draft = assign_microbatches(self.estimator, shapes, self.batch)
            if draft is not None:
                best = min(best, self.estimator.draft_s(draft))
                yield draft
            if self.hurry():
                return

    def _pool_time(self, packer: Packer, pool: Pipelines, sync: float, ceiling: float) -> float | None:
        """The relaxation's step time over exact pipelines; None if above `ceiling`."""

        def sequences(seconds: float, of: Ints | None = None) -> Floats:
            some = pool if of is None else pool.take(of)
            return (some.microbatches_in(seconds - sync) * some.microbatch).astype(float)

        high = float((pool.fill_s + pool.bottleneck_s * self.batch / pool.microbatch).min()) + sync
        found = close_in(packer, sequences, self.batch, min(high, ceiling), None, 2e-3)
        return found and found[1]

    def _pack(self, packer: Packer, pool: Pipelines, sync: float, start: float, best: float) -> dict[int, int] | None:
        """Whole pipelines, at the shortest step time at which some are found; None where that is well above `best`."""
        effort = self.effort

        def choose(seconds: float) -> dict[int, int] | None:
            worth = (pool.microbatches_in(seconds - sync) * pool.microbatch).astype(float)
            return packer.whole(
                worth, pool.microbatch, self.batch, effort.packed, effort.integer_program_nodes, self.mixed_microbatch,
                self.least_pipelines,
            )  # fmt: skip

        return shortest(choose, start, best * 1.25, 3e-3)


def _ranges(least: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of the number of pipelines, many first."""
    for low, high in ((16, most), (8, 15), (4, 7), (2, 3), (1, 1)):
        if most >= low and high >= least:
            yield max(low, least), min(high, most)
