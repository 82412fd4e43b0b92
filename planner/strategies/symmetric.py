"""Symmetric grids: `megatron` (TP x PP x DP, equal split of the layers) and `varuna` (no TP, cuts balanced by compute).

Both treat the GPUs as equal, in the fleet's order; the grid is chosen under our cost model. Narayanan et al.,
"Efficient
large-scale language model training on GPU clusters using Megatron-LM", SC'21; Athlur et al., "Varuna", EuroSys'22.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cluster import Fleet, NodeType
from planner.plan import Pipeline, Plan, Stage
from planner.search import limits
from planner.search.cost_tables import tables_of
from planner.search.draft import Draft, Estimator, Shape, draft_fits
from planner.search.judge import answer_of
from planner.search.problem import Answer, Request, check_request
from planner.search.tables import Tables


@dataclass(frozen=True)
class Grid:
    """`width` pipelines of `len(split)` stages over tensor-parallel groups in the fleet's order, `count` microbatches of `size` each.

    groups, kinds: workers of each group and its node type.
    """

    groups: Sequence[tuple[str, ...]]
    kinds: Sequence[NodeType]
    width: int
    split: tuple[int, ...]
    count: int
    size: int

    def draft(self, tables: Tables) -> Draft | None:
        """None where it uses what the tables do not have."""
        depth, degree = len(self.split), len(self.groups[0])
        ends = tuple(end + 1 for end in itertools.accumulate(self.split))
        ends = (*ends[:-1], ends[-1] + 1)
        shapes: dict[tuple[NodeType, ...], Shape] = {}
        chosen = [tuple(self.kinds[d : d + self.width * depth : self.width]) for d in range(self.width)]
        for kinds in dict.fromkeys(chosen):
            rows = [tables.row_of.get((kind, degree, self.size)) for kind in kinds]
            if None in rows:
                return None
            shapes[kinds] = Shape(tuple(row for row in rows if row is not None), ends)
        return Draft(tuple((shapes[kinds], self.count) for kinds in chosen))

    def least_s(self, tables: Tables, block_s: Sequence[float]) -> float:
        """No step is shorter: a slowest group has a smallest stage at least, a fastest one the largest if all have. block_s: of each
        table row, the mean block's seconds. Infinite where it uses what the tables do not have."""
        degree, used = len(self.groups[0]), set(self.kinds[: self.width * len(self.split)])
        rows = [tables.row_of.get((kind, degree, self.size)) for kind in used]
        seconds = [np.inf if row is None else block_s[row] for row in rows]
        return self.count * max(max(seconds) * min(self.split), min(seconds) * max(self.split))

    def plan(self, request: Request) -> Plan:
        first = [0, *itertools.accumulate(self.split)]
        pipelines = tuple(
            Pipeline(
                tuple(Stage(first[p], blocks, self.groups[d + self.width * p]) for p, blocks in enumerate(self.split)),
                self.count,
                self.size,
            )
            for d in range(self.width)
        )
        batch, length = request.global_batch_sequences, request.sequence_length
        return Plan(request.spec.name, batch, self.size, length, pipelines)


def grids_of(request: Request, tables: Tables, *, max_tp: int, balanced: bool) -> Iterator[Grid]:
    """Every grid that fills most of the fleet and whose data-parallel degree divides the batch."""
    sizes = sorted({row.microbatch for row in tables.rows})
    degrees = sorted({d for d in (tables.kinds[row.kind].tp_degree for row in tables.rows) if d <= max_tp})
    batch = request.global_batch_sequences
    for tp in degrees:
        groups = _groups(request.fleet, tp)
        kinds = [request.fleet.node_of(group[0]).node_type for group in groups]
        for depth in range(1, min(len(groups), request.deepest(tables.num_blocks)) + 1):
            split = _balanced_split(tables, depth, tp) if balanced else equal_split(tables.num_blocks, depth)
            for size in sizes:
                total = batch // size
                widths = range(min(len(groups) // depth, total), 0, -1)
                width = next((d for d in widths if total % d == 0), 0) if batch % size == 0 else 0
                if width > 0:
                    yield Grid(groups, kinds, width, split, total // width, size)


def _groups(fleet: Fleet, tp: int) -> list[tuple[str, ...]]:
    """Tensor-parallel groups inside nodes, in the fleet's order."""
    return [node.workers[i : i + tp] for node in fleet.nodes for i in range(0, len(node.workers) - tp + 1, tp)]


def equal_split(blocks: int, depth: int) -> tuple[int, ...]:
    """Blocks of each stage, the first ones take the rest."""
    return tuple(blocks // depth + (1 if i < blocks % depth else 0) for i in range(depth))


def _balanced_split(tables: Tables, depth: int, tp: int) -> tuple[int, ...]:
    """Cuts nearest to equal shares of one device's time, every stage at least one block."""
    row = next(i for i, r in enumerate(tables.rows) if tables.kinds[r.kind].tp_degree == tp)
    sums = tables.time_sums[row]
    blocks = tables.num_blocks
    cuts = [0]
    for i in range(1, depth):
        near = int(np.argmin(np.abs(sums[1 : blocks + 2] - sums[-1] * i / depth)))
        cuts.append(min(max(near, cuts[-1] + 1), blocks - (depth - i)))
    return tuple(b - a for a, b in zip(cuts, [*cuts[1:], blocks]))


def ranked_grids(
    request: Request, tables: Tables, grids: Iterable[Grid], estimator: Estimator, keep: int
) -> list[tuple[float, Plan]]:
    """The `keep` fastest grids that fit memory by the tables; only those that a closed form ranks high are simulated."""
    sums = tables.time_sums
    block_s = ((sums[:, -2] - sums[:, 1]) / tables.num_blocks * (1 - 1e-9)).tolist()
    least = sorted(
        ((grid.least_s(tables, block_s), i, grid) for i, grid in enumerate(grids)), key=lambda item: item[:2]
    )
    rough, best = [], np.inf
    for bound_s, number, grid in least:
        if bound_s > limits.FAR_BEHIND * best:
            break
        draft = grid.draft(tables)
        if draft is not None and draft_fits(estimator, draft):
            slowest = max(estimator.quick_s(shape, k) for shape, k in set(draft.pipelines))
            rough.append((slowest + tables.sync_s(estimator.sync_shape(draft)), number, draft, grid))
            best = min(best, rough[-1][0])
    near = sorted(rough, key=lambda item: item[:2])[: limits.SIMULATED * keep]
    found = sorted(((estimator.draft_s(draft), number, grid) for _, number, draft, grid in near), key=lambda f: f[:2])
    return [(seconds, grid.plan(request)) for seconds, _, grid in found[:keep]]


def search_megatron(request: Request) -> Answer:
    """TP x PP x DP with an equal split of the layers."""
    return _search_grids("megatron", request, request.max_tp_degree or request.spec.max_tp_degree, balanced=False)


def search_varuna(request: Request) -> Answer:
    """PP x DP without tensor parallelism, cut-points balanced by compute."""
    return _search_grids("varuna", request, 1, balanced=True)


def _search_grids(name: str, request: Request, max_tp: int, *, balanced: bool) -> Answer:
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    grids = grids_of(request, tables, max_tp=max_tp, balanced=balanced)
    ranked = ranked_grids(request, tables, grids, Estimator(tables), limits.CANDIDATES)
    return answer_of(name, request, tables, [plan for _, plan in ranked], begin, len(ranked))
