"""The strategy `metis`: stage-device groups, capacity-aware layer balancing, data before tensor
parallelism.

Um et al., "Metis: fast automatic distributed training on heterogeneous GPUs", ATC'24, under our
cost model. Kept: types laid out contiguously in every order, group sizes that are powers of two and
never much below the mean (pruning 1), equal neighbours permuted as blocks (pruning 2), layers in
proportion to the stages' speed with memory repair, the first memory-feasible strategy from the most
data-parallel one. Not kept: plans that lose layers or leave stages empty, the limit to powers of
two in GPUs and batch (where no arrangement of all GPUs keeps its groups inside nodes, the last ones
of the order stay idle), and an order that depends on the hash seed. Our plans have one
data-parallel degree for all stages.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from planner.search import limits
from planner.search.cost_tables import tables_of
from planner.search.judge import SearchEffort, answer_of
from planner.search.problem import Answer, Request, check_request
from planner.search.tables import Tables
from planner.strategies.staged import Groups, Shortlist, Staged


def search_metis(request: Request) -> Answer:
    """Metis's search. InfeasibleError where none of its plans fits."""
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    shortlist = Shortlist(request, tables)
    tried = 0
    cut = ""
    used = sum(resource.num_gpus for resource in tables.resources)
    laid_out = False
    while used > 0 and not laid_out:
        for gpus in gpu_orders(tables):
            arranger = Arranger(tables, shortlist, gpus[:used])
            for sizes in arrangements(used, tables.deepest):
                tried += 1
                arranger.try_sizes(sizes)
                if request.is_late or request.clock() - begin > request.time_limit_s:
                    cut = f"arrangements of stages after the first {tried}"
                    break
            laid_out |= arranger.laid_out
        used -= 1
    return answer_of("metis", request, tables, shortlist.plans(), SearchEffort(begin, tried, cut))


def gpu_orders(tables: Tables) -> Iterator[list[str]]:
    """Yield all GPUs, node types contiguous, in each order of the types."""
    for order in itertools.permutations(range(len(tables.resources))):
        gpus: list[str] = []
        for r in order:
            names = tables.resources[r].node_names
            numbers = range(tables.resources[r].node_type.num_gpus)
            gpus += [f"{name}/{gpu}" for name in names for gpu in numbers]
        yield gpus


def arrangements(gpus: int, blocks: int) -> Iterator[tuple[int, ...]]:
    """Group sizes stage by stage, with both prunings; fewest stages first, at most so many of each
    number of stages.
    """
    for stages in range(1, min(gpus, blocks) + 1):
        least = max(gpus // stages // 2, 1)
        seen: set[tuple[int, ...]] = set()
        for composition in _compositions(gpus, stages, least):
            for arrangement in _permutations(composition):
                if arrangement not in seen and len(seen) < limits.MOST_ARRANGEMENTS:
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
    while len(blocks) > limits.MAX_PERMUTE:
        merged: list[tuple[int, ...]] = []
        for block, group in itertools.groupby(blocks):
            members = list(group)
            pairs = [block + block] * (len(members) // 2) + [block] * (len(members) % 2)
            merged += pairs
        if len(merged) == len(blocks):
            break
        blocks = merged
    if len(blocks) > 2 * limits.MAX_PERMUTE:
        yield tuple(itertools.chain(*blocks))
        return
    for order in (
        sorted(set(itertools.permutations(blocks))) if len(blocks) <= 6 else [tuple(blocks)]
    ):
        yield tuple(itertools.chain(*order))


class Arranger:
    """Tries arrangements along one order of the GPUs; what they share is computed once. laid_out:
    whether one had all its groups inside nodes.
    """

    def __init__(self, tables: Tables, shortlist: Shortlist, gpus: Sequence[str]) -> None:
        self._tables, self._shortlist, self._groups = tables, shortlist, Groups(tables, gpus)
        self._microbatches = [size for size in tables.sizes if tables.batch % size == 0]
        self._seconds: list[list[float]] = tables.sums.time_sums.tolist()
        self.laid_out = False

    def try_sizes(self, sizes: tuple[int, ...]) -> None:
        """The plans of one arrangement: for every microbatch size the most data-parallel degree
        whose layers fit. What does not fit at one size does not at a larger one.
        """
        for microbatch in self._microbatches:
            if not self._try(sizes, microbatch):
                return

    def _try(self, sizes: tuple[int, ...], microbatch: int) -> bool:
        """Try data-parallel degrees, the largest first, until one fits.

        True if any degree fits, or would by its bound be slower than the best known plan.
        """
        width = min(sizes)
        fits = False
        while width >= 1:
            staged = (
                self._groups.stages(sizes, width, microbatch)
                if width * microbatch <= self._tables.batch
                else None
            )
            self.laid_out |= staged is not None
            if staged is not None and not self._shortlist.promising(staged, microbatch):
                fits = True
            elif staged is not None:
                ends = self.balance(staged)
                if ends is not None:
                    self._shortlist.add(staged, ends)
                    return True
            width //= 2
        return fits

    def balance(self, staged: Staged) -> tuple[int, ...] | None:
        """Ends of the stages: layers in proportion to capacity (speed of the slowest replica);
        over-full stages give capacity away. None where that does not help.
        """
        rows = staged.slowest(self._tables)
        depth = len(rows)
        sums = self._seconds[rows[0]]
        speeds = [1.0 / self._seconds[row][-1] for row in rows]
        capacity = [speed / sum(speeds) for speed in speeds]
        for _ in range(limits.REPAIRS):
            ends = split_by_capacity(sums, capacity)
            bounds = zip((0, *ends[:-1]), ends, strict=True)
            share = [
                self._fullness(staged.rows[s], a, b, depth - s) for s, (a, b) in enumerate(bounds)
            ]
            if max(share) <= 1:
                return ends
            room = sum(c for c, x in zip(capacity, share, strict=True) if x <= 1)
            if room == 0:
                return None
            lost = sum(c * (1 - 0.9 / x) for c, x in zip(capacity, share, strict=True) if x > 1)
            capacity = [
                c * (1 + lost / room) if x <= 1 else c * 0.9 / x
                for c, x in zip(capacity, share, strict=True)
            ]
        return None

    def _fullness(self, rows: Sequence[int], start: int, end: int, in_flight: int) -> float:
        """Bytes over limit of the fullest replica."""
        tables = self._tables
        return max(
            tables.sums.memory_bytes(row, start, end, in_flight) / tables.rows[row].limit_bytes
            for row in set(rows)
        )


def split_by_capacity(sums: Sequence[float], capacity: Sequence[float]) -> tuple[int, ...]:
    """Ends so that each stage's share of the layers' time is nearest to its share of capacity, at
    least a block each. sums: seconds of the first i layers.
    """
    layers = len(sums) - 1
    depth = len(capacity)
    ends: list[int] = []
    for s, share in enumerate(itertools.accumulate(capacity[:-1])):
        target = share * sums[-1]
        above = min(max(bisect_left(sums, target), 1), layers)
        near = above - 1 if target - sums[above - 1] <= sums[above] - target else above
        least = (ends[-1] + 1) if ends else 2
        ends.append(min(max(near, least), layers - 1 - (depth - 1 - s)))
    return (*ends, layers)
