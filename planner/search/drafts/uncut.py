"""Pipelines before and after their layers are cut.

Here each pipeline has its stages in order, one table row a stage. A stage has no layers yet, and no
workers.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.search.drafts.closed_form import Families
from planner.search.drafts.draft import Shape
from planner.search.drafts.orders import Orders, StageRows, neighbours, supply_of
from planner.search.problem import limits
from planner.search.problem.tables import Tables

KnownOrders = dict[tuple[tuple[int, ...], int], list[StageRows]]
"""Best orders by supply (`supply_of`) and sequences of a microbatch."""


@dataclass(frozen=True)
class UncutPipelines:
    """Pipelines before they are cut.

    number: pipelines. pipelines: for each kind of pipeline, the rows of its stages and how many
    there are. sequences: sequences that the pipelines share.
    """

    number: int
    pipelines: tuple[tuple[StageRows, int], ...]
    sequences: float

    @property
    def sequences_each(self) -> float:
        """Sequences of one pipeline, on average."""
        return self.sequences / self.number

    @property
    def depth(self) -> int:
        """Stages of the deepest pipeline."""
        return max(len(rows) for rows, _ in self.pipelines)

    @property
    def rows_of_equal(self) -> StageRows:
        """Rows of the stages, if all pipelines are equal."""
        ((rows, _),) = self.pipelines
        return rows


@dataclass(frozen=True)
class CutPipelines:
    """Pipelines after they are cut.

    shapes: shape of each kind of pipeline. seconds: estimate of the steady state and the sync after
    it.
    """

    seconds: float
    uncut: UncutPipelines
    shapes: tuple[Shape, ...]

    def shape_of_each(self) -> list[Shape]:
        """Return the shape of each pipeline."""
        shapes = list[Shape]()
        kinds = zip(self.shapes, self.uncut.pipelines, strict=True)
        for shape, (_, number) in kinds:
            shapes += [shape] * number
        return shapes

    def resources(self, tables: Tables) -> frozenset[int]:
        """Return the resources that the pipelines use."""
        used = set[int]()
        for shape in self.shapes:
            for row in shape.rows:
                used.add(tables.kind(row).resource)
        return frozenset(used)


def size_class(number: int) -> int:
    """Return a key of a number of pipelines, equal for numbers between two powers of two."""
    return number.bit_length()


def uncut_family(
    tables: Tables, some: Families, family: int, sequences: float, *, share_all: bool
) -> Iterator[UncutPipelines]:
    """Yield the pipelines of a family, once for each of several orders of its node types.

    Stages of one node type follow each other. Each order also comes with one stage of the first
    type at the end, where the head is.

    family: index of the family. share_all: groups that cannot be shared evenly are used too.
    """
    number = int(some.number[family])
    used = np.flatnonzero(some.rows[family] >= 0).tolist()
    rows = some.rows[family, used].tolist()
    groups = some.groups[family, used].tolist()

    speeds = list[float]()
    if share_all:
        model_s = tables.sums.time_sums[rows, -1].tolist()
        speeds = [1.0 / seconds for seconds in model_s]
    # pipelines of one share are equal
    shares = Counter(share_groups(number, groups, speeds))
    depths = [sum(share) for share in shares]
    if min(depths) == 0 or max(depths) > tables.deepest:
        return

    orders = itertools.permutations(range(len(used)))
    for order in itertools.islice(orders, limits.SHORTLIST):
        straight = list[tuple[StageRows, int]]()
        turned = list[tuple[StageRows, int]]()
        for share, num_pipelines in shares.items():
            stages = _stages_in_order(rows, share, order)
            straight.append((stages, num_pipelines))
            first_at_end = (*stages[1:], stages[0])
            turned.append((first_at_end, num_pipelines))

        yield UncutPipelines(number, tuple(straight), sequences)
        if len(order) > 1:
            yield UncutPipelines(number, tuple(turned), sequences)


def _stages_in_order(rows: Sequence[int], share: Sequence[int], order: Sequence[int]) -> StageRows:
    """Return the rows of a pipeline's stages: `share` groups of each node type, in this order."""
    stages = list[int]()
    for node_type in order:
        stages += [rows[node_type]] * share[node_type]
    return tuple(stages)


def share_groups(
    number: int, groups: Sequence[int], speeds: Sequence[float]
) -> list[tuple[int, ...]]:
    """Return the groups of each node type for each of `number` pipelines.

    Even shares come first. If speeds are given, the groups left over go to the slowest pipeline so
    far, the fastest groups first; otherwise to none.

    groups: groups of each node type in the fleet. speeds: speed of a group of each type, or empty.
    """
    even = [count // number for count in groups]
    shares = [list(even) for _ in range(number)]
    if speeds:
        speed = 0.0
        for num_groups, speed_of_group in zip(even, speeds, strict=True):
            speed += num_groups * speed_of_group
        # in the order of the pipelines, since their speeds are equal: a sorted list is a heap
        slowest = [(speed, pipeline) for pipeline in range(number)]

        node_types = range(len(groups))
        for node_type in sorted(node_types, key=lambda node_type: -speeds[node_type]):
            num_left = groups[node_type] % number
            for _ in range(num_left):
                speed, pipeline = heapq.heappop(slowest)
                shares[pipeline][node_type] += 1
                heapq.heappush(slowest, (speed + speeds[node_type], pipeline))
    return [tuple(share) for share in shares]


def uncut_in_best_orders(
    tables: Tables, numbers: Iterable[int], usable: Collection[int], known: KnownOrders
) -> Iterator[UncutPipelines]:
    """Yield equal pipelines with the best orders of stages, of each number and microbatch.

    known: cache over these tables.
    """
    spent = 0
    for number, size in itertools.product(numbers, tables.sizes):
        if number * size > tables.batch or tables.batch % size:
            continue

        supply = supply_of(tables, number, usable)
        orders = Orders(tables, supply, size)
        spent += orders.work
        if spent > limits.ORDERED:
            return

        if (supply, size) not in known:
            known[supply, size] = list(orders.found())
        for rows in known[supply, size]:
            yield UncutPipelines(number, ((rows, number),), tables.batch)


def uncut_neighbours(
    tables: Tables, uncut: UncutPipelines, usable: Collection[int]
) -> Iterator[UncutPipelines]:
    """Yield equal pipelines that differ from these in one stage, or in the places of two."""
    supply = supply_of(tables, uncut.number, usable)
    for rows in neighbours(tables, uncut.rows_of_equal, supply):
        yield replace(uncut, pipelines=((rows, uncut.number),))
