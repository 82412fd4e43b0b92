"""How long after its pipeline's end a stage's gradients are summed, where several equal pipelines lie side by side.

A layer is summed once every pipeline has done its backward: all are to be ready some time before the end, (num_layers,) seconds, the same
for all, so that each pipeline can be looked at by itself. Within a stage the last layers are ready first; its node's NIC carries them one
after the other, and those of later stages that it has before.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from planner.search.cost_tables import ring_rate
from planner.search.draft import Shape
from planner.search.problem import Request
from planner.search.tables import Floats, Ints, Tables


class Lateness:
    """Of pipelines on these table rows, of which so many copies lie side by side, first stages beside those of all `pipelines`."""

    def __init__(self, request: Request, tables: Tables, rows: Iterable[int], pipelines: int, copies: int):
        self._tables = tables
        self._rates = np.zeros((2, len(tables.rows)))  # seconds a byte: first stages, others
        self._stages = np.ones((2, len(tables.rows)), dtype=np.int64)  # of a pipeline on a node
        for row in rows:
            for at, most in enumerate((max(copies, pipelines // 2), copies)):
                together = min(int(tables.groups_a_node[row]), most)
                self._rates[at, row] = _rate(request, tables, pipelines, together, row)
                self._stages[at, row] = int(tables.groups_a_node[row]) // together

    def late_s(self, shape: Shape, ready: Floats) -> float:
        """How long the last sum of a pipeline lasts after the end, or a layer is ready later than all are to be."""
        early = early_s(self._tables, shape)
        begun = np.minimum(early, ready)
        late = max(float((sums - begun).max()) for sums in self.sums_s(shape))
        return max(0.0, late, float((ready - early).max()))

    def sums_s(self, shape: Shape) -> Iterator[Floats]:
        """(num_layers,) how long a stage's link takes to sum its layers up to each; then with the stage before, as far as one node may
        have both, with the two before, and so on."""
        sums, layers = self._tables.sync_sums, np.arange(self._tables.num_layers)
        stage = np.repeat(np.arange(len(shape.rows)), np.diff(shape.ends, prepend=0))
        rows, starts = np.array(shape.rows), np.array(shape.starts)
        row, same = rows[stage], np.ones(len(layers), dtype=bool)
        for further in range(int(self._stages[:, rows].max())):
            first = np.maximum(stage - further, 0)
            same &= (stage >= further) & (rows[first] == row)
            same &= further < self._stages[np.minimum(first, 1), row]
            summed = sums[row, layers + 1] - sums[row, starts[first]]
            yield np.where(same, self._rates[np.minimum(first, 1), row] * summed, 0.0)

    def alone_s(self, shape: Shape) -> list[float]:
        """How long each stage's sum takes while its NIC carries no other, first stages beside others'."""
        summed = (
            self._tables.stage_sync_bytes(*stage) for stage in zip(shape.rows, shape.starts, shape.ends, strict=True)
        )
        rates = (float(self._rates[min(i, 1), row]) for i, row in enumerate(shape.rows))
        return [rate * num_bytes for rate, num_bytes in zip(rates, summed, strict=True)]

    def byte_s(self, row: int) -> float:
        """Seconds that a byte of a first stage's layers takes, whole."""
        return float(self._rates[0, row]) / self._tables.kinds[self._tables.rows[row].kind].tp_degree

    def timely(self, rows: Ints, wide: int, begin: int, ready: Floats, allowed_s: float) -> NDArray[np.bool_]:
        """(rows, place, blocks - 1) stages of these table rows that start at block `begin` or later, places as in `PricedStages`, whose
        sums last no longer than allowed, also those of as many like it as its node has."""
        rates, further = (each[[0, 1, 1]][:, rows].T[..., None] for each in (self._rates, self._stages - 1))
        sizes, inside = np.arange(1, wide + 1), (np.arange(3) < 2)[:, None]
        rates = np.where((sizes < self._tables.num_blocks) | inside, rates, rates[:, :1])  # alone, so a first stage too
        further = np.where(inside, further, 0)
        summed = rates * self._by_place(self._tables.sync_sums[rows], wide)
        begun = np.append(0.0, ready[2:])  # of each block: nothing is before the first one's
        later = begun[np.minimum(begin + further * sizes, self._tables.num_blocks - 1)]
        return np.asarray(np.maximum(summed - begun[begin], (further + 1) * summed - later) <= allowed_s)

    def _by_place(self, sums: Floats, wide: int) -> Floats:
        """(rows, place, blocks - 1) of sums over layers, (rows, layers + 1), what stages at the beginning, inside and at the end have."""
        sizes, last = np.arange(1, wide + 1), self._tables.num_layers
        first = sums[:, np.minimum(1 + sizes, last)]
        end = np.where(sizes == self._tables.num_blocks, 0.0, sums[:, np.maximum(last - 1 - sizes, 0)])
        return np.stack([first, first - sums[:, [1]], sums[:, [last]] - end], axis=1)


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


def _rate(request: Request, tables: Tables, pipelines: int, together: int, row: int) -> float:
    """Seconds a byte of a ring over so many pipelines, so many of them side by side, while NICs carry nothing else."""
    kind = tables.kinds[tables.rows[row].kind]
    members = [(str(i // together), tables.resources[kind.resource].node_type) for i in range(pipelines)]
    return ring_rate(request.cost, members, float(kind.tp_degree))[1]
