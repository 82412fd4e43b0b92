"""Placement of drafts: which GPUs of which nodes serve each stage."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.drafts.draft import Draft, Shape
from planner.search.problem.tables import Tables

_Workers = tuple[str, ...]
"""Workers of one stage."""
_StageIndex = tuple[int, int]
"""Pipeline of a draft, and stage of the pipeline."""


class Nodes:
    """Free GPUs of the nodes of one resource. A tensor-parallel group never leaves its node."""

    def __init__(self, names: Sequence[str], num_gpus: int):
        self._names = names
        self._num_gpus = num_gpus
        self._free = [list(range(num_gpus)) for _ in names]
        # nodes by their number of free GPUs; the last of a list is taken first
        untouched = list(reversed(range(len(names))))
        self._by_free = {num_gpus: untouched}

    def close(self) -> None:
        """Take no more workers of the nodes that are partly taken."""
        untouched = self._by_free.get(self._num_gpus, [])
        self._by_free = {self._num_gpus: untouched}

    def take(
        self, degree: int, last: int | None, wanted: int
    ) -> tuple[int, tuple[str, ...]] | None:
        """Take `degree` workers of one node; None if no node has room.

        The node is `last` if it has room; else the fullest with room for all of `wanted` GPUs,
        which the pipeline still needs of this resource; else the emptiest, so that few nodes are
        shared.
        """
        node = last
        if last is None or len(self._free[last]) < degree:
            node = self._next(degree, wanted)
        if node is None:
            return None

        free = self._free[node]
        taken = free[:degree]
        left = free[degree:]
        self._free[node] = left
        self._by_free[len(free)].remove(node)
        self._by_free.setdefault(len(left), []).append(node)
        name = self._names[node]
        return node, tuple(f"{name}/{gpu}" for gpu in taken)

    def _next(self, degree: int, wanted: int) -> int | None:
        """Return the node on which a pipeline continues; None if none has `degree` free GPUs."""
        sizes = [size for size, nodes in sorted(self._by_free.items()) if nodes and size >= degree]
        if not sizes:
            return None

        # a node shared with another pipeline comes first here if it came last there, so that their
        # transfers do not meet
        rest = wanted % self._num_gpus
        if rest in sizes:
            return self._by_free[rest][-1]

        for size in sizes:
            if size >= wanted:
                return self._by_free[size][-1]
        return self._by_free[sizes[-1]][-1]


def place(tables: Tables, draft: Draft) -> Plan | None:
    """Return the plan of a draft, each pipeline on nodes of its own as far as possible.

    None if the groups cannot be packed into nodes. Pipelines with larger groups go first, so that
    powers of two leave no hole; neighbouring stages share a node if possible.
    """
    shapes = draft.shapes
    by_pipeline = []
    for pipeline in _largest_first(tables, shapes):
        for stage in range(len(shapes[pipeline].rows)):
            by_pipeline.append((pipeline, stage))

    groups = _fill(tables, shapes, by_pipeline)
    if groups is None:
        # small groups of one pipeline may have left holes too small for the next one's large ones
        by_degree = sorted(by_pipeline)
        by_degree.sort(key=lambda at: _tp_degree(tables, shapes, at), reverse=True)
        groups = _fill(tables, shapes, by_degree)
    return None if groups is None else plan_on(tables, draft, groups)


def _tp_degree(tables: Tables, shapes: Sequence[Shape], at: _StageIndex) -> int:
    pipeline, stage = at
    row = shapes[pipeline].rows[stage]
    return tables.kind(row).tp_degree


def place_ends_first(tables: Tables, draft: Draft, parts: int, *, by_stage: bool) -> Plan | None:
    """Return the plan of a draft whose pipelines' first and last stages share nodes.

    They hold the same tensor if embeddings are tied: the fewer nodes its gradient crosses, the
    sooner it is summed. The draft is divided into `parts` parts. In each part the ends come first,
    then the other stages: stage by stage, or pipeline by pipeline.
    """
    shapes = draft.shapes
    orders = []
    together: set[_StageIndex] = set()
    for part in split_pipelines(len(shapes), parts):
        first_stages = list[_StageIndex]()
        last_stages = list[_StageIndex]()
        inner = list[_StageIndex]()
        for pipeline in part:
            last = len(shapes[pipeline].rows) - 1
            first_stages.append((pipeline, 0))
            if last > 0:
                last_stages.append((pipeline, last))
            for stage in range(1, last):
                inner.append((pipeline, stage))

        together.update(first_stages)
        together.update(last_stages)
        if by_stage:
            inner.sort(key=_by_stage)
            together.update(inner)
        orders.append([*first_stages, *last_stages, *inner])

    groups = _fill_parts(tables, shapes, orders, together)
    return None if groups is None else plan_on(tables, draft, groups)


def _by_stage(at: _StageIndex) -> tuple[int, int]:
    """Sort key: the first stages of all pipelines come first, then the second ones."""
    pipeline, stage = at
    return stage, pipeline


def _largest_first(tables: Tables, shapes: Sequence[Shape]) -> list[int]:
    """Return the pipelines in the order of placement: those with larger groups, then more GPUs."""
    sizes = []
    for pipeline, shape in enumerate(shapes):
        degrees = [tables.kind(row).tp_degree for row in shape.rows]
        sizes.append((-max(degrees), -sum(degrees), pipeline))
    return [pipeline for *_, pipeline in sorted(sizes)]


def place_by_stage(tables: Tables, draft: Draft, parts: int) -> Plan | None:
    """Return the plan of a draft divided into `parts` parts of equally deep pipelines.

    Parts are placed one after the other. The same stage of all pipelines of a part lies side by
    side.
    """
    shapes = draft.shapes
    orders = []
    together: set[_StageIndex] = set()
    for part in split_pipelines(len(shapes), parts):
        depth = len(shapes[part[0]].rows)
        order = []
        for stage in range(depth):
            for pipeline in part:
                order.append((pipeline, stage))
        orders.append(order)
        together.update(order)

    groups = _fill_parts(tables, shapes, orders, together)
    return None if groups is None else plan_on(tables, draft, groups)


def _fill_parts(
    tables: Tables,
    shapes: Sequence[Shape],
    orders: Sequence[Sequence[_StageIndex]],
    together: Collection[_StageIndex],
) -> list[list[_Workers]] | None:
    """Return the workers of `_fill`, each part on nodes of its own if they are enough."""
    order = list(itertools.chain.from_iterable(orders))
    begins = {part[0] for part in orders[1:]}
    if begins:
        groups = _fill(tables, shapes, order, together=together, anew=begins)
        if groups is not None:
            return groups
    return _fill(tables, shapes, order, together=together)


def _fill(
    tables: Tables,
    shapes: Sequence[Shape],
    order: Iterable[_StageIndex],
    *,
    together: Collection[_StageIndex] = frozenset(),
    anew: Collection[_StageIndex] = frozenset(),
) -> list[list[_Workers]] | None:
    """Return the workers of each stage of each pipeline; None if nodes have no room.

    order: the stages in the order of placement. together: stages that fill one node of their type
    after the other; with any other stage a pipeline continues on the node of its latest one of that
    type. anew: stages from which on no node is used that was used before.
    """
    nodes = []
    for resource in tables.resources:
        nodes.append(Nodes(resource.node_names, resource.node_type.num_gpus))
    wanted = _gpus_wanted(tables, shapes)
    latest = dict[tuple[int | None, int], int]()  # by pipeline (None: together) and resource
    nobody: _Workers = ()
    groups = [[nobody] * len(shape.rows) for shape in shapes]

    for pipeline, stage in order:
        at = (pipeline, stage)
        if at in anew:
            latest.clear()
            for each in nodes:
                each.close()

        kind = tables.kind(shapes[pipeline].rows[stage])
        own = (pipeline, kind.resource)
        key: tuple[int | None, int] = own
        needed = wanted[own]
        if at in together:
            key = (None, kind.resource)
            needed = 0  # the fullest node with room: stages of other pipelines follow on it

        last = latest.get(key)
        found = nodes[kind.resource].take(kind.tp_degree, last, needed)
        if found is None:
            return None
        node, workers = found
        latest[key] = node
        groups[pipeline][stage] = workers
        wanted[own] -= kind.tp_degree
    return groups


def _gpus_wanted(tables: Tables, shapes: Sequence[Shape]) -> Counter[tuple[int, int]]:
    """Return the GPUs that each pipeline needs of each resource."""
    wanted = Counter[tuple[int, int]]()
    for pipeline, shape in enumerate(shapes):
        for row in shape.rows:
            kind = tables.kind(row)
            wanted[pipeline, kind.resource] += kind.tp_degree
    return wanted


def split_pipelines(number: int, parts: int) -> list[range]:
    """Divide `number` pipelines into parts as equal as possible."""
    found = []
    begin = 0
    for part in range(1, parts + 1):
        end = number * part // parts
        found.append(range(begin, end))
        begin = end
    return found


def plan_on(tables: Tables, draft: Draft, groups: Sequence[Sequence[_Workers]]) -> Plan:
    """Return the plan of a draft on the groups of each pipeline."""
    pipelines = []
    drafted = zip(draft.pipelines, groups, strict=True)
    for (shape, num_microbatches), workers in drafted:
        stages = stages_on(tables, shape, workers)
        size = tables.rows[shape.rows[0]].microbatch
        pipelines.append(Pipeline(stages, num_microbatches, size))

    # a plan names the size that most pipelines have, and each pipeline that has another one
    sizes = [pipeline.microbatch_sequences for pipeline in pipelines]
    common = min(sizes, key=lambda size: (-sizes.count(size), size))
    return Plan(tables.model, tables.batch, common, tables.sequence_length, tuple(pipelines))


def stages_on(tables: Tables, shape: Shape, workers: Sequence[_Workers]) -> tuple[Stage, ...]:
    """Return the stages of a shape on these groups."""
    stages = []
    for (row, start, end), group in zip(shape.stages, workers):
        # a plan counts blocks: layer 0 is the embedding, and the layer after the blocks the head
        first = max(start - 1, 0)
        last = min(end - 1, tables.num_blocks)
        uneven = tables.kind(row).group
        shares = uneven.shares if uneven else ()
        stages.append(Stage(first, last - first, group, tp_shares=shares))
    return tuple(stages)
