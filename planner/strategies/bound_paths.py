"""What the bound of large fleets prices: stages with times that nothing can beat, and the cheapest paths through the model's blocks."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.strategies.stages import BANDS, StageTable
from planner.strategies.tables import Floats, Ints

_DEPTHS = (6, 9, 13, 18, 30, 50)
_TOGETHER = 64


class PricedStages:
    """Stages of one microbatch size with times that no neighbour, node, place in the model or schedule can beat.

    Arrays are (rows, place, blocks - 1), the places being first (with the embedding), inner, and last (with the head).
    """

    def __init__(self, table: StageTable, supply: Ints, pipelines: int):
        tables = table.tables
        self.table, self.microbatch, self.blocks = table, table.microbatch, tables.num_blocks
        self.stages = min(table.max_stages, tables.num_blocks)
        held = supply[table.resource] >= table.degree
        self.rows, self.resource, self.degree = table.rows[held], table.resource[held], table.degree[held]
        self.speed = self.microbatch / (tables.time_sums[self.rows, -1] * self.degree)
        toll = np.minimum(tables.boundaries.min(axis=0), tables.boundaries.min(axis=1))[self.rows, None, None]
        if tables.transfers == "none":  # only with F without them is F at most the sum of the stages' seconds
            toll = 0.0 * toll
        self.begun_ahead = tables.begun_ahead
        first, last = table.first[:, : table.wide], table.last[:, : table.wide]
        occupied = toll * tables.boundary_share * table.inner
        seconds = table.seconds[held]
        sums = tables.forward_sums[self.rows]
        forward = sums[:, last] - sums[:, first] + (tables.stage_overhead_s + occupied) / 2
        fill = seconds + toll * (first > 0)
        if tables.overlaps_warmup:
            fill[:, 0] += self._sync(pipelines)
        self.busy, self.fill = (
            _by_place(values, np.isfinite(seconds), np.inf) for values in (seconds + occupied, fill)
        )
        self.forward = -_by_place(-forward if tables.overlaps_warmup else 0.0 * forward, np.isfinite(seconds), 0.0)
        room = [part[held] & np.isfinite(seconds) for part in table.room]
        self.room = [_by_place(np.where(part, 0.0, np.inf), part, np.inf) == 0.0 for part in room]
        self.held_busy = [np.where(part, self.busy, np.inf) for part in self.room]
        self.finite_fill = np.where(np.isfinite(self.fill), self.fill, 0.0)
        # every transfer that the fill counts occupies a stage beside each microbatch, so F <= sum of the stages' seconds
        self.bounded = tables.overlaps_warmup
        self._limits()

    def _limits(self) -> None:
        """Bottlenecks that occur, and the largest share that forwards have of a stage."""
        busy, forward = self.busy[self.room[0]], self.forward[self.room[0]]
        self.quickest = float((busy - forward).min()) if len(busy) else np.inf
        self.slowest = float(busy.max()) if len(busy) else 0.0
        self.share = float((forward / busy).max()) if len(busy) else 0.0

    def _sync(self, pipelines: int) -> Floats:
        """(rows, blocks - 1) what follows the last backward of a first stage."""
        tables, out = self.table.tables, []
        for row, resource, degree in zip(self.rows, self.resource, self.degree, strict=True):
            held = tables.held_sync_bytes(row, 0, self.table.last[0, : self.table.wide])
            known = {
                float(size): tables.least_ring_s(int(resource), float(size), int(degree), pipelines) for size in held
            }
            out.append([known[float(size)] for size in held])
        return np.array(out).reshape(len(self.rows), self.table.wide)

    def cheapest(
        self, weight: Floats, high: Floats, prices: Floats, after: Sequence[tuple[int, Floats]]
    ) -> "tuple[Floats, Chosen]":
        """(intervals,) least cost of a pipeline in each, fill weighted, and the paths. after: for each class of depths the
        deepest, and (intervals,) microbatches that its pipelines do at least after their first.
        """
        cost = prices[self.resource] * self.degree
        order = np.argsort(high, kind="stable")
        parts = [order[i : i + _TOGETHER] for i in range(0, len(order), _TOGETHER)]
        chosen: list[tuple[_Paths, int] | None] = [None] * len(high)
        least = np.full(len(high), np.inf)
        for mine in parts:
            first = 1
            for depth, further in after:
                paths = _Paths(self, weight[mine], high[mine], cost, further[mine], first, depth)
                for at, (i, found) in enumerate(zip(mine, paths.solve(least[mine]), strict=True)):
                    if found < least[i]:
                        least[i], chosen[i] = found, (paths, at)
                first = depth + 1
        return least, Chosen(chosen)

    def after_by_depth(self, high: Floats, prices: Floats, step_s: float) -> list[tuple[int, Floats]]:
        """Classes of depths for `cheapest`: the deeper a pipeline, the longer its fill may be and the fewer its microbatches.
        step_s: a bound of the step time known before.

        A pipeline does (T - F) / m microbatches after its first, where F is at most its stages' seconds, and each stage's at most m
        and what the warm-up hides of it; and one of too few does not pay, at prices in sequences, for the memory that the model needs.
        """
        fewest = max(self._fewest_microbatches(prices[self.resource] * self.degree) - 1, 1e-9)
        steady = np.where(np.isfinite(high), step_s / np.where(np.isfinite(high), high, 1.0), 0.0)
        found = []
        for depth in [d for d in _DEPTHS if d < self.stages] + [self.stages]:
            after = np.full(len(high), fewest)
            for _ in range(4 if self.bounded else 0):
                hidden = np.minimum(1.0, self.begun_ahead * (depth - 1) / after)
                after = np.maximum(after, steady - depth / (1 - self.share * hidden))
            found.append((depth, after))
        return found

    def _fewest_microbatches(self, cost: Floats) -> float:
        each = np.where(self.room[0], cost[:, None, None], np.inf).min(axis=(0, 1))
        least = np.full(self.blocks + 1, np.inf)
        least[0] = 0.0
        for blocks in range(1, self.blocks + 1):
            sizes = np.arange(1, min(blocks, len(each)) + 1)
            least[blocks] = (each[sizes - 1] + least[blocks - sizes]).min()
        return float(least[-1] / self.microbatch)


def _by_place(values: Floats, possible: NDArray[np.bool_], absent: float) -> Floats:
    """(rows, 3, sizes) the least over the starts of each place, of (rows, starts, sizes)."""
    starts, sizes = values.shape[1:]
    stop = np.arange(starts)[:, None] + np.arange(1, sizes + 1)[None, :]
    places = (np.arange(starts)[:, None] == 0, (np.arange(starts)[:, None] > 0) & (stop < starts), stop == starts)
    known = np.where(possible, values, absent)
    return np.stack([np.where(place, known, absent).min(axis=1) for place in places], axis=1)


@dataclass(frozen=True)
class Chosen:
    """The path of each interval: one of those of several classes of depth."""

    paths: "list[tuple[_Paths, int] | None]"

    def totals(self, at: int) -> tuple[Floats, float]:
        """GPUs of each resource and fill."""
        found = self.paths[at]
        assert found is not None
        return found[0].totals(found[1])


class _Paths:
    """Shortest paths of `least` to `most` stages from the last to the first, for all intervals at once.

    after: (intervals,) microbatches that each pipeline does at least after its first.
    """

    def __init__(
        self, stages: PricedStages, weight: Floats, high: Floats, cost: Floats, after: Floats, least: int, most: int
    ):
        self.stages, self.weight, self.high, self.cost, self.after = stages, weight, high, cost, after
        self.least, self.most = least, most
        shortest = stages.busy.min(axis=(0, 1)) * (1 - stages.share)
        self.wide = max(1, int((shortest <= high.max() * (1 + 1e-9)).sum()))
        self.afters: list[Floats] = []
        self.arcs: list[Floats] = []
        self._arcs: dict[int, Floats] = {}

    def _arc(self, band: int, which: slice = slice(None)) -> Floats:
        """(intervals, rows, place, size) cost of a stage with as many stages after it as the band says."""
        stages, wide, after = self.stages, self.wide, self.after[which]
        last = min(BANDS[band + 1] - 1 if band + 1 < len(BANDS) else self.most - 1, self.most - 1)
        few = int(min(BANDS[band], max(float(self.after.min()), 0.0)))
        places = slice(0, 3 if band == 0 else 2)
        share = np.minimum(1.0, stages.begun_ahead * last / after)[:, None, None, None]
        hidden = share * stages.forward[:, places, :wide]
        busy = np.subtract(stages.held_busy[_band(few)][:, places, :wide], hidden, out=hidden)
        value = self.weight[which][:, None, None, None] * stages.finite_fill[:, places, :wide]
        value += self.cost[:, None, None]
        limit = np.minimum(self.high[which] * (1 + 1e-9), 1e300)
        value[busy > limit[:, None, None, None]] = np.inf
        return np.asarray(value)

    def _least_arc(self, depth: int) -> Floats:
        """(intervals, place, size) the cheapest row's."""
        band = _band(depth)
        if band not in self._arcs:
            self._arcs[band] = self._arc(band).min(axis=1)
        return self._arcs[band]

    def solve(self, known: Floats) -> Floats:
        """(intervals,) least cost; anything from `known` on where it is no less. after[:, i]: of the blocks from i on."""
        m, n, wide = len(self.high), self.stages.blocks, self.wide
        after = np.full((m, n + wide + 1), np.inf)
        best, self.depth = known.copy(), np.zeros(m, dtype=np.int64)
        for step in range(self.most):
            arc = self._least_arc(step)
            self.afters.append(after)
            first, after = self._further(arc, after, n - step) if step else self._last(arc, after)
            better = (first < best) & (step + 1 >= self.least)
            best, self.depth = np.where(better, first, best), np.where(better, step, self.depth)
            if (after[:, 1:n].min(axis=1, initial=np.inf) >= best).all():
                break
        return best

    def _last(self, arc: Floats, none: Floats) -> tuple[Floats, Floats]:
        """One stage with all blocks, or those from each block on."""
        n, after, wide = self.stages.blocks, none.copy(), min(self.wide, self.stages.blocks)
        after[:, n - wide : n] = arc[:, 2, :wide][:, ::-1]
        return after[:, 0].copy(), after

    def _further(self, arc: Floats, after: Floats, top: int) -> tuple[Floats, Floats]:
        """One stage more: (cost from the first block on, from each other). top: later blocks leave too few for the stages after."""
        out, total = np.full_like(after, np.inf), np.empty((len(after), top - 1))
        inner = out[:, 1:top]
        for size in np.flatnonzero(np.isfinite(arc[:, 1]).any(axis=0)):
            np.add(after[:, size + 2 : size + 1 + top], arc[:, 1, size, None], out=total)
            np.minimum(inner, total, out=inner)
        return (arc[:, 0] + after[:, 1 : self.wide + 1]).min(axis=1), out

    def stages_of(self, at: int) -> Iterator[tuple[int, int, int]]:
        """(row, place, blocks - 1) of each stage of one interval's path, first stage first; rows as in `stages.rows`."""
        n, block = self.stages.blocks, 0
        rows: dict[int, Ints] = {}
        for step in range(int(self.depth[at]), -1, -1):
            band, place = _band(step), 2 if step == 0 else 0 if block == 0 else 1
            if band not in rows:
                rows[band] = self._arc(band, slice(at, at + 1))[0].argmin(axis=0)
            beyond = self.afters[step][at, block + 1 : block + 1 + self.wide]
            size = n - block - 1 if step == 0 else int((self._arcs[band][at, place] + beyond).argmin())
            yield int(rows[band][place, size]), place, size
            block += size + 1

    def totals(self, at: int) -> tuple[Floats, float]:
        """GPUs of each resource and fill of one interval's path."""
        stages = self.stages
        gpus, fill = np.zeros(len(stages.table.tables.resources)), 0.0
        for row, place, size in self.stages_of(at):
            gpus[stages.resource[row]] += stages.degree[row]
            fill += float(stages.fill[row, place, size])
        return gpus, fill


def _band(depth: int) -> int:
    return bisect.bisect_right(BANDS, depth) - 1
