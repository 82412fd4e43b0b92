"""Symmetric grids: `megatron` (TP x PP x DP, equal split of the layers) and `varuna` (no TP, cuts balanced by compute).

Both treat the GPUs as equal, in the fleet's order; the grid is chosen under our cost model. Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM", SC'21; Athlur et al., "Varuna", EuroSys'22.
"""

from collections.abc import Iterator

import numpy as np

from planner.search.cost_tables import tables_of
from planner.search.judge import answer_of
from planner.search.problem import Answer, Request, check_request
from planner.search.tables import Tables
from planner.strategies.staged import Groups, Shortlist, ends_of


def search_megatron(request: Request) -> Answer:
    """TP x PP x DP with an equal split of the layers."""
    return _search_grids("megatron", request, request.max_tp_degree or request.spec.max_tp_degree, balanced=False)


def search_varuna(request: Request) -> Answer:
    """PP x DP without tensor parallelism, cut-points balanced by compute."""
    return _search_grids("varuna", request, 1, balanced=True)


def _search_grids(name: str, request: Request, max_tp: int, *, balanced: bool) -> Answer:
    check_request(request)
    begin, tried = request.clock(), 0
    tables = tables_of(request)
    shortlist = Shortlist(request, tables)
    for tp in sorted({kind.tp_degree for kind in tables.kinds if kind.tp_degree <= max_tp}):
        gpus = [w for node in request.fleet.nodes for w in node.workers[: node.node_type.num_gpus // tp * tp]]
        groups = Groups(tables, gpus)
        for split, width, size in _grids(tables, len(gpus) // tp, tp, balanced):
            tried += 1
            staged = groups.stages([tp * width] * len(split), width, size)
            if staged is not None and shortlist.promising(staged, size):
                shortlist.add(staged, ends_of(split))
    return answer_of(name, request, tables, shortlist.plans(), begin, tried)


def _grids(tables: Tables, groups: int, tp: int, balanced: bool) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(blocks of each stage, pipelines, microbatch) of every grid that fills most of the groups and whose data-parallel degree divides the
    batch."""
    for depth in range(1, min(groups, tables.deepest) + 1):
        split = _balanced_split(tables, depth, tp) if balanced else equal_split(tables.num_blocks, depth)
        for size in tables.sizes:
            total, rest = divmod(tables.batch, size)
            width = next((d for d in range(min(groups // depth, total), 0, -1) if total % d == 0), 0)
            if width > 0 and not rest:
                yield split, width, size


def equal_split(blocks: int, depth: int) -> tuple[int, ...]:
    """Blocks of each stage, the first ones take the rest."""
    return tuple(blocks // depth + (1 if i < blocks % depth else 0) for i in range(depth))


def _balanced_split(tables: Tables, depth: int, tp: int) -> tuple[int, ...]:
    """Cuts nearest to equal shares of one device's time, every stage at least one block."""
    sums = next(sums for row, sums in enumerate(tables.time_sums) if tables.kind(row).tp_degree == tp)
    blocks = tables.num_blocks
    cuts = [0]
    for i in range(1, depth):
        near = int(np.argmin(np.abs(sums[1 : blocks + 2] - sums[-1] * i / depth)))
        cuts.append(min(max(near, cuts[-1] + 1), blocks - (depth - i)))
    return tuple(b - a for a, b in zip(cuts, [*cuts[1:], blocks]))
