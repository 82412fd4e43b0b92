"""Stages of every row, start and size as arrays: what families of pipelines and the bound are built from."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.search.tables import Tables

BANDS = (0, 1, 2, 3, 5, 8, 12, 17, 24, 33, 46, 63)


class StageTable:
    """Stages of one microbatch size that do not reach over a wall (a block after which every pipeline is cut).

    Arrays are (rows, start block, blocks - 1). seconds: infinite where no such stage may be. busy: with the transfers that
    occupy it beside every microbatch, fill: with the transfer into it, both where neighbours are equal groups, some of them on
    another node. room[band]: whether memory allows the stage with `BANDS[band]` stages after it.
    """

    def __init__(
        self, tables: Tables, microbatch: int, max_stages: int, walls: Sequence[int] = (), degrees: Sequence[int] = ()
    ):
        self.tables, self.microbatch, self.max_stages = tables, microbatch, max_stages
        kinds = [tables.kinds[row.kind] for row in tables.rows]
        self.rows = np.array(
            [
                i
                for i, row in enumerate(tables.rows)
                if row.microbatch == microbatch and (not degrees or kinds[i].tp_degree in degrees)
            ],
            dtype=np.int64,
        )
        self.resource = np.array([kinds[i].resource for i in self.rows], dtype=np.int64)
        self.degree = np.array([kinds[i].tp_degree for i in self.rows], dtype=np.int64)
        self._measure(np.array(walls, dtype=np.int64))

    def _measure(self, walls: NDArray[np.int64]) -> None:
        tables, n = self.tables, self.tables.num_blocks
        start, size = np.arange(n)[:, None], np.arange(1, n + 1)[None, :]
        stop = np.minimum(start + size, n)
        self.first, self.last = np.where(start == 0, 0, start + 1), np.where(stop == n, n + 2, stop + 1)
        whole = np.searchsorted(walls, start, side="right") == np.searchsorted(walls, stop, side="left")
        allowed = (start + size <= n) & whole
        fits = tables.fitting(min(self.max_stages, n))[self.rows]
        room = [fits[:, min(depth, fits.shape[1] - 1)][:, self.first] >= self.last for depth in BANDS]
        self.wide = max(1, int((room[0] & allowed).any(axis=(0, 1)).sum())) if len(self.rows) else 1
        sums = tables.time_sums[self.rows]
        seconds = sums[:, self.last] - sums[:, self.first] + tables.stage_overhead_s
        self.seconds = np.where(allowed, seconds, np.inf)[:, :, : self.wide]
        self.inner = (2.0 - (start == 0) - (stop == n))[:, : self.wide]
        most = tables.busiest_hop[self.rows, None, None]
        typical = tables.typical_hop[self.rows, None, None]
        self.busy = self.seconds + most * tables.boundary_share * self.inner
        self.fill = self.seconds + typical * (start > 0)
        self.room = [part[:, :, : self.wide] for part in room]

    def band(self, depth: int) -> int:
        """The entry of `room` for a stage with at most `depth` stages after it."""
        return min(int(np.searchsorted(BANDS, depth, side="left")), len(BANDS) - 1)
