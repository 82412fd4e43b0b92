"""Placement of drafts: which GPUs of which nodes serve each stage."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from planner.plan import Pipeline, Plan, Stage
from planner.search.draft import Draft, Shape
from planner.search.tables import Tables


class Nodes:
    """Free GPUs of the nodes of one resource. A tensor-parallel group never leaves its node."""

    def __init__(self, names: Sequence[str], num_gpus: int):
        self._names = names
        self._num_gpus = num_gpus
        self._free = [list(range(num_gpus)) for _ in names]
        self._by_free = {num_gpus: list(range(len(names) - 1, -1, -1))}

    def close(self) -> None:
        """Take no more workers of the nodes that are partly taken."""
        self._by_free = {self._num_gpus: self._by_free.get(self._num_gpus, [])}

    def take(
        self, degree: int, last: int | None, wanted: int
    ) -> tuple[int, tuple[str, ...]] | None:
        """Take `degree` workers of one node; None if no node has room.

        The node is `last` if it has room; else the fullest with room for all of `wanted` GPUs,
        which the pipeline still needs of this resource; else the emptiest, so that few nodes are
        shared.
        """
        node = (
            last
            if last is not None and len(self._free[last]) >= degree
            else self._next(degree, wanted)
        )
        if node is None:
            return None
        free = self._free[node]
        self._by_free[len(free)].remove(node)
        taken, self._free[node] = free[:degree], free[degree:]
        self._by_free.setdefault(len(free) - degree, []).append(node)
        return node, tuple(f"{self._names[node]}/{gpu}" for gpu in taken)

    def _next(self, degree: int, wanted: int) -> int | None:
        sizes = sorted(size for size, nodes in self._by_free.items() if nodes and size >= degree)
        if not sizes:
            return None
        rest = wanted % self._num_gpus
        # a node shared with another pipeline comes first here where it came last there, so that
        # their transfers do not meet
        size = (
            rest if rest in sizes else next((size for size in sizes if size >= wanted), sizes[-1])
        )
        return self._by_free[size][-1]


def place(tables: Tables, draft: Draft) -> Plan | None:
    """Return the plan of a draft, each pipeline on nodes of its own as far as possible.

    None if the groups cannot be packed into nodes. Pipelines with larger groups go first, so that
    powers of two leave no hole; neighbouring stages share a node if possible.
    """
    shapes = [shape for shape, _ in draft.pipelines]
    degrees = _degrees(tables, shapes)
    in_order = [(i, s) for i in _largest_first(degrees) for s in range(len(degrees[i]))]
    of_all = sorted(in_order, key=lambda at: (-degrees[at[0]][at[1]], *at))
    placed = _filled(tables, shapes, in_order) or _filled(tables, shapes, of_all)
    return None if placed is None else plan_on(tables, draft, placed)


def place_ends_first(tables: Tables, draft: Draft, parts: int, *, by_stage: bool) -> Plan | None:
    """Return the plan of a draft whose pipelines' first and last stages share nodes.

    They hold the same tensor if embeddings are tied: the fewer nodes its gradient crosses, the
    sooner it is summed. The draft is divided into `parts` parts. In each part the ends come first,
    then the other stages: stage by stage, or pipeline by pipeline.
    """
    shapes = [shape for shape, _ in draft.pipelines]
    orders: list[list[tuple[int, int]]] = []
    together: set[tuple[int, int]] = set()
    for part in parted(len(shapes), parts):
        last = {i: len(shapes[i].rows) - 1 for i in part}
        ends = [*((i, 0) for i in part), *((i, last[i]) for i in part if last[i])]
        inner = [(i, s) for i in part for s in range(1, last[i])]
        together.update(ends)
        if by_stage:
            inner.sort(key=lambda at: (at[1], at[0]))
            together.update(inner)
        orders.append([*ends, *inner])
    placed = _parts_filled(tables, shapes, orders, together)
    return None if placed is None else plan_on(tables, draft, placed)


def _degrees(tables: Tables, shapes: Sequence[Shape]) -> list[list[int]]:
    """Return the TP degree of each stage of each pipeline."""
    return [[tables.kind(row).tp_degree for row in shape.rows] for shape in shapes]


def _largest_first(degrees: Sequence[Sequence[int]]) -> list[int]:
    """Return the pipelines in the order of placement: those with larger groups, then more GPUs."""
    return sorted(range(len(degrees)), key=lambda i: (-max(degrees[i]), -sum(degrees[i]), i))


def place_by_stage(tables: Tables, draft: Draft, parts: int) -> Plan | None:
    """Return the plan of a draft divided into `parts` parts of equally deep pipelines.

    Parts are placed one after the other. The same stage of all pipelines of a part lies side by
    side.
    """
    shapes = [shape for shape, _ in draft.pipelines]
    several = parted(len(shapes), parts)
    orders: list[list[tuple[int, int]]] = []
    for part in several:
        stages = range(len(shapes[part[0]].rows))
        orders.append([(i, s) for s, i in itertools.product(stages, part)])
    every = frozenset(itertools.chain.from_iterable(orders))
    placed = _parts_filled(tables, shapes, orders, every)
    return None if placed is None else plan_on(tables, draft, placed)


def _parts_filled(
    tables: Tables,
    shapes: Sequence[Shape],
    orders: Sequence[Sequence[tuple[int, int]]],
    together: Collection[tuple[int, int]],
) -> list[list[tuple[str, ...]]] | None:
    """Return the workers of `_filled`, each part on nodes of its own if they are enough."""
    order = [at for part in orders for at in part]
    begins = {part[0] for part in orders[1:]}
    apart = _filled(tables, shapes, order, together=together, anew=begins) if begins else None
    return apart or _filled(tables, shapes, order, together=together)


def _filled(
    tables: Tables,
    shapes: Sequence[Shape],
    order: Iterable[tuple[int, int]],
    *,
    together: Collection[tuple[int, int]] = frozenset(),
    anew: Collection[tuple[int, int]] = frozenset(),
) -> list[list[tuple[str, ...]]] | None:
    """Return the workers of each stage of each pipeline; None if nodes have no room.

    order: (pipeline, stage) in the order of placement. together: stages that fill one node of their
    type after the other; with any other stage a pipeline continues on the node of its latest one of
    that type. anew: stages from which on no node is used that was used before.
    """
    nodes = [Nodes(r.node_names, r.node_type.num_gpus) for r in tables.resources]
    last = dict[tuple[int, int], int]()
    wanted = Counter[tuple[int, int]]()
    for i, shape in enumerate(shapes):
        for kind in map(tables.kind, shape.rows):
            wanted[i, kind.resource] += kind.tp_degree
    placed: list[list[tuple[str, ...]]] = [[()] * len(shape.rows) for shape in shapes]
    for i, s in order:
        if (i, s) in anew:
            last.clear()
            for each in nodes:
                each.close()
        kind = tables.kind(shapes[i].rows[s])
        resource = kind.resource
        degree = kind.tp_degree
        of_all = (i, s) in together
        key = (-1 if of_all else i, resource)
        found = nodes[resource].take(degree, last.get(key), 0 if of_all else wanted[key])
        if found is None:
            return None
        wanted[i, resource] -= degree
        last[key], placed[i][s] = found
    return placed


def parted(number: int, parts: int) -> list[range]:
    """Divide `number` pipelines into parts as equal as possible."""
    ends = [number * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def plan_on(tables: Tables, draft: Draft, groups: Sequence[Sequence[tuple[str, ...]]]) -> Plan:
    """Return the plan of a draft on the groups of each pipeline."""
    sizes = [tables.rows[shape.rows[0]].microbatch for shape, _ in draft.pipelines]
    common = min(sizes, key=lambda b: (-sizes.count(b), b))
    drafted = zip(draft.pipelines, groups, sizes, strict=True)
    pipelines = tuple(
        Pipeline(stages_on(tables, shape, mine), k, size) for (shape, k), mine, size in drafted
    )
    return Plan(tables.model, tables.batch, common, tables.sequence_length, pipelines)


def stages_on(
    tables: Tables, shape: Shape, workers: Sequence[tuple[str, ...]]
) -> tuple[Stage, ...]:
    """Return the stages of a shape on these groups."""
    out = []
    for row, start, end, group in zip(shape.rows, shape.starts, shape.ends, workers):
        first = max(start - 1, 0)
        of = tables.kind(row).group
        last = min(end - 1, tables.num_blocks)
        out.append(Stage(first, last - first, group, tp_shares=of.shares if of else ()))
    return tuple(out)
