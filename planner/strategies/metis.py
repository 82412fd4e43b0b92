"""The strategy `metis`: stage-device groups, capacity-aware layer balancing, data before tensor parallelism.

Um et al., "Metis: fast automatic distributed training on heterogeneous GPUs", ATC'24, under our cost model. Kept:
types laid out
contiguously in every order, group sizes that are powers of two and never much below the mean (pruning 1), equal
neighbours permuted as
blocks (pruning 2), layers in proportion to the stages' speed with memory repair, the first memory-feasible strategy
from the
most data-parallel one. Not kept: plans that lose layers or leave stages empty, the limit to powers of two in GPUs and
batch, and
an order that depends on the hash seed. Our plans have one data-parallel degree for all stages.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from planner.errors import InfeasibleError
from planner.plan import Plan
from planner.strategies.autohet import choose, idle_workers, why_infeasible
from planner.strategies.cost_tables import check_request, tables_of
from planner.strategies.drafts import Estimator
from planner.strategies.request import Answer, Request, SearchReport
from planner.strategies.staged import Staged, Stager
from planner.strategies.tables import Floats, Tables

_MAX_PERMUTE = 4
_REPAIRS = 3
_MOST_ARRANGEMENTS = 400
_CANDIDATES = 8


def search_metis(request: Request) -> Answer:
    """Metis's search. InfeasibleError where none of its plans fits."""
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    stager, estimator = Stager(tables, request.fleet), Estimator(tables)
    found: list[tuple[float, int, Plan]] = []
    tried = 0
    for gpus in gpu_orders(tables):
        for sizes in arrangements(len(gpus), tables.num_blocks):
            tried += 1
            found += _best_of(request, tables, stager, estimator, gpus, sizes, tried)
            if request.clock() - begin > request.time_limit_s:
                break
    found.sort(key=lambda item: item[:2])
    best, rejected = choose(request, [plan for _, _, plan in found[:_CANDIDATES]])
    if best is None:
        raise InfeasibleError(f"metis finds no plan that fits: {why_infeasible(request, tables)}")
    report = SearchReport(request.clock() - begin, tried, None, None)
    return Answer(
        "metis", best.plan, best.prediction, report, tuple(rejected), idle_workers(request, tables, best.plan)
    )


def gpu_orders(tables: Tables) -> Iterator[list[str]]:
    """All GPUs, node types contiguous, in each order of the types."""
    for order in itertools.permutations(range(len(tables.resources))):
        yield [
            f"{name}/{gpu}"
            for r in order
            for name in tables.resources[r].node_names
            for gpu in range(tables.resources[r].node_type.num_gpus)
        ]


def arrangements(gpus: int, blocks: int) -> Iterator[tuple[int, ...]]:
    """Group sizes stage by stage, with both prunings; fewest stages first."""
    for stages in range(1, min(gpus, blocks) + 1):
        least = max(gpus // stages // 2, 1)
        seen: set[tuple[int, ...]] = set()
        for composition in _compositions(gpus, stages, least):
            for arrangement in _permutations(composition):
                if arrangement not in seen and len(seen) < _MOST_ARRANGEMENTS:
                    seen.add(arrangement)
                    yield arrangement


def _compositions(total: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    """Non-decreasing powers of two of at least `least` that sum to `total`."""
    if count == 1:
        if total >= least and total & (total - 1) == 0:
            yield (total,)
        return
    size = 1 << (least - 1).bit_length()
    while size * count <= total:
        for rest in _compositions(total - size, count - 1, size):
            yield (size, *rest)
        size *= 2


def _permutations(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Distinct orders of the sizes; where there are many, equal neighbours move as one block."""
    blocks: list[tuple[int, ...]] = [(size,) for size in sizes]
    while len(blocks) > _MAX_PERMUTE:
        merged: list[tuple[int, ...]] = []
        for block, group in itertools.groupby(blocks):
            members = list(group)
            pairs = [block + block] * (len(members) // 2) + [block] * (len(members) % 2)
            merged += pairs
        if len(merged) == len(blocks):
            break
        blocks = merged
    if len(blocks) > 2 * _MAX_PERMUTE:
        yield tuple(itertools.chain(*blocks))
        return
    for order in sorted(set(itertools.permutations(blocks))) if len(blocks) <= 6 else [tuple(blocks)]:
        yield tuple(itertools.chain(*order))


def _best_of(
    request: Request,
    tables: Tables,
    stager: Stager,
    estimator: Estimator,
    gpus: list[str],
    sizes: tuple[int, ...],
    number: int,
) -> list[tuple[float, int, Plan]]:
    """The plans of one arrangement: every microbatch size, the most data-parallel degree that fits."""
    out = []
    batch = request.global_batch_sequences
    for microbatch in sorted({row.microbatch for row in tables.rows}):
        width = min(sizes)
        while width >= 1:
            if batch % microbatch == 0 and width * microbatch <= batch:
                staged = stager.stages(gpus, sizes, width, microbatch)
                ends = None if staged is None else balance(tables, stager, staged)
                draft = None
                if staged is not None and ends is not None:
                    draft = stager.draft(staged, ends, batch, estimator)
                if staged is not None and draft is not None:
                    plan = stager.plan(staged, draft, microbatch, request.spec.name, batch, request.sequence_length)
                    out.append((estimator.draft_s(draft), number, plan))
                    break
            width //= 2
    return out


def balance(tables: Tables, stager: Stager, staged: Staged) -> tuple[int, ...] | None:
    """Ends of the stages: layers in proportion to capacity (speed of the slowest replica); over-full stages give
    capacity away.
    """
    rows = stager.slowest(staged)
    depth = len(rows)
    capacity = np.array([1.0 / tables.time_sums[row, -1] for row in rows])
    capacity /= capacity.sum()
    for _ in range(_REPAIRS):
        ends = split_by_capacity(tables.time_sums[rows[0]], capacity)
        share = [
            _fullness(tables, staged.rows[s], 0 if s == 0 else ends[s - 1], ends[s], depth - s) for s in range(depth)
        ]
        if max(share) <= 1:
            return ends
        lost = np.array([c * (1 - 0.9 / x) if x > 1 else 0.0 for c, x in zip(capacity, share, strict=True)])
        room = np.array([c if x <= 1 else 0.0 for c, x in zip(capacity, share, strict=True)])
        if room.sum() == 0:
            return None
        capacity = capacity - lost + lost.sum() * room / room.sum()
    return None


def split_by_capacity(sums: Floats, capacity: Floats) -> tuple[int, ...]:
    """Ends so that each stage's share of the layers' time is nearest to its share of capacity, at least a block each."""
    layers = len(sums) - 1
    depth = len(capacity)
    targets = np.cumsum(capacity) * sums[-1]
    ends: list[int] = []
    for s in range(depth - 1):
        near = int(np.argmin(np.abs(sums - targets[s])))
        least = (ends[-1] + 1) if ends else 2
        ends.append(min(max(near, least), layers - 1 - (depth - 1 - s)))
    return (*ends, layers)


def _fullness(tables: Tables, rows: Sequence[int], start: int, end: int, in_flight: int) -> float:
    return max(tables.memory_bytes(row, start, end, in_flight) / tables.rows[row].limit_bytes for row in set(rows))
