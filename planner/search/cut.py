"""The best cut of the layers for many pipelines at once: smallest bottleneck under memory, stages in a given order.

For a fixed order of stages and a fixed bottleneck, giving each stage as many layers as time and memory allow is optimal
(any other cut ends no later at every stage), so a bisection on the bottleneck finds the optimum; every step is done for all pipelines
together, stage by stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search import limits
from planner.search.tables import Floats, Ints, Tables


@dataclass(frozen=True)
class Cuts:
    """One entry a pipeline. ends: (n, P) end layer of each stage; bottleneck_s, fill_s: (n,) seconds.

    fill_s is one microbatch's way through all stages and boundaries. A pipeline that cannot hold the model has bottleneck inf.
    """

    ends: Ints
    bottleneck_s: Floats
    fill_s: Floats


class Balancer:
    """Cuts pipelines over one set of tables."""

    def __init__(self, tables: Tables):
        self.tables = tables
        self.fits = tables.last_layer_that_fits
        sums = tables.time_sums
        self._gap = float(sums.max()) * 4 + 1.0
        self._flat = (sums + self._gap * np.arange(len(sums))[:, None]).ravel()
        self._width = sums.shape[1]
        self._fits = self.fits.ravel()

    def cut_each(self, pipelines: Sequence[tuple[int, ...]], microbatches: Floats | None = None) -> Cuts:
        """As `cut`, of pipelines given by the table row of each of their stages."""
        depth = np.array([len(rows) for rows in pipelines])
        return self.cut(padded(pipelines, int(depth.max())), depth, microbatches)

    def cut(self, rows: Ints, num_stages: Ints, microbatches: Floats | None = None) -> Cuts:
        """rows: (n, P) table row of each stage, -1 beyond the pipeline's end. microbatches: (n,) of each pipeline; with these early stages
        may also be as much longer than the bottleneck as they work ahead, if they do and memory allows, and the bottleneck is without that.
        """
        plain = np.ones(rows.shape)
        if microbatches is None or self.tables.begun_ahead == 1:
            return self._cut(rows, num_stages, plain)
        slopes = slopes_of(self.tables, rows, num_stages, microbatches)
        sloped = self._cut(rows, num_stages, slopes)
        held = np.isfinite(sloped.bottleneck_s)
        held &= memory_holds(self.tables, rows, np.maximum(sloped.ends, 0), num_stages, microbatches)
        if (left := np.flatnonzero(~held)).size:
            flat = self._cut(rows[left], num_stages[left], plain[left])
            for name in ("ends", "bottleneck_s", "fill_s"):
                getattr(sloped, name)[left] = getattr(flat, name)
        return sloped

    def _cut(self, rows: Ints, num_stages: Ints, slopes: Floats) -> Cuts:
        extra = self._boundary(rows, num_stages)
        own = extra * (2 * self.tables.boundary_share)
        own, extra = own + self.tables.stage_overhead_s, extra + self.tables.stage_overhead_s
        order = np.argsort(-num_stages, kind="stable")
        ends = self._search(rows[order], num_stages[order], own[order], slopes[order])
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return self._measure(rows, num_stages, ends[back], extra, own, slopes)

    def _boundary(self, rows: Ints, num_stages: Ints) -> Floats:
        """(n, P) seconds of boundaries charged to each stage: half of each of its neighbours'."""
        out = np.zeros(rows.shape)
        if rows.shape[1] < 2:
            return out
        table = self.tables.boundaries
        between = np.where(self._crosses(rows), self.tables.crossings[rows[:, 1:]], table[rows[:, :-1], rows[:, 1:]])
        between = np.where(np.arange(1, rows.shape[1])[None, :] < num_stages[:, None], between, 0.0)
        out[:, :-1] += between / 2
        out[:, 1:] += between / 2
        return out

    def _crosses(self, rows: Ints) -> NDArray[np.bool_]:
        """(n, P - 1) whether a boundary lies between equal groups on two nodes: they fill one node after the other, as `place` does."""
        groups, inside = self.tables.groups_a_node, np.ones(len(rows), dtype=np.int64)
        out = np.zeros((len(rows), rows.shape[1] - 1), dtype=np.bool_)
        for s in range(1, rows.shape[1]):
            same = rows[:, s] == rows[:, s - 1]
            inside = np.where(same, inside % groups[rows[:, s]] + 1, 1)
            out[:, s - 1] = same & (inside == 1)
        return out

    def _search(self, rows: Ints, num_stages: Ints, own: Floats, scale: Floats) -> Ints:
        """Bisection of the bottleneck, or where pipelines are few its steps several at once: short arrays cost numpy as much as
        shorter ones."""
        whole = self.tables.time_sums[:, -1]
        valid = rows >= 0
        low = 0.9 / np.where(valid, scale / whole[rows], 0.0).sum(axis=1)
        high = np.where(valid, whole[rows], 0.0).max(axis=1) + own.max(axis=1)
        best = self._greedy(rows, num_stages, high, own, scale)
        dead = best[:, 0] < 0
        while len(left := np.flatnonzero(~dead & (high > low * (1 + limits.FINE)))):
            levels = max(1, int(np.log2(1 + limits.CUTS_AT_ONCE / len(left))))
            copies = np.repeat(left, 2**levels - 1)
            trials = low[left, None] * (high[left] / low[left])[:, None] ** (np.arange(2**levels + 1) / 2**levels)
            ends = self._greedy(rows[copies], num_stages[copies], trials[:, 1:-1].ravel(), own[copies], scale[copies])
            ends = ends.reshape(len(left), -1, rows.shape[1])
            good = ends[:, :, 0] >= 0
            first = np.where(good.any(axis=1), good.argmax(axis=1), good.shape[1])
            some = np.flatnonzero(first < good.shape[1])
            best[left[some]] = ends[some, first[some]]
            low[left], high[left] = trials[np.arange(len(left)), first], trials[np.arange(len(left)), first + 1]
        return best

    def _greedy(self, rows: Ints, num_stages: Ints, limit: Floats, own: Floats, scale: Floats) -> Ints:
        """(n, P) ends when each stage takes all it may; a pipeline succeeded if its last end is num_layers. Pipelines sorted by depth,
        deepest first."""
        n, width = rows.shape
        layers, stage = self.tables.num_layers, np.arange(width)
        # (P, n) from here on: a stage of all pipelines lies together
        left = num_stages - 1 - stage[:, None]
        base = rows.T * self._width
        room = np.minimum(np.maximum((limit[:, None] * scale - own).T, 0.0), self._gap / 2)
        most = np.where(left > 0, layers - 1 - left, layers)
        least = np.where(left > 0, 0, layers)
        fitting = (rows.T * self.fits.shape[1] + left) * self._width
        ends = np.zeros((width, n), dtype=np.int64)
        at = np.zeros(n, dtype=np.int64)
        for s, m in enumerate(np.searchsorted(-num_stages, -stage, side="left").tolist()):
            if m == 0:
                break
            at = at[:m]
            target = (self._flat[base[s, :m] + at] + room[s, :m]) * (1 + 1e-12)
            end = self._flat.searchsorted(target, side="right") - 1 - base[s, :m]
            end = np.minimum(np.minimum(end, self._fits[fitting[s, :m] + at]), most[s, :m])
            # a block of its own, and the last stage all that is left
            enough = np.maximum(at + (2 if s == 0 else 1), least[s, :m])
            ends[s, :m] = end = np.where(end < enough, -layers, end)
            at = np.maximum(end, 0)
        found = np.ascontiguousarray(ends.T)
        found[(found < 0).any(axis=1)] = -1
        return found

    def _measure(self, rows: Ints, num_stages: Ints, ends: Ints, extra: Floats, own: Floats, slopes: Floats) -> Cuts:
        sums = self.tables.time_sums
        valid = np.arange(rows.shape[1])[None, :] < num_stages[:, None]
        starts = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), ends[:, :-1]], axis=1)
        dead = (ends < 0).any(axis=1)
        safe_ends, safe_starts = np.maximum(ends, 0), np.maximum(starts, 0)
        work = np.where(valid, sums[rows, safe_ends] - sums[rows, safe_starts], 0.0)
        busy = np.where(valid, work + own, 0.0)
        bottleneck = np.where(dead, np.inf, (busy / slopes).max(axis=1))
        fill = np.where(dead, np.inf, (work + np.where(valid, extra, 0.0)).sum(axis=1))
        return Cuts(ends, bottleneck, fill)


def padded(pipelines: Sequence[tuple[int, ...]], width: int) -> Ints:
    """(n, width) the table row of each stage, -1 beyond a pipeline's end."""
    out = np.full((len(pipelines), width), -1, dtype=np.int64)
    for i, rows in enumerate(pipelines):
        out[i, : len(rows)] = rows
    return out


def slopes_of(tables: Tables, rows: Ints, num_stages: Ints, microbatches: Floats) -> Floats:
    """How much longer than the bottleneck early stages may take that work ahead while later ones fill (`planner.in_flight`): stage s
    (T - F) / (K - 1) times so much, since T >= F + (K - 1) t - min(K - 1, n - 1) f, if n microbatches are in flight."""
    share = tables.forward_share[rows]
    hidden = np.minimum(1.0, _ahead(tables, rows, num_stages) / np.maximum(microbatches - 1, 1e-9)[:, None])
    return np.asarray(1.0 / (1.0 - share * hidden))


def memory_holds(tables: Tables, rows: Ints, ends: Ints, num_stages: Ints, microbatches: Floats) -> NDArray[np.bool_]:
    """(n,) whether each stage has memory for the microbatches that it then keeps in flight."""
    limit = np.array([row.limit_bytes - row.fixed_bytes for row in tables.rows])
    starts = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), ends[:, :-1]], axis=1)
    number = np.minimum(_ahead(tables, rows, num_stages) + 1, np.ceil(microbatches)[:, None])
    state, kept = (sums[rows, ends] - sums[rows, starts] for sums in (tables.state_sums, tables.activation_sums))
    return np.asarray(((rows < 0) | (state + number * kept <= limit[rows])).all(axis=1))


def _ahead(tables: Tables, rows: Ints, num_stages: Ints) -> Ints:
    """Microbatches that each stage may begin beside the one that it waits for."""
    return np.asarray(tables.begun_ahead * np.maximum(num_stages[:, None] - 1 - np.arange(rows.shape[1]), 0))
