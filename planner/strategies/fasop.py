"""The strategy `fasop`: one grid of TP x DP x PP for each order of the nodes, layers by min-max moves; and the Pareto
front over fleets.

Hwang et al., "FASOP: fast yet accurate automated search for optimal parallelization of transformers on heterogeneous
GPU
clusters", CLUSTER'24, under our cost model. Kept: cyclic node orders, uniform TP and DP, repeated moves of one layer
from the slowest to
the fastest stage, a stage as slow as its slowest GPU, price limits. Not kept: moves that ignore memory, layer costs
of the wrong
half, hard-coded microbatch factors, equal node sizes.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from planner.cluster import Fleet, Node, NodeType
from planner.cost import CostModel
from planner.errors import InfeasibleError
from planner.strategies.autohet import choose, idle_workers, why_infeasible
from planner.strategies.cost_tables import check_request, tables_of
from planner.strategies.drafts import Estimator, Shape
from planner.strategies.refine import fits
from planner.strategies.request import Answer, Request, SearchReport
from planner.strategies.shortlist import Candidate, candidate, plans_of
from planner.strategies.staged import Staged, Stager
from planner.strategies.symmetric import equal_split
from planner.strategies.tables import Tables

_CANDIDATES = 8


def search_fasop(request: Request) -> Answer:
    """FASOP's search. InfeasibleError where none of its plans fits."""
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    stager, estimator = Stager(tables, request.fleet), Estimator(tables)
    found: list[Candidate] = []
    tried = 0
    for nodes in node_orders(request.fleet):
        for sizes, width, microbatch in _grids(request, tables, nodes):
            tried += 1
            found += _candidates(request, tables, stager, estimator, nodes, sizes, width, microbatch, tried)
        if request.clock() - begin > request.time_limit_s:
            break
    best, rejected = choose(request, plans_of(request, stager, estimator, found, _CANDIDATES))
    if best is None:
        raise InfeasibleError(f"fasop finds no plan that fits: {why_infeasible(request, tables)}")
    report = SearchReport(request.clock() - begin, tried, None, None)
    return Answer(
        "fasop", best.plan, best.prediction, report, tuple(rejected), idle_workers(request, tables, best.plan)
    )


def node_orders(fleet: Fleet) -> Iterator[tuple[Node, ...]]:
    """The cyclic rotations of the nodes sorted by type that differ in their sequence of types."""
    nodes = sorted(fleet.nodes, key=lambda node: (node.node_type.name, fleet.nodes.index(node)))
    seen = set()
    for turn in range(len(nodes)):
        order = (*nodes[turn:], *nodes[:turn])
        names = tuple(node.node_type.name for node in order)
        if names not in seen:
            seen.add(names)
            yield order


def _grids(request: Request, tables: Tables, nodes: tuple[Node, ...]) -> Iterator[tuple[list[int], int, int]]:
    """(stage sizes, pipelines, microbatch) of every TP, DP and microbatch that the GPUs and the batch allow."""
    gpus = sum(node.node_type.num_gpus for node in nodes)
    batch = request.global_batch_sequences
    sizes = sorted({row.microbatch for row in tables.rows})
    for tp in sorted({kind.tp_degree for kind in tables.kinds}):
        for width in range(1, gpus // tp + 1):
            depth = gpus // (tp * width)
            if gpus % (tp * width) or depth > tables.num_blocks:
                continue
            for microbatch in sizes:
                if batch % (width * microbatch) == 0:
                    yield [tp * width] * depth, width, microbatch


def _candidates(
    request: Request,
    tables: Tables,
    stager: Stager,
    estimator: Estimator,
    nodes: tuple[Node, ...],
    sizes: list[int],
    width: int,
    microbatch: int,
    number: int,
) -> list[Candidate]:
    gpus = [worker for node in nodes for worker in node.workers]
    staged = stager.stages(gpus, sizes, width, microbatch)
    if staged is None:
        return []
    ends = min_max(tables, stager, staged, boundary_seconds(request, staged, microbatch))
    shapes = {Shape(tuple(rows[d] for rows in staged.rows), ends) for d in range(staged.width)}
    if not all(fits(estimator, shape, request.global_batch_sequences) for shape in shapes):
        return []
    found = candidate(estimator, staged, ends, microbatch, request.global_batch_sequences, number)
    return [] if found is None else [found]


def boundary_seconds(request: Request, staged: Staged, microbatch: int) -> list[float]:
    """Seconds of the slowest transfer over each boundary, one direction, its NIC shared by all that leave the node."""
    found = []
    for senders, receivers in itertools.pairwise(staged.stages):
        pairs = [
            (request.fleet.node_of(a[0]), request.fleet.node_of(b[0]), len(b))
            for a, b in zip(senders, receivers, strict=True)
        ]
        leaving = Counter[str]()
        for a, b, flows in pairs:
            leaving[a.name] += flows if a is not b else 0
        found.append(
            max(
                request.cost.boundary_s(
                    a.node_type, b.node_type, microbatch, same_node=a is b, flows=1 if a is b else leaving[a.name]
                )
                for a, b, _ in pairs
            )
        )
    return found


def min_max(tables: Tables, stager: Stager, staged: Staged, boundary_s: Sequence[float] = ()) -> tuple[int, ...]:
    """Ends of the stages: from an equal split, one block at a time from the slowest stage to the fastest, until the
    slowest grows or a split comes back. A stage takes its layers' time and, between two others, one transfer."""
    rows = stager.slowest(staged)
    tolls = [0.0, *boundary_s[1:], 0.0] if boundary_s else [0.0] * len(rows)
    split = list(equal_split(tables.num_blocks, len(rows)))
    best, best_s = tuple(split), max(_stage_seconds(tables, rows, split, tolls))
    seen = {best}
    while True:
        seconds = _stage_seconds(tables, rows, split, tolls)
        slow = max((s for s in range(len(rows)) if split[s] > 1), key=lambda s: (seconds[s], -s), default=None)
        fast = min((s for s in range(len(rows)) if s != slow), key=lambda s: (seconds[s], s), default=None)
        if slow is None or fast is None:
            break
        split[slow] -= 1
        split[fast] += 1
        now = max(_stage_seconds(tables, rows, split, tolls))
        if tuple(split) in seen or now > best_s * (1 + 1e-12):
            break
        seen.add(tuple(split))
        best, best_s = tuple(split), now
    return ends_of(best)


def ends_of(split: tuple[int, ...]) -> tuple[int, ...]:
    """Layer ends of a split of the blocks: the embedding before the first, the head after the last."""
    ends = [end + 1 for end in itertools.accumulate(split)]
    return (*ends[:-1], ends[-1] + 1)


def _stage_seconds(tables: Tables, rows: list[int], split: list[int], tolls: list[float]) -> list[float]:
    ends = ends_of(tuple(split))
    starts = (0, *ends[:-1])
    work = [float(tables.time_sums[r, b] - tables.time_sums[r, a]) for r, a, b in zip(rows, starts, ends, strict=True)]
    return [seconds + toll for seconds, toll in zip(work, tolls, strict=True)]


def fleets_up_to(fleet: Fleet, most: int = 200) -> Iterator[Fleet]:
    """Fleets with every number of nodes of each type up to the fleet's; numbers are thinned so that there are at most
    `most`.
    """
    by_type: dict[NodeType, list[Node]] = {}
    for node in fleet.nodes:
        by_type.setdefault(node.node_type, []).append(node)
    steps = [list(range(len(nodes) + 1)) for nodes in by_type.values()]
    while _product(steps) > most and max(map(len, steps)) > 3:
        widest = max(range(len(steps)), key=lambda i: (len(steps[i]), -i))
        steps[widest] = sorted({*steps[widest][::2], steps[widest][-1]})
    for counts in itertools.product(*steps):
        if sum(counts):
            chosen = [node for count, nodes in zip(counts, by_type.values(), strict=True) for node in nodes[:count]]
            yield Fleet(fleet.generation, tuple(chosen))


def _product(steps: list[list[int]]) -> int:
    total = 1
    for step in steps:
        total *= len(step)
    return total


def narrowed(request: Request, fleet: Fleet) -> Request:
    """The same request on fewer nodes; layer times are shared."""
    cost = request.cost
    smaller = CostModel.__new__(CostModel)
    smaller.__dict__.update({k: v for k, v in cost.__dict__.items() if k not in ("node_types", "_flows")})
    smaller.fleet = fleet
    return dataclasses.replace(request, fleet=fleet, cost=smaller)
