"""The strategy `metis`.

Stage-device groups, capacity-aware layer balancing, data before tensor parallelism.

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

from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import Answer, Request, check_request
from planner.search.problem.tables import Tables
from planner.search.walk.judge import SearchEffort, answer_of
from planner.strategies.staged import Groups, Shortlist, Staged


def search_metis(request: Request) -> Answer:
    """Search as Metis does. InfeasibleError if none of its plans fits."""
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    shortlist = Shortlist(request, tables)
    tried = 0
    cut = ""

    # all GPUs, and one less each time that no arrangement keeps its groups inside nodes
    laid_out = False
    for used in range(tables.num_gpus, 0, -1):
        if laid_out:
            break
        for gpus in gpu_orders(tables):
            arranger = Arranger(tables, shortlist, gpus[:used])
            for sizes in arrangements(used, tables.deepest):
                tried += 1
                arranger.try_sizes(sizes)
                is_over = request.is_late or request.clock() - begin > request.time_limit_s
                if is_over:
                    cut = f"arrangements of stages after the first {tried}"
                    break
            laid_out |= arranger.laid_out
    return answer_of("metis", request, tables, shortlist.plans(), SearchEffort(begin, tried, cut))


def gpu_orders(tables: Tables) -> Iterator[list[str]]:
    """Yield all GPUs, node types contiguous, in each order of the types."""
    for order in itertools.permutations(tables.resources):
        gpus: list[str] = []
        for resource in order:
            gpus += resource.workers
        yield gpus


def arrangements(gpus: int, blocks: int) -> Iterator[tuple[int, ...]]:
    """Yield group sizes stage by stage, with both prunings.

    Fewest stages first, at most `limits.MOST_ARRANGEMENTS` of each number of stages.
    """
    for stages in range(1, min(gpus, blocks) + 1):
        least = max(gpus // stages // 2, 1)  # pruning 1: half of the mean
        seen: set[tuple[int, ...]] = set()
        for composition in _compositions(gpus, stages, least):
            for arrangement in _permutations(composition):
                if arrangement not in seen and len(seen) < limits.MOST_ARRANGEMENTS:
                    seen.add(arrangement)
                    yield arrangement


def _compositions(total: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield non-decreasing powers of two of at least `least` that sum to `total`."""
    if count == 1:
        is_power_of_two = total & (total - 1) == 0
        if total >= least and is_power_of_two:
            yield (total,)
        return

    size = 1 << (least - 1).bit_length()  # the first power of two from `least` on
    while size * count <= total:
        for rest in _compositions(total - size, count - 1, size):
            yield (size, *rest)
        size *= 2


def _permutations(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield distinct orders of the sizes; if there are many, equal neighbours move as one block."""
    blocks: list[tuple[int, ...]] = [(size,) for size in sizes]
    while len(blocks) > limits.MAX_PERMUTE:
        merged: list[tuple[int, ...]] = []
        for block, group in itertools.groupby(blocks):
            pairs, single = divmod(len(list(group)), 2)
            merged += [block + block] * pairs
            merged += [block] * single
        if len(merged) == len(blocks):
            break
        blocks = merged

    # unlike neighbours cannot be merged, and seven blocks already have thousands of orders
    if len(blocks) > 6:
        yield tuple(itertools.chain(*blocks))
        return
    for order in sorted(set(itertools.permutations(blocks))):
        yield tuple(itertools.chain(*order))


class Arranger:
    """Tries arrangements along one order of the GPUs; what they share is computed once.

    laid_out: True once an arrangement had all its groups inside nodes.
    """

    def __init__(self, tables: Tables, shortlist: Shortlist, gpus: Sequence[str]) -> None:
        self._tables = tables
        self._shortlist = shortlist
        self._groups = Groups(tables, gpus)
        self._microbatches = [size for size in tables.sizes if tables.batch % size == 0]
        self._seconds: list[list[float]] = tables.sums.time_sums.tolist()
        self.laid_out = False

    def try_sizes(self, sizes: tuple[int, ...]) -> None:
        """Add the plans of one arrangement to the shortlist.

        For every microbatch size it is the largest data-parallel degree whose layers fit. What does
        not fit at one size does not at a larger one.
        """
        for microbatch in self._microbatches:
            if not self._try(sizes, microbatch):
                return

    def _try(self, sizes: tuple[int, ...], microbatch: int) -> bool:
        """Try data-parallel degrees, the largest first, until one fits.

        True if any degree fits, or would by its bound be slower than the best known plan.
        """
        # a microbatch at least for each pipeline
        width = min(sizes)
        while width * microbatch > self._tables.batch:
            width //= 2

        fits = False
        while width >= 1:
            staged = self._groups.stages(sizes, width, microbatch)
            width //= 2
            if staged is None:
                continue
            self.laid_out = True
            if not self._shortlist.is_promising(staged, microbatch):
                fits = True
                continue

            ends = self.balance(staged)
            if ends is not None:
                self._shortlist.add(staged, ends)
                return True
        return fits

    def balance(self, staged: Staged) -> tuple[int, ...] | None:
        """Return ends of the stages, with layers in proportion to capacity.

        Capacity is the speed of the slowest replica; over-full stages give capacity away. None if
        that does not help.
        """
        rows = staged.slowest(self._tables)
        sums = self._seconds[rows[0]]
        speeds = [1.0 / self._seconds[row][-1] for row in rows]
        total = sum(speeds)
        capacity = [speed / total for speed in speeds]
        for _ in range(limits.REPAIRS):
            ends = split_by_capacity(sums, capacity)
            shares = self._fullness_of_stages(staged, ends)
            if max(shares) <= 1:
                return ends
            if min(shares) > 1:
                return None
            capacity = _capacity_given(capacity, shares)
        return None

    def _fullness_of_stages(self, staged: Staged, ends: Sequence[int]) -> list[float]:
        """Return the bytes of each stage's fullest replica, as a share of its limit."""
        depth = len(ends)
        shares = []
        start = 0
        for stage, end in enumerate(ends):
            shares.append(self._fullness(staged.rows[stage], start, end, depth - stage))
            start = end
        return shares

    def _fullness(self, rows: Sequence[int], start: int, end: int, in_flight: int) -> float:
        """Return the bytes of the fullest replica, as a share of its limit."""
        tables = self._tables
        fullest = 0.0
        for row in set(rows):
            num_bytes = tables.sums.memory_bytes(row, start, end, in_flight)
            fullest = max(fullest, num_bytes / tables.rows[row].limit_bytes)
        return fullest


def _capacity_given(capacity: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the capacity of stages once over-full ones have given some of theirs to the others.

    shares: bytes of each stage, as a share of its limit. An over-full stage keeps what fills nine
    tenths of its memory.
    """
    room = 0.0
    lost = 0.0
    for own, share in zip(capacity, shares, strict=True):
        if share <= 1:
            room += own
        else:
            lost += own * (1 - 0.9 / share)

    found = []
    for own, share in zip(capacity, shares, strict=True):
        if share <= 1:
            found.append(own * (1 + lost / room))
        else:
            found.append(own * 0.9 / share)
    return found


def split_by_capacity(sums: Sequence[float], capacity: Sequence[float]) -> tuple[int, ...]:
    """Return ends with which each stage's share of the layers' time is nearest to its capacity.

    Each stage has a block at least. sums: seconds of the first i layers.
    """
    layers = len(sums) - 1
    depth = len(capacity)
    ends: list[int] = []
    for stage, share in enumerate(itertools.accumulate(capacity[:-1])):
        target = share * sums[-1]
        above = min(max(bisect_left(sums, target), 1), layers)
        below = above - 1
        is_below_nearer = target - sums[below] <= sums[above] - target
        near = below if is_below_nearer else above

        # the first stage holds the embedding beside its block, the last one the head
        least = (ends[-1] + 1) if ends else 2
        stages_after = depth - 1 - stage
        most = layers - 1 - stages_after
        ends.append(min(max(near, least), most))
    return (*ends, layers)
