"""From drafts to plans: which GPUs of which nodes serve each stage."""

from collections.abc import Sequence, Set

from planner.plan import Pipeline, Plan, Stage
from planner.strategies.drafts import Draft, Shape
from planner.strategies.tables import Tables


class _Nodes:
    """Free GPUs of one resource's nodes. A tensor-parallel group never leaves its node."""

    def __init__(self, names: Sequence[str], num_gpus: int, taken: Set[str]):
        self._names = names
        self._free = [[g for g in range(num_gpus) if f"{name}/{g}" not in taken] for name in names]
        self._first = 0

    def take(self, degree: int, last: int | None) -> tuple[int, tuple[str, ...]] | None:
        """`degree` workers of one node, the node `last` if it has room, else the first that has."""
        while self._first < len(self._free) and not self._free[self._first]:
            self._first += 1
        order = [last] if last is not None and len(self._free[last]) >= degree else range(self._first, len(self._free))
        for node in order:
            free = self._free[node]
            if len(free) >= degree:
                taken, self._free[node] = free[:degree], free[degree:]
                return node, tuple(f"{self._names[node]}/{gpu}" for gpu in taken)
        return None


def place(
    tables: Tables, draft: Draft, model: str, batch: int, sequence_length: int, taken: Set[str] = frozenset()
) -> Plan | None:
    """The plan of a draft on GPUs that are not `taken`; None if the groups cannot be packed into nodes.

    Pipelines with larger groups go first, so that powers of two leave no hole; neighbouring stages share a node where
    they can.
    """
    nodes = [_Nodes(r.node_names, r.node_type.num_gpus, taken) for r in tables.resources]
    degrees = [max(_degree(tables, row) for row in shape.rows) for shape, _ in draft.pipelines]
    order = sorted(range(len(degrees)), key=lambda i: (-degrees[i], i))
    placed: dict[int, list[tuple[str, ...]]] = {}
    for i in order:
        workers = _place_pipeline(tables, draft.pipelines[i][0], nodes)
        if workers is None:
            return None
        placed[i] = workers
    sizes = [tables.rows[shape.rows[0]].microbatch for shape, _ in draft.pipelines]
    common = min(sizes, key=lambda b: (-sizes.count(b), b))
    pipelines = tuple(
        Pipeline(_stages(tables, shape, placed[i]), k, sizes[i]) for i, (shape, k) in enumerate(draft.pipelines)
    )
    return Plan(model, batch, common, sequence_length, pipelines)


def _degree(tables: Tables, row: int) -> int:
    return tables.kinds[tables.rows[row].kind].tp_degree


def _place_pipeline(tables: Tables, shape: Shape, nodes: list[_Nodes]) -> list[tuple[str, ...]] | None:
    by_stage: dict[int, tuple[str, ...]] = {}
    last: dict[int, int] = {}
    for stage in sorted(range(len(shape.rows)), key=lambda s: (-_degree(tables, shape.rows[s]), s)):
        resource = tables.kinds[tables.rows[shape.rows[stage]].kind].resource
        found = nodes[resource].take(_degree(tables, shape.rows[stage]), last.get(resource))
        if found is None:
            return None
        last[resource], by_stage[stage] = found
    return [by_stage[stage] for stage in range(len(shape.rows))]


def _stages(tables: Tables, shape: Shape, workers: list[tuple[str, ...]]) -> tuple[Stage, ...]:
    out = []
    for start, end, group in zip(shape.starts, shape.ends, workers):
        first = max(start - 1, 0)
        last = min(end - 1, tables.num_blocks)
        out.append(Stage(first, last - first, group))
    return tuple(out)
