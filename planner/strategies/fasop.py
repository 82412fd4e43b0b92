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
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from planner.cluster import Fleet, Node, NodeType
from planner.cost.boundaries import NicFlows
from planner.search import limits
from planner.search.cost_tables import tables_of
from planner.search.judge import SearchEffort, answer_of
from planner.search.problem import Answer, Request, check_request
from planner.search.tables import Tables
from planner.strategies.staged import GpuGroup, Groups, Shortlist, Staged, ends_of, equal_split

# Sender's and receiver's node type, whether they are one node, the receiver's TP degree, groups
# that it leaves the node for together.
TransferKind = tuple[NodeType, NodeType, bool, int, int, int]


def search_fasop(request: Request, most_orders: int | None = None) -> Answer:
    """FASOP's search.

    InfeasibleError where none of its plans fits. most_orders: of the nodes, evenly among all; none:
    all.
    """
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    shortlist = Shortlist(request, tables)
    tried = 0
    cut = ""
    for whole in (True, False):
        orders = list(node_orders(request.fleet, most_orders)) if shortlist.is_empty else []
        for number, nodes in enumerate(orders, 1):
            tried += _try_order(request, tables, shortlist, nodes, whole)
            if request.is_late or request.clock() - begin > request.time_limit_s:
                left = len(orders) - number
                cut = f"{left} of {len(orders)} orders of the nodes" if left else ""
                break
    return answer_of("fasop", request, tables, shortlist.plans(), SearchEffort(begin, tried, cut))


def node_orders(fleet: Fleet, most: int | None = None) -> Iterator[tuple[Node, ...]]:
    """The cyclic rotations of the nodes sorted by type that differ in their sequence of types; with
    `most`, so many of them at most.
    """
    nodes = sorted(fleet.nodes, key=lambda node: (node.node_type.name, fleet.nodes.index(node)))
    seen = set()
    for turn in range(0, len(nodes), -(-len(nodes) // most) if most else 1):
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
    tried = 0
    for tp in sorted({kind.tp_degree for kind in tables.kinds}):
        gpus: list[str] = []
        for node in nodes:
            used = len(node.workers) if whole else node.node_type.num_gpus // tp * tp
            gpus += node.workers[:used]
        groups = Groups(tables, gpus)
        for depth, width, microbatch in _grids(tables, len(gpus), tp, whole):
            tried += 1
            staged = groups.stages([tp * width] * depth, width, microbatch)
            if staged is None or not shortlist.promising(staged, microbatch):
                continue
            seconds = transfers.seconds(staged, microbatch)
            for ends in cuts(sums, staged.slowest(tables), seconds, kinds_change(sums[0])):
                shortlist.add(staged, ends)
    return tried


def _grids(tables: Tables, gpus: int, tp: int, whole: bool) -> Iterator[tuple[int, int, int]]:
    """(stages, pipelines, microbatch) of every DP and microbatch that the GPUs and the batch allow.
    FASOP takes those that divide both (`whole`); where none does, as with five GPUs or a prime
    batch, some GPUs stay idle and counts differ.
    """
    batch = tables.batch
    deepest = tables.deepest
    for width in range(1, gpus // tp + 1):
        depth = gpus // (tp * width)
        if whole and (gpus % (tp * width) or depth > deepest):
            continue
        for microbatch in tables.sizes:
            if batch % (width * microbatch) == 0 or (
                not whole and batch % microbatch == 0 and batch >= width * microbatch
            ):
                yield min(depth, deepest), width, microbatch


class BoundaryTransfers:
    """Seconds of the transfers over each boundary of a grid; which transfers there are does not
    depend on the microbatch.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._kinds: dict[tuple[int, int, int], list[set[TransferKind]]] = {}
        self._seconds: dict[tuple[TransferKind, int], float] = {}

    def seconds(self, staged: Staged, microbatch: int) -> list[float]:
        """The slowest transfer of each boundary, one direction, NICs shared by all that leave and
        reach the nodes with it.
        """
        key = (len(staged.stages), staged.width, len(staged.stages[0][0]))
        if key not in self._kinds:
            self._kinds[key] = [self._between(*pair) for pair in itertools.pairwise(staged.stages)]
        return [
            max(self._time(transfer, microbatch) for transfer in kinds)
            for kinds in self._kinds[key]
        ]

    def _between(
        self, senders: Sequence[GpuGroup], receivers: Sequence[GpuGroup]
    ) -> set[TransferKind]:
        node_of = self._request.fleet.node_of
        pairs = [
            (node_of(a[0]), node_of(b[0]), len(b)) for a, b in zip(senders, receivers, strict=True)
        ]
        leaving = Counter(a.name for a, b, _ in pairs if a is not b)
        arriving = Counter(b.name for a, b, _ in pairs if a is not b)
        return {
            (a.node_type, b.node_type, a is b, tp, leaving[a.name], arriving[b.name])
            for a, b, tp in pairs
        }

    def _time(self, transfer: TransferKind, microbatch: int) -> float:
        if (transfer, microbatch) not in self._seconds:
            a, b, same, tp, leaving, arriving = transfer
            self._seconds[transfer, microbatch] = self._request.cost.boundaries.between_s(
                a, b, microbatch, same_node=same, tp_degree=tp, flows=NicFlows(leaving, arriving)
            )
        return self._seconds[transfer, microbatch]


def kinds_change(sums: Sequence[float]) -> int | None:
    """The block at which an encoder's blocks end and a decoder's begin: where the seconds of
    neighbours differ by a fifth; None where they do so nowhere or more than once.
    """
    seconds = [b - a for a, b in itertools.pairwise(sums[1:-1])]
    pairs = itertools.pairwise(seconds)
    changes = [i for i, (a, b) in enumerate(pairs, start=1) if abs(b / a - 1) > limits.OTHER_KIND]
    return changes[0] if len(changes) == 1 else None


def cuts(
    sums: Sequence[Sequence[float]],
    rows: Sequence[int],
    boundary_s: Sequence[float],
    change: int | None,
) -> Iterator[tuple[int, ...]]:
    """Ends of the stages: min-max over all; with two kinds of blocks also over each kind's own
    stages, for every number of stages that the first kind can have.

    sums[row][i]: seconds of the first i layers; rows: of each stage.
    """
    blocks = len(sums[0]) - 3
    depth = len(rows)
    tolls = [0.0, *boundary_s[1:], 0.0][:depth]
    yield ends_of(tuple(min_max(sums, rows, tolls, equal_split(blocks, depth), range(depth))))
    for first in range(1, depth) if change is not None else ():
        assert change is not None
        if first <= change and depth - first <= blocks - change:
            split: Sequence[int] = (
                *equal_split(change, first),
                *equal_split(blocks - change, depth - first),
            )
            for stages in (range(first), range(first, depth)):
                split = min_max(sums, rows, tolls, split, stages)
            yield ends_of(tuple(split))


def min_max(
    sums: Sequence[Sequence[float]],
    rows: Sequence[int],
    tolls: Sequence[float],
    start: Sequence[int],
    stages: range,
) -> Sequence[int]:
    """Blocks of each stage: one at a time from the slowest of `stages` to the fastest of them,
    until the slowest grows or a split comes back. A stage takes its layers' time and its toll, one
    transfer where it lies between two others.
    """
    split = list(start)
    best = tuple(split)
    seen = {tuple(split)}
    seconds = _stage_seconds(sums, rows, split, tolls)
    best_s = max(seconds[s] for s in stages)
    while len(stages) > 1 and max(split[s] for s in stages) > 1:
        slow = max((s for s in stages if split[s] > 1), key=lambda s: (seconds[s], -s))
        fast = min((s for s in stages if s != slow), key=lambda s: (seconds[s], s))
        split[slow] -= 1
        split[fast] += 1
        seconds = _stage_seconds(sums, rows, split, tolls)
        now = max(seconds[s] for s in stages)
        if tuple(split) in seen or now > best_s * (1 + 1e-12):
            break
        seen.add(tuple(split))
        best = tuple(split)
        best_s = now
    return best


def _stage_seconds(
    sums: Sequence[Sequence[float]],
    rows: Sequence[int],
    split: Sequence[int],
    tolls: Sequence[float],
) -> list[float]:
    at = 0
    out = []
    for stage, (row, blocks) in enumerate(zip(rows, split, strict=True)):
        end = at + blocks + (stage == 0) + (stage == len(rows) - 1)
        out.append(sums[row][end] - sums[row][at] + tolls[stage])
        at = end
    return out


def fleets_up_to(fleet: Fleet, most: int = 200) -> Iterator[Fleet]:
    """Fleets with every number of nodes of each type up to the fleet's, thinned to at most `most`;
    and one node of each type alone.
    """
    by_type: dict[NodeType, list[Node]] = {}
    for node in fleet.nodes:
        by_type.setdefault(node.node_type, []).append(node)
    steps = [list(range(len(nodes) + 1)) for nodes in by_type.values()]
    while math.prod(map(len, steps)) > most and max(map(len, steps)) > 3:
        widest = max(range(len(steps)), key=lambda i: (len(steps[i]), -i))
        steps[widest] = sorted({*steps[widest][::2], steps[widest][-1]})
    never_alone = [i for i, numbers in enumerate(steps) if 1 not in numbers]
    alone = [tuple(int(i == only) for i in range(len(steps))) for only in never_alone]
    for counts in itertools.chain(alone, itertools.product(*steps)):
        if sum(counts):
            chosen: list[Node] = []
            for count, nodes in zip(counts, by_type.values(), strict=True):
                chosen += nodes[:count]
            yield Fleet(fleet.generation, tuple(chosen))
