"""Tables that the searches read: layer times, memory and link seconds as arrays.

They are the same for any cost model. A *kind* is one way to use the GPUs of one node type:
`tp_degree` of them together on one node. The arrays have one entry a layer, with the embedding
first, then the blocks, then the head (`num_layers = num_blocks + 2`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.arrays import Floats, Ints
from planner.cost.schedule import Transfers
from planner.inputs.fleet import NodeType, node_of
from planner.plans.in_flight import MOST_AHEAD
from planner.plans.shares import UnevenGroup
from planner.search.problem.stage_sums import Row, StageSums


@dataclass(frozen=True, slots=True)
class Resource:
    """Equal nodes of the fleet, as one countable resource."""

    node_type: NodeType
    node_names: tuple[str, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.node_names)

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.node_type.num_gpus

    @property
    def workers(self) -> list[str]:
        """Workers of its nodes, node by node."""
        workers = []
        for name in self.node_names:
            workers += [f"{name}/{gpu}" for gpu in range(self.node_type.num_gpus)]
        return workers


@dataclass(frozen=True, slots=True)
class Kind:
    """Way to use a resource: `tp_degree` GPUs of one node of it.

    count: how many fit in the fleet. group: set if the GPUs have uneven shares. If such a group
    lies on several nodes, the first node is of this resource, and no drafts are made of it (count
    0).
    """

    resource: int
    tp_degree: int
    count: int
    group: UnevenGroup | None = None

    @property
    def gpus(self) -> int:
        """GPUs taken from the kind's own resource."""
        if self.group is None:
            return self.tp_degree

        own = self.group.kinds[0]
        return self.group.kinds.count(own)


@dataclass(frozen=True)
class Tables:
    """Tables of a request: all that a search needs of it.

    batch: sequences a step, of `sequence_length` tokens. deepest: stages of a pipeline at most.
    near_s, apart_s: (rows, rows) seconds that a boundary between two neighbouring stages on one
    node, or on two, costs a microbatch, activation and gradient together; infinite if two stages
    cannot lie so. transfers: whom the transfers occupy.
    """

    model: str
    batch: int
    sequence_length: int
    deepest: int
    resources: tuple[Resource, ...]
    kinds: tuple[Kind, ...]
    rows: tuple[Row, ...]
    near_s: Floats
    apart_s: Floats
    transfers: Transfers
    stage_overhead_s: float = 0.0

    def kind(self, row: int) -> Kind:
        """Return the kind of a row."""
        return self.kinds[self.rows[row].kind]

    def resource_of(self, row: int) -> Resource:
        """Return the resource of a row's kind."""
        return self.resources[self.kind(row).resource]

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the fleet."""
        return sum(resource.num_gpus for resource in self.resources)

    def row_of(self, group: Sequence[str], microbatch: int) -> int | None:
        """Return the row of a tensor-parallel group at a microbatch size; None if unknown."""
        node = node_of(group[0])
        on_one_node = all(node_of(worker) == node for worker in group[1:])
        if on_one_node:
            return self.row_by_use.get((self.node_types[node], len(group), microbatch))

        # most fleets have no such rows, and searches ask for thousands of groups
        if not self.spread_rows:
            return None
        return self._spread_row(group, microbatch)

    def _spread_row(self, group: Sequence[str], microbatch: int) -> int | None:
        nodes = [node_of(worker) for worker in group]
        gpus_by_type = Counter(self.node_types[node] for node in nodes)

        # a spread group was costed with all its GPUs of one type on one node
        if len(set(nodes)) > len(gpus_by_type):
            return None
        return self.spread_rows.get((frozenset(gpus_by_type.items()), microbatch))

    @cached_property
    def node_types(self) -> dict[str, NodeType]:
        """Node type of each node."""
        found = {}
        for resource in self.resources:
            found.update(dict.fromkeys(resource.node_names, resource.node_type))
        return found

    @cached_property
    def is_tied(self) -> bool:
        """True if embedding and head are one tensor, whose gradient their stages sum together."""
        return any(row.tied_sync_bytes > 0 for row in self.rows)

    @cached_property
    def tp_degree_by_row(self) -> list[int]:
        """TP degree of each row."""
        return [self.kinds[row.kind].tp_degree for row in self.rows]

    @cached_property
    def sizes(self) -> list[int]:
        """Microbatch sizes of the rows, ascending."""
        return sorted(set(self.sums.microbatch_by_row))

    @property
    def boundary_share(self) -> float:
        """Share of a boundary's seconds for which each of its two stages is occupied."""
        return {"both": 1.0, "receiver": 0.5, "none": 0.0}[self.transfers]

    @property
    def begun_ahead(self) -> int:
        """Microbatches that a stage may begin before its first backward, for each stage after it.

        See `planner.plans.in_flight`.
        """
        return MOST_AHEAD if self.transfers == "none" else 1

    @cached_property
    def sums(self) -> StageSums:
        """Seconds and bytes of ranges of layers."""
        return StageSums(self.rows, self.deepest)

    @cached_property
    def num_layers(self) -> int:
        """Number of layers, embedding and head included."""
        return self.sums.num_layers

    @property
    def num_blocks(self) -> int:
        return self.num_layers - 2

    @cached_property
    def boundaries(self) -> Floats:
        """Seconds of a boundary, (rows, rows).

        The boundary is on one node if two groups of one node type fit into one.
        """
        return np.where(np.isfinite(self.near_s), self.near_s, self.apart_s)

    @cached_property
    def crossings(self) -> Floats:
        """Seconds of a boundary between equal groups on two nodes, (rows,).

        If a node type has a single node, the boundary is between two groups there.
        """
        apart = np.diagonal(self.apart_s)
        near = np.diagonal(self.near_s)

        # a single group of its kind has no neighbour at all
        near_or_none = np.nan_to_num(near, posinf=0.0)
        return np.where(np.isfinite(apart), apart, near_or_none)

    @cached_property
    def busiest_hop(self) -> Floats:
        """Mean seconds of the two boundaries of the busiest stage between equal groups, (rows,).

        If a node holds several groups, one of the two boundaries leaves it.
        """
        near = np.diagonal(self.boundaries)
        far = self.crossings
        mean = (near + far) / 2

        has_a_neighbour = self.groups_a_node > 1
        return np.asarray(np.where(has_a_neighbour, mean, far))

    @cached_property
    def groups_a_node(self) -> Ints:
        """Tensor-parallel groups of one pipeline that one node holds, (rows,)."""
        groups = []
        for row in range(len(self.rows)):
            node_gpus = self.resource_of(row).node_type.num_gpus
            whole_groups = node_gpus // self.kind(row).tp_degree

            # a group over several nodes is larger than its node
            groups.append(max(1, whole_groups))
        return np.array(groups)

    @cached_property
    def row_by_use(self) -> dict[tuple[NodeType, int, int], int]:
        """Row by node type, TP degree and microbatch size."""
        found = {}
        for r, row in enumerate(self.rows):
            kind = self.kind(r)
            if kind.count:
                node_type = self.resource_of(r).node_type
                found[node_type, kind.tp_degree, row.microbatch] = r
        return found

    @cached_property
    def spread_rows(self) -> dict[tuple[frozenset[tuple[NodeType, int]], int], int]:
        """Row of each group over several nodes.

        Key: its number of GPUs of each type, and microbatch size.
        """
        found = {}
        for r, row in enumerate(self.rows):
            group = self.kind(r).group
            if group is not None and len(group.nodes) > 1:
                gpus_by_type = Counter(group.kinds)
                found[frozenset(gpus_by_type.items()), row.microbatch] = r
        return found


def tp_degrees_of(tables: Tables) -> list[int]:
    """Return the TP degrees of the kinds, ascending."""
    return sorted({kind.tp_degree for kind in tables.kinds})
