"""Programs of the strategy `hap`: how the nodes of each type are divided into groups that hold the whole model."""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.cluster import NodeType
from planner.cost.model import CostModel
from planner.search.problem import Request
from planner.search.tables import Tables


@dataclass(frozen=True, slots=True)
class Part:
    """`groups` equal groups of one table row: one kind of tensor-parallel group at one microbatch size."""

    row: int
    groups: int


Program = tuple[Part, ...]
# One way to divide the nodes of a type into groups: (kind, groups), largest degree first.
Way = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Space:
    """What is searched: `ways[r]` of each resource, and the rows of each kind that hold the whole model."""

    tables: Tables
    cost: CostModel
    batch: int
    ways: tuple[tuple[Way, ...], ...]
    rows: dict[int, tuple[int, ...]]

    def seconds(self, row: int) -> float:
        """Of one microbatch on one group."""
        return float(self.tables.time_sums[row, -1]) + self.tables.stage_overhead_s

    def sequence_s(self, row: int) -> float:
        """Seconds a sequence on one group."""
        return self.seconds(row) / self.tables.rows[row].microbatch


def spaces(request: Request, tables: Tables) -> Iterator[Space]:
    """One space; several where the whole plan must have one TP degree or one microbatch size."""
    rows = [i for i in range(len(tables.rows)) if _holds_model(tables, i)]
    degrees = sorted({degree_of(tables, row) for row in rows})
    sizes = sorted({tables.rows[row].microbatch for row in rows})
    for allowed in [degrees] if request.mixed_tp else [[d] for d in degrees]:
        for some in [sizes] if request.mixed_microbatch else [[b] for b in sizes]:
            chosen = [r for r in rows if degree_of(tables, r) in allowed and tables.rows[r].microbatch in some]
            by_kind: dict[int, list[int]] = {}
            for row in chosen:
                by_kind.setdefault(tables.rows[row].kind, []).append(row)
            ways = tuple(tuple(_ways(tables, r, by_kind)) for r in range(len(tables.resources)))
            yield Space(
                tables, request.cost, request.global_batch_sequences, ways, {k: tuple(v) for k, v in by_kind.items()}
            )


def _holds_model(tables: Tables, row: int) -> bool:
    return tables.memory_bytes(row, 0, tables.num_layers, 1) <= tables.rows[row].limit_bytes


def degree_of(tables: Tables, row: int) -> int:
    """The TP degree of a table row."""
    return tables.kinds[tables.rows[row].kind].tp_degree


def _ways(tables: Tables, resource: int, kinds: dict[int, list[int]]) -> Iterator[Way]:
    """Groups of one degree; where that leaves GPUs of a node, also with smaller groups of these. On all nodes, half of
    them, and so on: a device whose ratio is zero takes part in no sum of gradients."""
    nodes = len(tables.resources[resource].node_names)
    mine = sorted((k for k in kinds if tables.kinds[k].resource == resource), key=lambda k: -tables.kinds[k].tp_degree)
    for kind in mine:
        node, rest = [], tables.resources[resource].node_type.num_gpus
        for smaller in mine[mine.index(kind) :]:
            count, rest = divmod(rest, tables.kinds[smaller].tp_degree)
            node += [(smaller, count)] if count else []
        for shift in range(nodes.bit_length()):
            for way in {tuple(node[:1]): None, tuple(node): None}:
                yield tuple((k, count * (nodes >> shift)) for k, count in way)


def resource_of(space: Space, row: int) -> int:
    """The index of a table row's node type."""
    return space.tables.kinds[space.tables.rows[row].kind].resource


def degrees_of(space: Space, program: Program) -> tuple[int, int]:
    """The least and the largest TP degree."""
    degrees = [degree_of(space.tables, part.row) for part in program]
    return min(degrees), max(degrees)


def sync_s(space: Space, program: Program) -> float:
    """Seconds of gradient sync and update: a ring over all groups for each of as many slices as the largest TP degree
    has, all at once over the NICs; a worker of a smaller degree takes part in several, as fast as its own links are.
    """
    tables, update = space.tables, 0.0
    most = degrees_of(space, program)[1]
    members: list[tuple[str, NodeType]] = []
    taken, flows, degrees = [0] * len(tables.resources), dict[str, float](), dict[NodeType, int]()
    for part in program:
        kind = tables.kinds[tables.rows[part.row].kind]
        resource = tables.resources[kind.resource]
        gpus = range(taken[kind.resource], taken[kind.resource] + part.groups * kind.tp_degree, kind.tp_degree)
        taken[kind.resource] = gpus.stop
        # Nodes fill up one after the other; smaller groups in what larger ones left of each count as if beyond them.
        nodes = [i // resource.node_type.num_gpus % len(resource.node_names) for i in gpus]
        members += [(resource.node_names[i], resource.node_type) for i in nodes]
        flows |= {resource.node_names[i]: float(kind.tp_degree) for i in nodes}
        degrees[resource.node_type] = min(degrees.get(resource.node_type, most), kind.tp_degree)
        costs = space.cost.layer_costs(resource.node_type, kind.tp_degree, tables.rows[part.row].microbatch)
        update = max(update, float(costs.update_s.sum()))
    whole = tables.stage_sync_bytes(program[0].row, 0, tables.num_layers) * degree_of(tables, program[0].row)
    members.sort(key=lambda member: member[0])
    ring = space.cost.sync_s(members, whole / most, flows=flows)
    for node_type, degree in degrees.items():
        alike = [(name, node_type) for name, _ in members]
        ring = max(ring, space.cost.sync_s(alike, whole / most, flows=degree) * (most // degree))
    return ring + update + space.cost.parameters.step_overhead_s
