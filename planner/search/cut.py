"""Best cut of the layers for many pipelines at once, with the stages in a given order.

The best cut has the smallest bottleneck that memory allows.

For a fixed order of stages and a fixed bottleneck, giving each stage as many layers as time and
memory allow is optimal (any other cut ends no later at every stage). So a bisection on the
bottleneck finds the optimum; every step is done for all pipelines together, stage by stage.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search import limits
from planner.search.draft import Shape
from planner.search.stage_sums import Floats, Ints
from planner.search.tables import Tables


@dataclass(frozen=True, slots=True)
class Cut:
    """Shape of a pipeline with its seconds.

    bottleneck_s: inf if the pipeline cannot hold the model. fill_s: one microbatch's way through
    all stages and boundaries.
    """

    shape: Shape
    bottleneck_s: float
    fill_s: float


class Balancer:
    """Cuts pipelines over one set of tables, and caches the cuts."""

    def __init__(self, tables: Tables):
        self.tables = tables
        self.fits = tables.sums.last_layer_that_fits
        sums = tables.sums.time_sums
        self._gap = float(sums.max()) * 4 + 1.0
        self._flat = (sums + self._gap * np.arange(len(sums))[:, None]).ravel()
        self._begin = self._flat * (1 + 1e-12)
        self._width = sums.shape[1]
        self._fits = self.fits.ravel()
        self._known: dict[tuple[tuple[int, ...], float | None], Cut] = {}

    def cut_each(
        self, pipelines: Sequence[tuple[int, ...]], microbatches: Sequence[float] = ()
    ) -> list[Cut]:
        """Return the best cut of each pipeline, given by the table row of each of its stages.

        microbatches: number for each pipeline. With these, early stages may exceed the bottleneck
        as far as they work ahead, if memory allows; the bottleneck does not include that.
        """
        keys = list(itertools.zip_longest(pipelines, microbatches))
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            new.sort(key=lambda key: -len(key[0]))
            counts = np.array([count for _, count in new]) if microbatches else None
            self._known |= zip(new, self._cut_new([rows for rows, _ in new], counts), strict=True)
        return [self._known[key] for key in keys]

    def _cut_new(
        self, pipelines: Sequence[tuple[int, ...]], microbatches: Floats | None
    ) -> list[Cut]:
        """Cut pipelines that are sorted by depth, deepest first."""
        rows = padded_rows(pipelines)
        slopes = (
            np.ones(rows.shape)
            if microbatches is None
            else slopes_of(self.tables, rows, microbatches)
        )
        ends, bottleneck_s, fill_s = self._cut(rows, slopes)
        found = zip(pipelines, ends.tolist(), bottleneck_s.tolist(), fill_s.tolist(), strict=True)
        cuts = [
            Cut(Shape(mine, tuple(its[: len(mine)])), most, way) for mine, its, most, way in found
        ]
        if microbatches is None:
            return cuts
        held = np.isfinite(bottleneck_s) & memory_holds(
            self.tables, rows, np.maximum(ends, 0), microbatches
        )
        even = iter(
            self.cut_each([mine for mine, fits in zip(pipelines, held, strict=True) if not fits])
        )
        return [cut if fits else next(even) for cut, fits in zip(cuts, held, strict=True)]

    def _cut(self, rows: Ints, slopes: Floats) -> tuple[Ints, Floats, Floats]:
        """Cut pipelines without the cache.

        rows: (n, P), -1 beyond a pipeline's end, deepest first. Returns (n, P) ends of stages, -1
        if a pipeline cannot hold the model, and (n,) seconds of bottleneck and of fill.
        """
        depth = (rows >= 0).sum(axis=1)
        extra = self._boundary(rows, depth)
        own = extra * (2 * self.tables.boundary_share)
        own = own + self.tables.stage_overhead_s
        extra = extra + self.tables.stage_overhead_s
        return self._measure(rows, self._search(rows, depth, own, slopes), extra, own, slopes)

    def _boundary(self, rows: Ints, num_stages: Ints) -> Floats:
        """Return (n, P) seconds charged to each stage: half of each of its boundaries."""
        out = np.zeros(rows.shape)
        if rows.shape[1] < 2:
            return out
        table = self.tables.boundaries
        between = np.where(
            self._crosses(rows),
            self.tables.crossings[rows[:, 1:]],
            table[rows[:, :-1], rows[:, 1:]],
        )
        between = np.where(np.arange(1, rows.shape[1])[None, :] < num_stages[:, None], between, 0.0)
        out[:, :-1] += between / 2
        out[:, 1:] += between / 2
        return out

    def _crosses(self, rows: Ints) -> NDArray[np.bool_]:
        """Return (n, P - 1) a mask of boundaries between equal groups on two nodes.

        Equal groups fill one node after the other, as `place` does.
        """
        groups = self.tables.groups_a_node
        inside = np.ones(len(rows), dtype=np.int64)
        out = np.zeros((len(rows), rows.shape[1] - 1), dtype=np.bool_)
        for s in range(1, rows.shape[1]):
            same = rows[:, s] == rows[:, s - 1]
            inside = np.where(same, inside % groups[rows[:, s]] + 1, 1)
            out[:, s - 1] = same & (inside == 1)
        return out

    def _search(self, rows: Ints, num_stages: Ints, own: Floats, scale: Floats) -> Ints:
        """Find the least bottleneck by bisection, and return the ends of its stages.

        If there are few pipelines, several steps of the bisection run at once: short arrays cost
        numpy as much as shorter ones.
        """
        whole = self.tables.sums.time_sums[:, -1]
        valid = rows >= 0
        low = 0.9 / np.where(valid, scale / whole[rows], 0.0).sum(axis=1)
        high = np.where(valid, whole[rows], 0.0).max(axis=1) + own.max(axis=1)
        best = self._greedy(rows, num_stages, high, own, scale)
        dead = best[:, 0] < 0
        while len(left := np.flatnonzero(~dead & (high > low * (1 + limits.FINE)))):
            levels = max(1, int(np.log2(1 + limits.CUTS_AT_ONCE / len(left))))
            copies = np.repeat(left, 2**levels - 1)
            trials = low[left, None] * (high[left] / low[left])[:, None] ** (
                np.arange(2**levels + 1) / 2**levels
            )
            ends = self._greedy(
                rows[copies],
                num_stages[copies],
                trials[:, 1:-1].ravel(),
                own[copies],
                scale[copies],
            )
            ends = ends.reshape(len(left), -1, rows.shape[1])
            good = ends[:, :, 0] >= 0
            first = np.where(good.any(axis=1), good.argmax(axis=1), good.shape[1])
            some = np.flatnonzero(first < good.shape[1])
            best[left[some]] = ends[some, first[some]]
            low[left], high[left] = (
                trials[np.arange(len(left)), first],
                trials[np.arange(len(left)), first + 1],
            )
        return best

    def _greedy(
        self, rows: Ints, num_stages: Ints, limit: Floats, own: Floats, scale: Floats
    ) -> Ints:
        """Return (n, P) ends if each stage takes all that it may.

        A pipeline succeeds if its last end is num_layers; else its ends are -1. Pipelines are
        sorted by depth, deepest first.
        """
        n, width = rows.shape
        layers = self.tables.num_layers
        stage = np.arange(width)
        # (P, n) from here on: a stage of all pipelines lies together
        left = num_stages - 1 - stage[:, None]
        base = rows.T * self._width
        room = np.minimum(np.maximum((limit[:, None] * scale - own).T, 0.0), self._gap / 2) * (
            1 + 1e-12
        )
        most = np.where(left > 0, layers - 1 - left, layers)
        fitting = (rows.T * self.fits.shape[1] + left) * self._width
        ends = np.zeros((width, n), dtype=np.int64)
        at = np.zeros(n, dtype=np.int64)
        good = np.ones(n, dtype=np.bool_)
        for s, m in enumerate(np.searchsorted(-num_stages, -stage, side="left").tolist()):
            if m == 0:
                break
            at = at[:m]
            end = self._flat.searchsorted(
                self._begin[base[s, :m] + at] + room[s, :m], side="right"
            ) - (base[s, :m] + 1)
            end = np.minimum(np.minimum(end, self._fits[fitting[s, :m] + at]), most[s, :m])
            # a block of its own, and the last stage all that is left
            good[:m] &= (end > at + (s == 0)) & ((end == layers) | (left[s, :m] > 0))
            ends[s, :m] = at = end
        ends[:, ~good] = -1
        return np.ascontiguousarray(ends.T)

    def _measure(
        self, rows: Ints, ends: Ints, extra: Floats, own: Floats, slopes: Floats
    ) -> tuple[Ints, Floats, Floats]:
        sums = self.tables.sums.time_sums
        valid = rows >= 0
        starts = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), ends[:, :-1]], axis=1)
        dead = (ends < 0).any(axis=1)
        safe_ends = np.maximum(ends, 0)
        safe_starts = np.maximum(starts, 0)
        work = np.where(valid, sums[rows, safe_ends] - sums[rows, safe_starts], 0.0)
        busy = np.where(valid, work + own, 0.0)
        bottleneck = np.where(dead, np.inf, (busy / slopes).max(axis=1))
        fill = np.where(dead, np.inf, (work + np.where(valid, extra, 0.0)).sum(axis=1))
        return ends, bottleneck, fill


def padded_rows(pipelines: Sequence[tuple[int, ...]]) -> Ints:
    """Return (n, P) the table row of each stage, -1 beyond a pipeline's end."""
    out = np.full((len(pipelines), max(map(len, pipelines))), -1, dtype=np.int64)
    for i, rows in enumerate(pipelines):
        out[i, : len(rows)] = rows
    return out


def slopes_of(tables: Tables, rows: Ints, microbatches: Floats) -> Floats:
    """Return (n, P) the factor by which each stage may exceed the bottleneck.

    Early stages work ahead while later ones fill (`planner.in_flight`). Stage s may take (T - F) /
    (K - 1) times its factor, since T >= F + (K - 1) t - min(K - 1, n - 1) f, if n microbatches are
    in flight.
    """
    share = tables.sums.forward_share[rows]
    hidden = np.minimum(1.0, _ahead(tables, rows) / np.maximum(microbatches - 1, 1e-9)[:, None])
    return np.asarray(1.0 / (1.0 - share * hidden))


def memory_holds(tables: Tables, rows: Ints, ends: Ints, microbatches: Floats) -> NDArray[np.bool_]:
    """Return (n,) True if each stage's memory holds the microbatches that it keeps in flight."""
    limit = np.array([row.limit_bytes - row.fixed_bytes for row in tables.rows])
    starts = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), ends[:, :-1]], axis=1)
    number = np.minimum(_ahead(tables, rows) + 1, np.ceil(microbatches)[:, None])
    state, kept = (
        sums[rows, ends] - sums[rows, starts]
        for sums in (tables.sums.state_sums, tables.sums.activation_sums)
    )
    return np.asarray(((rows < 0) | (state + number * kept <= limit[rows])).all(axis=1))


def _ahead(tables: Tables, rows: Ints) -> Ints:
    """Return microbatches that each stage may begin beside the microbatch that it waits for."""
    after = (rows >= 0).sum(axis=1, keepdims=True) - 1 - np.arange(rows.shape[1])
    return np.asarray(tables.begun_ahead * np.maximum(after, 0))
