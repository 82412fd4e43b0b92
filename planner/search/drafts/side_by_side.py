"""Gradient sync of equal pipelines that lie side by side on their nodes, or each on its own.

Side by side, gradients are summed inside a node.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from planner.arrays import Floats, Ints
from planner.inputs.fleet import NodeType
from planner.search.drafts.draft import Estimator, Shape
from planner.search.drafts.place import split_pipelines
from planner.search.problem.cost_tables import ring_rate
from planner.search.problem.request import Request
from planner.search.problem.tables import Tables

_Rate = tuple[float, float, int]
"""Seconds of latency, seconds a byte, and stages of one pipeline on a node."""
_TiedRate = tuple[float, float]
"""Seconds of latency, and seconds a byte."""
_Node = tuple[int, int]
"""Resource, and which of its nodes."""


class Sync(Protocol):
    """Seconds after the pipelines of a draft: gradient sync and update."""

    def after_one_s(self, timing: Estimator, number: int, shape: Shape) -> float:
        """Return the seconds after `number` pipelines of one shape."""

    def after_kinds_s(
        self,
        number: Ints,
        rows: Ints,
        held_bytes: Floats,
        early_s: Floats,
        counts: Floats,
        back_s: Floats,
    ) -> Floats:
        """Return (n,) seconds after `number` pipelines of several kinds of stages.

        Each pipeline has `counts` equal stages of each of several rows, one after the other. rows:
        (n, P), -1 for none. held_bytes: gradients of a worker of each. early_s: how long before the
        end the first of them has done its last backward. back_s: a stage's backward.
        """


class SideBySide:
    """Seconds of gradient sync if the same stage of all pipelines of a part fills nodes in turn.

    A node's NIC carries each gradient once, whatever the number of its holders there, one stage's
    after the other's. All pipelines end their stages together.
    """

    def __init__(self, request: Request, tables: Tables, parts: int):
        self._cost = request.cost
        self._tables = tables
        self._parts = parts
        self._holders = request.min_node_disjoint_holders
        self._rates: dict[tuple[int, int], _Rate] = {}
        self._tied_rates: dict[tuple[int, int, int], _TiedRate] = {}
        # (rows,) the first row of the same kind: a ring does not depend on the microbatch
        first_of_kind: dict[int, int] = {}
        for index, row in enumerate(tables.rows):
            first_of_kind.setdefault(row.kind, index)
        self._like = [first_of_kind[row.kind] for row in tables.rows]
        self._update = [row.update_s_a_byte for row in tables.rows]

    def after_kinds_s(
        self,
        number: Ints,
        rows: Ints,
        held_bytes: Floats,
        early_s: Floats,
        counts: Floats,
        back_s: Floats,
    ) -> Floats:
        """Return (n,) seconds from the pipelines' end to the last gradient sum and update."""
        latency_s, byte_s, stages = self._rates_of(number, rows)
        is_used = rows >= 0
        summed_s = byte_s * held_bytes
        # the next stage on the node begins its sums while the NIC still carries those before it
        num_on_node = np.minimum(stages, counts)
        num_further = np.maximum(num_on_node - 1, 0)
        waiting_s = num_further * np.maximum(summed_s - back_s, 0.0)
        carried_s = latency_s + summed_s + waiting_s
        late_s = np.where(is_used, carried_s - early_s, 0.0)

        update_s_a_byte = np.array(self._update)[rows]
        updates_s = np.where(is_used, update_s_a_byte * held_bytes, 0.0)
        latest_s = late_s.max(axis=1, initial=0.0)
        longest_update_s = updates_s.max(axis=1, initial=0.0)
        return np.asarray(latest_s + longest_update_s)

    def _rates_of(self, number: Ints, rows: Ints) -> tuple[Floats, Floats, Floats]:
        """Return `_rate` for arrays: (n, P) each of latency, seconds a byte, and stages."""
        like = np.array(self._like)
        alike = np.where(rows >= 0, like[rows], -1)
        # one whole number for each pair of a number of pipelines and a row
        width = len(self._tables.rows) + 1
        pairs = number[:, None] * width + alike + 1
        keys, index = np.unique(pairs, return_inverse=True)

        rates = np.zeros((len(keys), 3))
        for at, key in enumerate(keys.tolist()):
            rates[at] = self._rate(key // width, key % width - 1)
        of_rows = rates[index.reshape(rows.shape)]
        latency_s, byte_s, stages = np.moveaxis(of_rows, -1, 0)
        return latency_s, byte_s, stages

    def after_one_s(self, timing: Estimator, number: int, shape: Shape) -> float:
        """Return the seconds of `after_kinds_s` for `number` pipelines of one shape.

        The gradient of a tied embedding is summed over first and last stages, once their other
        gradients are; other nodes go on beside it.
        """
        tables = self._tables
        tied_s = self._tied_s(number, shape)
        stages = shape.stages
        # a pipeline has many stages of few rows
        rates = {row: self._rate(number, self._like[row]) for row in set(shape.rows)}
        nodes = self._nodes(shape, rates)
        backward_s = timing.way(shape).backward_s
        # seconds from the end of a stage's last backward to the end of the first stage's
        early = list(itertools.accumulate(backward_s, initial=0.0))

        updated_s = 0.0
        carried: dict[_Node, float] = {}  # when each node's NIC has carried what is summed so far
        for at in reversed(range(len(stages))):
            row, start, end = stages[at]
            node = nodes[at]
            num_bytes = tables.sums.stage_sync_bytes(row, start, end)
            updated_s = max(updated_s, self._update[row] * num_bytes)
            if tied_s and (start == 0 or end == tables.num_layers):
                num_bytes -= tables.rows[row].tied_sync_bytes

            latency_s, byte_s, _ = rates[row]
            free_s = carried.get(node, -math.inf)
            begin_s = max(free_s, -early[at])
            carried[node] = begin_s + latency_s + byte_s * num_bytes

        latest_s = max(0.0, *carried.values())
        if tied_s:
            first_s = carried[nodes[0]]
            last_s = carried[nodes[-1]]
            begin_s = max(0.0, first_s, last_s)
            latest_s = max(latest_s, begin_s + tied_s)
        return latest_s + updated_s

    def _nodes(self, shape: Shape, rates: Mapping[int, _Rate]) -> list[_Node]:
        """Return a number for the node of each stage: its resource, and which of them.

        The stages of a resource fill one node after the other. A stage whose sums stay inside its
        nodes shares no NIC, and counts as a node of its own.
        """
        filled: dict[int, float] = {}  # nodes of each resource, the last one in part
        nodes = []
        for row in shape.rows:
            resource = self._tables.kind(row).resource
            _, _, stages_a_node = rates[row]
            share = 1.0 / max(1, stages_a_node)
            before = filled.get(resource, 0.0)
            if before % 1.0 + share > 1.0 + 1e-9:
                before = float(math.ceil(before))
            filled[resource] = before + share
            nodes.append((resource, int(before + 1e-9)))
        return nodes

    def _tied_s(self, number: int, shape: Shape) -> float:
        """Return the seconds of the sum of a tied embedding; 0 if the stages sum none."""
        if len(shape.rows) == 1 or not self._tables.is_tied:
            return 0.0
        first = self._like[shape.rows[0]]
        last = self._like[shape.rows[-1]]
        latency_s, byte_s = self._tied_rate(number, first, last)
        rows = self._tables.rows
        held_bytes = min(rows[first].tied_sync_bytes, rows[last].tied_sync_bytes)
        return latency_s + byte_s * held_bytes

    def _tied_rate(self, number: int, first: int, last: int) -> _TiedRate:
        """Return latency and seconds a byte of the rings over both ends of `number` pipelines.

        The ends fill one node after the other, as `place_ends_first` lets them. Each ring sums what
        a worker of the end with more workers holds.
        """
        key = (number, first, last)
        if key not in self._tied_rates:
            self._tied_rates[key] = self._new_tied_rate(number, first, last)
        return self._tied_rates[key]

    def _new_tied_rate(self, number: int, first: int, last: int) -> _TiedRate:
        members: list[tuple[str, NodeType]] = []
        num_parts = min(number, self._holders)
        for part, pipelines in enumerate(split_pipelines(number, num_parts)):
            filled: dict[int, float] = {}
            for row in (first, last):
                resource = self._tables.kind(row).resource
                node_type = self._tables.resources[resource].node_type
                share = 1.0 / int(self._tables.groups_a_node[row])
                for _ in pipelines:
                    before = filled.get(resource, 0.0)
                    filled[resource] = before + share
                    node = int(before + 1e-9)
                    members.append((f"{part}-{resource}-{node}", node_type))

        first_degree = self._tables.kind(first).tp_degree
        last_degree = self._tables.kind(last).tp_degree
        num_rings = max(first_degree, last_degree)
        return ring_rate(self._cost, members, float(num_rings))

    def _rate(self, number: int, row: int) -> _Rate:
        """Return latency, seconds a byte, and stages a node for stages of one row.

        The rate is that of a ring over `number` stages of the row while the NIC carries nothing
        else. The third value is the number of stages of one pipeline on a node. All are 0 if row is
        -1.
        """
        if row < 0:
            return 0.0, 0.0, 0
        key = (number, row)
        if key not in self._rates:
            self._rates[key] = self._new_rate(number, row)
        return self._rates[key]

    def _new_rate(self, number: int, row: int) -> _Rate:
        kind = self._tables.kind(row)
        node_type = self._tables.resources[kind.resource].node_type
        held = int(self._tables.groups_a_node[row])

        members: list[tuple[str, NodeType]] = []
        pipelines = split_pipelines(number, min(number, self._parts))
        for part, mine in enumerate(pipelines):
            for index in range(len(mine)):
                members.append((f"{part}-{index // held}", node_type))
        largest = max(len(part) for part in pipelines)
        if held % largest:
            members[-1] = ("last", node_type)

        fills_nodes = held % largest == 0 or largest % held == 0
        if len(dict(members)) == 1:
            stages = 1  # no NIC carries them
        elif fills_nodes:
            stages = max(1, held // largest)
        else:
            stages = 1 + math.ceil((held - 1) / largest)  # stages begin anywhere in a node
        num_rings = float(kind.tp_degree)
        latency_s, byte_s = ring_rate(self._cost, members, num_rings)
        return latency_s, byte_s, stages
