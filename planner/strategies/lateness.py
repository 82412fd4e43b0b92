"""How long after its pipeline's end a stage's gradients are summed, where several equal pipelines lie side by side.

A layer is summed once every pipeline has done its backward: all are to be ready some time before the end, (num_layers,) seconds, the same
for all, so that each pipeline can be looked at by itself. Within a stage the last layers are ready first; its link carries them one
after the other.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from planner.strategies.cost_tables import ring_rate
from planner.strategies.drafts import Shape
from planner.strategies.request import Request
from planner.strategies.tables import Floats, Ints, Tables


class Lateness:
    """Of pipelines on these table rows, of which so many copies lie side by side, first stages beside those of all `pipelines`."""

    def __init__(self, request: Request, tables: Tables, rows: Iterable[int], pipelines: int, copies: int):
        self._tables = tables
        self._rates = np.zeros((2, len(tables.rows)))  # seconds a byte: first stages, others
        for row in rows:
            for at, most in enumerate((max(copies, pipelines // 2), copies)):
                self._rates[at, row] = _rate(request, tables, pipelines, most, row)

    def late_s(self, shape: Shape, ready: Floats) -> float:
        """How long the last sum of a pipeline lasts after the end, or a layer is ready later than all are to be."""
        early = early_s(self._tables, shape)
        late = self.sums_s(shape) - np.minimum(early, ready)
        return max(0.0, float(late.max()), float((ready - early).max()))

    def sums_s(self, shape: Shape) -> Floats:
        """(num_layers,) how long a stage's link takes to sum its layers up to each."""
        sums, layers = self._tables.sync_sums, np.arange(self._tables.num_layers)
        stage = np.repeat(np.arange(len(shape.rows)), np.diff(shape.ends, prepend=0))
        row, start = (np.array(each)[stage] for each in (shape.rows, shape.starts))
        return np.asarray(self._rates[np.minimum(stage, 1), row] * (sums[row, layers + 1] - sums[row, start]))

    def timely(self, rows: Ints, wide: int, begin: int, ready: Floats, allowed_s: float) -> NDArray[np.bool_]:
        """(rows, place, blocks - 1) stages of these table rows that start at block `begin` or later, places as in `PricedStages`, whose
        sums last no longer than allowed."""
        sums, sizes, last = self._tables.sync_sums[rows], np.arange(1, wide + 1), self._tables.num_layers
        first = sums[:, np.minimum(1 + sizes, last)]
        inner = first - sums[:, [1]]
        end = sums[:, [last]] - sums[:, np.maximum(last - 1 - sizes, 0)]
        rates = self._rates[:, rows, None]
        whole = sizes == self._tables.num_blocks  # alone, so a first stage too
        end = np.where(whole, rates[0] * sums[:, [last]], rates[1] * end)
        summed = np.stack([rates[0] * first, rates[1] * inner, end], axis=1)
        before = float(ready[begin + 1]) if begin else 0.0
        return np.asarray(summed <= before + allowed_s)


def early_s(tables: Tables, shape: Shape) -> Floats:
    """(num_layers,) how long before the pipeline's end each layer's backward is done: the backwards of earlier stages."""
    rows, starts, ends = np.array(shape.rows), np.array(shape.starts), np.array(shape.ends)
    back = (
        tables.time_sums[rows, ends] - tables.time_sums[rows, starts]
        - tables.forward_sums[rows, ends] + tables.forward_sums[rows, starts]
    )  # fmt: skip
    return np.asarray(np.repeat(np.cumsum(back) - back, ends - starts))


def ready_s(tables: Tables, shapes: Iterable[Shape]) -> Floats:
    """(num_layers,) how long before the end all of these pipelines have done each layer's backward."""
    return np.asarray(np.min([early_s(tables, shape) for shape in shapes], axis=0))


def _rate(request: Request, tables: Tables, pipelines: int, most: int, row: int) -> float:
    """Seconds a byte of a ring over so many pipelines, at most `most` of them side by side."""
    node = tables.resources[tables.kinds[tables.rows[row].kind].resource].node_type
    together = min(int(tables.groups_a_node[row]), most)
    members = [(str(i // together), node) for i in range(pipelines)]
    return ring_rate(request.cost, members, node.num_gpus / together)[1]
