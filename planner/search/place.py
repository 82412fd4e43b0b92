"""From drafts to plans: which GPUs of which nodes serve each stage."""

import itertools
from collections.abc import Iterable, Sequence, Set

from planner.plan import Pipeline, Plan, Stage
from planner.search.draft import Draft, Shape
from planner.search.tables import Tables


class Nodes:
    """Free GPUs of one resource's nodes. A tensor-parallel group never leaves its node."""

    def __init__(self, names: Sequence[str], num_gpus: int, taken: Set[str]):
        self._names, self._num_gpus = names, num_gpus
        self._free = [[g for g in range(num_gpus) if f"{name}/{g}" not in taken] for name in names]
        self._by_free: dict[int, list[int]] = {}
        for node in range(len(names) - 1, -1, -1):
            self._by_free.setdefault(len(self._free[node]), []).append(node)

    def take(self, degree: int, last: int | None, wanted: int) -> tuple[int, tuple[str, ...]] | None:
        """`degree` workers of one node, the node `last` if it has room; else the fullest that has room for all of `wanted` GPUs,
        which the pipeline still asks of this resource; else the emptiest, so that few nodes are shared.
        """
        node = last if last is not None and len(self._free[last]) >= degree else self._next(degree, wanted)
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
        # a node shared with another pipeline comes first here where it came last there, so that their transfers do not meet
        size = rest if rest in sizes else next((size for size in sizes if size >= wanted), sizes[-1])
        return self._by_free[size][-1]


def place(
    tables: Tables, draft: Draft, model: str, batch: int, sequence_length: int, taken: Set[str] = frozenset()
) -> Plan | None:
    """The plan of a draft on GPUs that are not `taken`; None if the groups cannot be packed into nodes.

    Pipelines with larger groups go first, so that powers of two leave no hole; neighbouring stages share a node where
    they can.
    """
    placed = (
        _by_pipeline(tables, draft, taken, in_order=True)
        or _by_pipeline(tables, draft, taken, in_order=False)
        or _by_degree(tables, draft, taken)
    )
    return None if placed is None else _plan(tables, draft, placed, model, batch, sequence_length)


def place_by_stage(
    tables: Tables, draft: Draft, parts: int, model: str, batch: int, sequence_length: int
) -> Plan | None:
    """The plan of a draft divided into so many parts of equally deep pipelines, one after the other: the same stage of all pipelines of a
    part lies side by side."""
    shapes = [shape for shape, _ in draft.pipelines]
    several = parted(len(shapes), parts)
    order = [(i, s) for part in several for s, i in itertools.product(range(len(shapes[part[0]].rows)), part)]
    placed = _one_after_another(tables, shapes, order)
    return None if placed is None else _plan(tables, draft, placed, model, batch, sequence_length)


def place_by_copies(
    tables: Tables, draft: Draft, owners: Sequence[int], model: str, batch: int, sequence_length: int
) -> Plan | None:
    """The plan of a draft in which pipelines of one owner are equal: their same stages lie side by side, first stages of all pipelines
    together. The largest groups come first, so that powers of two leave no hole."""
    shapes = [shape for shape, _ in draft.pipelines]
    stages = [(i, s) for i, shape in enumerate(shapes) for s in range(len(shape.rows))]
    order = sorted(
        stages, key=lambda at: (-_degree(tables, shapes[at[0]].rows[at[1]]), at[1] > 0, owners[at[0]], *at[::-1])
    )
    placed = _one_after_another(tables, shapes, order)
    return None if placed is None else _plan(tables, draft, placed, model, batch, sequence_length)


def _one_after_another(
    tables: Tables, shapes: Sequence[Shape], order: Iterable[tuple[int, int]]
) -> dict[int, list[tuple[str, ...]]] | None:
    """Workers of each pipeline, whose stages (pipeline, stage) fill one node of their type after the other."""
    nodes, last = _free_nodes(tables, frozenset()), dict[int, int]()
    placed: dict[int, list[tuple[str, ...]]] = {i: [()] * len(shape.rows) for i, shape in enumerate(shapes)}
    for i, s in order:
        row = shapes[i].rows[s]
        resource = _resource(tables, row)
        found = nodes[resource].take(_degree(tables, row), last.get(resource), 0)
        if found is None:
            return None
        last[resource], placed[i][s] = found
    return placed


def parted(number: int, parts: int) -> list[range]:
    """So many pipelines in parts as equal as can be."""
    ends = [number * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def _plan(
    tables: Tables, draft: Draft, placed: dict[int, list[tuple[str, ...]]], model: str, batch: int, sequence_length: int
) -> Plan:
    sizes = [tables.rows[shape.rows[0]].microbatch for shape, _ in draft.pipelines]
    common = min(sizes, key=lambda b: (-sizes.count(b), b))
    pipelines = tuple(
        Pipeline(stages_on(tables, shape, placed[i]), k, sizes[i]) for i, (shape, k) in enumerate(draft.pipelines)
    )
    return Plan(model, batch, common, sequence_length, pipelines)


def _degree(tables: Tables, row: int) -> int:
    return tables.kinds[tables.rows[row].kind].tp_degree


def _free_nodes(tables: Tables, taken: Set[str]) -> list[Nodes]:
    return [Nodes(r.node_names, r.node_type.num_gpus, taken) for r in tables.resources]


def _by_pipeline(
    tables: Tables, draft: Draft, taken: Set[str], *, in_order: bool
) -> dict[int, list[tuple[str, ...]]] | None:
    """Workers of each pipeline, one pipeline after the other; those with the largest groups and the most GPUs first. in_order: stages
    in their order, so that neighbours share a node; else the largest groups first."""
    nodes = _free_nodes(tables, taken)
    degrees = [[_degree(tables, row) for row in shape.rows] for shape, _ in draft.pipelines]
    placed: dict[int, list[tuple[str, ...]]] = {}
    for i in sorted(range(len(degrees)), key=lambda i: (-max(degrees[i]), -sum(degrees[i]), i)):
        workers = _place_pipeline(tables, draft.pipelines[i][0], nodes, in_order)
        if workers is None:
            return None
        placed[i] = workers
    return placed


def _by_degree(tables: Tables, draft: Draft, taken: Set[str]) -> dict[int, list[tuple[str, ...]]] | None:
    """All groups of all pipelines, the largest first: where degrees are powers of two this leaves no hole."""
    nodes = _free_nodes(tables, taken)
    placed: dict[int, list[tuple[str, ...]]] = {i: [()] * len(s.rows) for i, (s, _) in enumerate(draft.pipelines)}
    stages = [
        (-_degree(tables, row), i, s, row)
        for i, (shape, _) in enumerate(draft.pipelines)
        for s, row in enumerate(shape.rows)
    ]
    last: dict[tuple[int, int], int] = {}
    for degree, i, s, row in sorted(stages):
        resource = _resource(tables, row)
        found = nodes[resource].take(-degree, last.get((i, resource)), -degree)
        if found is None:
            return None
        last[i, resource], placed[i][s] = found
    return placed


def _resource(tables: Tables, row: int) -> int:
    return tables.kinds[tables.rows[row].kind].resource


def _place_pipeline(tables: Tables, shape: Shape, nodes: list[Nodes], in_order: bool) -> list[tuple[str, ...]] | None:
    by_stage: dict[int, tuple[str, ...]] = {}
    last: dict[int, int] = {}
    wanted: dict[int, int] = {}
    for row in shape.rows:
        wanted[_resource(tables, row)] = wanted.get(_resource(tables, row), 0) + _degree(tables, row)
    for stage in sorted(range(len(shape.rows)), key=lambda s: (0 if in_order else -_degree(tables, shape.rows[s]), s)):
        resource, degree = _resource(tables, shape.rows[stage]), _degree(tables, shape.rows[stage])
        found = nodes[resource].take(degree, last.get(resource), wanted[resource])
        if found is None:
            return None
        wanted[resource] -= degree
        last[resource], by_stage[stage] = found
    return [by_stage[stage] for stage in range(len(shape.rows))]


def stages_on(tables: Tables, shape: Shape, workers: Sequence[tuple[str, ...]]) -> tuple[Stage, ...]:
    """The stages of a shape on these groups."""
    out = []
    for start, end, group in zip(shape.starts, shape.ends, workers):
        first = max(start - 1, 0)
        last = min(end - 1, tables.num_blocks)
        out.append(Stage(first, last - first, group))
    return tuple(out)
