"""The strategy `fasop`: one grid of TP x DP x PP for each order of the nodes, layers by min-max
moves; and the Pareto front over fleets.

Hwang et al., "FASOP: fast yet accurate automated search for optimal parallelization of transformers
on heterogeneous GPU clusters", CLUSTER'24, under our cost model. Kept: cyclic node orders, uniform
TP and DP, repeated moves of one layer from the slowest to the fastest stage with one transfer
counted between stages, both halves of an encoder-decoder balanced apart for every split of the
stages, a stage as slow as its slowest GPU, price limits. Not kept: moves that ignore memory, layer
costs of the wrong half, hard-coded microbatch factors, equal node sizes, grids that must divide
GPUs and batch (where none does). Added: the best cuts are predicted.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from planner.cost.links.boundaries import NicFlows
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import Answer, Request, check_request
from planner.search.problem.tables import Tables, tp_degrees_of
from planner.search.walk.judge import SearchEffort, answer_of
from planner.strategies.fleets import thinned_counts, with_count
from planner.strategies.staged import (
    GpuGroup,
    Groups,
    Shortlist,
    Staged,
    differences,
    ends_of,
    equal_split,
    gpus_in_groups,
)

# Sender's and receiver's node type, whether they are one node, the receiver's TP degree, groups
# that it leaves the node for together.
TransferKind = tuple[NodeType, NodeType, bool, int, int, int]


def search_fasop(request: Request) -> Answer:
    """Search as FASOP does. InfeasibleError if none of its plans fits."""
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    shortlist = Shortlist(request, tables)
    tried = 0
    cut = ""
    orders = list(node_orders(request.fleet))

    # FASOP's own grids first, others only if none of these fits
    for whole in (True, False):
        if not shortlist.is_empty:
            break
        for number, nodes in enumerate(orders, 1):
            tried += _try_order(request, tables, shortlist, nodes, whole)
            is_over = request.is_late or request.clock() - begin > request.time_limit_s
            if is_over:
                left = len(orders) - number
                cut = f"{left} of {len(orders)} orders of the nodes" if left else ""
                break
    return answer_of("fasop", request, tables, shortlist.plans(), SearchEffort(begin, tried, cut))


def node_orders(fleet: Fleet) -> Iterator[tuple[Node, ...]]:
    """Yield the cyclic rotations of the nodes, sorted by type, whose sequences of types differ."""
    nodes = sorted(fleet.nodes, key=lambda node: node.node_type.name)
    seen = set()
    for turn in range(len(nodes)):
        order = (*nodes[turn:], *nodes[:turn])
        types = tuple(node.node_type for node in order)
        if types not in seen:
            seen.add(types)
            yield order


def _try_order(
    request: Request, tables: Tables, shortlist: Shortlist, nodes: tuple[Node, ...], whole: bool
) -> int:
    """Try all grids on one order of the nodes; return their number.

    whole: only grids that use every GPU.
    """
    sums = tables.sums.time_sums.tolist()
    transfers = BoundaryTransfers(request)
    change = kinds_change(sums[0])
    tried = 0
    for tp in tp_degrees_of(tables):
        # a grid that uses every GPU may have groups that leave their node; `stages` refuses them
        gpus = gpus_in_groups(nodes, 1 if whole else tp)
        groups = Groups(tables, gpus)

        for depth, width, microbatch in _grids(tables, len(gpus), tp, whole):
            tried += 1
            staged = groups.stages([tp * width] * depth, width, microbatch)
            if staged is None or not shortlist.is_promising(staged, microbatch):
                continue
            seconds = transfers.seconds(staged, microbatch)
            for ends in cuts(sums, staged.slowest(tables), seconds, change):
                shortlist.add(staged, ends)
    return tried


def _grids(tables: Tables, gpus: int, tp: int, whole: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (stages, pipelines, microbatch) for each DP and microbatch that may be used.

    FASOP takes those that divide the GPUs and the batch (`whole`). If none does, as with five GPUs
    or a prime batch, some GPUs stay idle and the pipelines' microbatches differ in number.
    """
    batch = tables.batch
    deepest = tables.deepest
    for width in range(1, gpus // tp + 1):
        depth = gpus // (tp * width)
        uses_all = gpus % (tp * width) == 0 and depth <= deepest
        if whole and not uses_all:
            continue

        for microbatch in tables.sizes:
            is_even = batch % (width * microbatch) == 0
            has_one_each = batch % microbatch == 0 and batch >= width * microbatch
            if is_even or (not whole and has_one_each):
                yield min(depth, deepest), width, microbatch


class BoundaryTransfers:
    """Seconds of the transfers over each boundary of a grid.

    Which transfers there are does not depend on the microbatch, so they are found once.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._kinds: dict[tuple[int, int, int], list[set[TransferKind]]] = {}
        self._seconds: dict[tuple[TransferKind, int], float] = {}

    def seconds(self, staged: Staged, microbatch: int) -> list[float]:
        """Return the slowest transfer of each boundary, in one direction.

        Its NICs are shared by all groups that leave and reach the nodes with it.
        """
        tp = len(staged.stages[0][0])
        key = (len(staged.stages), staged.width, tp)
        if key not in self._kinds:
            kinds_of_each = [
                self._between(senders, receivers)
                for senders, receivers in itertools.pairwise(staged.stages)
            ]
            self._kinds[key] = kinds_of_each

        slowest = []
        for kinds in self._kinds[key]:
            slowest.append(max(self._time(transfer, microbatch) for transfer in kinds))
        return slowest

    def _between(
        self, senders: Sequence[GpuGroup], receivers: Sequence[GpuGroup]
    ) -> set[TransferKind]:
        node_of = self._request.fleet.node_of
        pairs = []
        leaving = Counter[str]()
        arriving = Counter[str]()
        for sender, receiver in zip(senders, receivers, strict=True):
            here = node_of(sender[0])
            there = node_of(receiver[0])
            pairs.append((here, there, len(receiver)))
            if here is not there:
                leaving[here.name] += 1
                arriving[there.name] += 1

        found = set[TransferKind]()
        for here, there, tp in pairs:
            types = (here.node_type, there.node_type)
            flows = (leaving[here.name], arriving[there.name])
            found.add((*types, here is there, tp, *flows))
        return found

    def _time(self, transfer: TransferKind, microbatch: int) -> float:
        key = (transfer, microbatch)
        if key not in self._seconds:
            here, there, same, tp, leaving, arriving = transfer
            flows = NicFlows(leaving, arriving)
            self._seconds[key] = self._request.cost.boundaries.between_s(
                here, there, microbatch, same_node=same, tp_degree=tp, flows=flows
            )
        return self._seconds[key]


def kinds_change(sums: Sequence[float]) -> int | None:
    """Return the block at which an encoder's blocks end and a decoder's begin.

    There the seconds of neighbours differ by a fifth; None if they do so nowhere or more than once.

    sums: seconds of the first i layers.
    """
    # the first layer is the embedding, the last the head
    blocks_s = differences(sums[1:-1])
    changes = []
    for block in range(1, len(blocks_s)):
        ratio = blocks_s[block] / blocks_s[block - 1]
        if abs(ratio - 1) > limits.OTHER_KIND:
            changes.append(block)
    return changes[0] if len(changes) == 1 else None


def cuts(
    sums: Sequence[Sequence[float]],
    rows: Sequence[int],
    boundary_s: Sequence[float],
    change: int | None,
) -> Iterator[tuple[int, ...]]:
    """Yield ends of the stages: min-max over all, and over the stages of each kind of blocks.

    With two kinds of blocks, the second is tried for every number of stages that the first kind can
    have.

    sums[row][i]: seconds of the first i layers. rows: of each stage. change: first block of the
    second kind; None if there is one kind.
    """
    blocks = len(sums[0]) - 3
    depth = len(rows)

    # one transfer for each stage between two others, as FASOP counts them
    tolls = [0.0, *boundary_s[1:], 0.0][:depth]
    every = range(depth)
    yield ends_of(min_max(sums, rows, tolls, equal_split(blocks, depth), every))
    if change is None:
        return

    for first in range(1, depth):
        # a block at least for each stage
        if first > change or depth - first > blocks - change:
            continue
        start = (*equal_split(change, first), *equal_split(blocks - change, depth - first))
        split = min_max(sums, rows, tolls, start, range(first))
        split = min_max(sums, rows, tolls, split, range(first, depth))
        yield ends_of(split)


def min_max(
    sums: Sequence[Sequence[float]],
    rows: Sequence[int],
    tolls: Sequence[float],
    start: Sequence[int],
    stages: range,
) -> tuple[int, ...]:
    """Return the blocks of each stage.

    One block at a time moves from the slowest of `stages` to the fastest of them, until the slowest
    grows or a split comes back. A stage takes its layers' time and its toll, one transfer if it
    lies between two others.
    """
    best = tuple(start)
    if len(stages) < 2:
        return best

    split = list(start)
    seen = {best}
    seconds = _stage_seconds(sums, rows, split, tolls)
    best_s = max(seconds[stages.start : stages.stop])
    while True:
        givers = [stage for stage in stages if split[stage] > 1]
        if not givers:
            return best

        # of equal ones the first
        slow = max(givers, key=lambda stage: seconds[stage])
        takers = [stage for stage in stages if stage != slow]
        fast = min(takers, key=lambda stage: seconds[stage])
        split[slow] -= 1
        split[fast] += 1

        seconds = _stage_seconds(sums, rows, split, tolls)
        slowest_s = max(seconds[stages.start : stages.stop])
        if tuple(split) in seen or slowest_s > best_s * (1 + 1e-12):
            return best
        best = tuple(split)
        best_s = slowest_s
        seen.add(best)


def _stage_seconds(
    sums: Sequence[Sequence[float]],
    rows: Sequence[int],
    split: Sequence[int],
    tolls: Sequence[float],
) -> list[float]:
    begin = 0
    found = []
    for row, end, toll in zip(rows, ends_of(split), tolls, strict=True):
        found.append(sums[row][end] - sums[row][begin] + toll)
        begin = end
    return found


def fleets_up_to(fleet: Fleet, most: int = 200) -> Iterator[Fleet]:
    """Yield fleets with every number of nodes of each type, and with one node of each type alone.

    most: the numbers are thinned to so many fleets at most.
    """
    by_type: dict[NodeType, list[Node]] = {}
    for node in fleet.nodes:
        by_type.setdefault(node.node_type, []).append(node)

    steps = thinned_counts([len(nodes) for nodes in by_type.values()], most)
    none = (0,) * len(steps)

    # a single node, whose GPUs need no network, often has the least price per token
    alone = []
    for index, numbers in enumerate(steps):
        is_thinned_out = 1 not in numbers
        if is_thinned_out:
            alone.append(with_count(none, index, 1))

    for counts in itertools.chain(alone, itertools.product(*steps)):
        if not any(counts):
            continue
        chosen: list[Node] = []
        for count, nodes in zip(counts, by_type.values(), strict=True):
            chosen += nodes[:count]
        yield Fleet(fleet.generation, tuple(chosen))
