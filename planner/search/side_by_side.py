"""Gradient sync of equal pipelines that lie side by side on their nodes, or each on its own.

Side by side, gradients are summed inside a node.
"""

import itertools
import math
from typing import Protocol

import numpy as np

from planner.cluster import NodeType
from planner.search.cost_tables import ring_rate
from planner.search.draft import Estimator, Shape
from planner.search.place import parted
from planner.search.problem import Request
from planner.search.stage_sums import Floats, Ints
from planner.search.tables import Tables


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
        self._rates: dict[tuple[int, int], tuple[float, float, int]] = {}
        self._holders = request.min_node_disjoint_holders
        self._tied_rates: dict[tuple[int, int, int], tuple[float, float]] = {}
        # (rows,) the first row of the same kind: a ring does not depend on the microbatch
        _, first, kind = np.unique(
            [row.kind for row in tables.rows], return_index=True, return_inverse=True
        )
        self._like: list[int] = first[kind].tolist()
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
        latency, byte_s, stages = self._rates_of(number, rows)
        summed = byte_s * held_bytes
        further = np.maximum(np.minimum(stages, counts) - 1, 0)
        carried = latency + summed + further * np.maximum(summed - back_s, 0.0)
        late = np.where(rows >= 0, carried - early_s, 0.0).max(axis=1, initial=0.0)
        updates = np.where(rows >= 0, np.array(self._update)[rows] * held_bytes, 0.0)
        return np.asarray(late + updates.max(axis=1, initial=0.0))

    def _rates_of(self, number: Ints, rows: Ints) -> tuple[Floats, Floats, Floats]:
        """Return `_rate` for arrays: (n, P) each of latency, seconds a byte, and stages."""
        width = len(self._tables.rows) + 1
        alike = np.where(rows >= 0, np.array(self._like)[rows], -1)
        keys, at = np.unique(number[:, None] * width + alike + 1, return_inverse=True)
        rates = np.array(
            [self._rate(int(key) // width, int(key) % width - 1) for key in keys]
        ).reshape(-1, 3)
        latency, byte_s, stages = np.moveaxis(rates[at.reshape(rows.shape)], -1, 0)
        return latency, byte_s, stages

    def after_one_s(self, timing: Estimator, number: int, shape: Shape) -> float:
        """Return the seconds of `after_kinds_s` for `number` pipelines of one shape.

        The gradient of a tied embedding is summed over first and last stages, once their other
        gradients are; other nodes go on beside it.
        """
        tables = self._tables
        before = [0.0, *itertools.accumulate(timing.way(shape).backward_s)]
        tied_s = self._tied_s(number, shape)
        updated = 0.0
        carried: dict[tuple[int, int], float] = {}
        stages = list(zip(shape.rows, shape.starts, shape.ends, self._nodes(number, shape)))
        for at in range(len(stages) - 1, -1, -1):
            row, start, end, node = stages[at]
            num_bytes = tables.sums.stage_sync_bytes(row, start, end)
            updated = max(updated, self._update[row] * num_bytes)
            if tied_s and (start == 0 or end == tables.num_layers):
                num_bytes -= tables.rows[row].tied_sync_bytes
            latency, byte_s, _ = self._rate(number, self._like[row])
            begin = max(carried.get(node, -math.inf), -before[at])
            carried[node] = begin + latency + byte_s * num_bytes
        latest = max(0.0, *carried.values())
        if tied_s:
            begin = max(0.0, carried[stages[0][3]], carried[stages[-1][3]])
            latest = max(latest, begin + tied_s)
        return latest + updated

    def _nodes(self, number: int, shape: Shape) -> list[tuple[int, int]]:
        """Return a number for the node of each stage: its resource, and which of them.

        The stages of a resource fill one node after the other. A stage whose sums stay inside its
        nodes shares no NIC, and counts as a node of its own.
        """
        filled: dict[int, float] = {}
        out = []
        for row in shape.rows:
            resource = self._tables.kind(row).resource
            share = 1.0 / max(1, self._rate(number, self._like[row])[2])
            before = filled.get(resource, 0.0)
            if before % 1.0 + share > 1.0 + 1e-9:
                before = float(math.ceil(before))
            filled[resource] = before + share
            out.append((resource, int(before + 1e-9)))
        return out

    def _tied_s(self, number: int, shape: Shape) -> float:
        """Return the seconds of the sum of a tied embedding; 0 if the stages sum none."""
        if len(shape.rows) == 1 or not self._tables.is_tied:
            return 0.0
        first = self._like[shape.rows[0]]
        last = self._like[shape.rows[-1]]
        latency, byte_s = self._tied_rate(number, first, last)
        held = min(self._tables.rows[row].tied_sync_bytes for row in (first, last))
        return latency + byte_s * held

    def _tied_rate(self, number: int, first: int, last: int) -> tuple[float, float]:
        """Return latency and seconds a byte of the rings over both ends of `number` pipelines.

        The ends fill one node after the other, as `place_ends_first` lets them. Each ring sums what
        a worker of the end with more workers holds.
        """
        if (number, first, last) not in self._tied_rates:
            members: list[tuple[str, NodeType]] = []
            kinds = [self._tables.kind(row) for row in (first, last)]
            for part, mine in enumerate(parted(number, min(number, self._holders))):
                filled: dict[int, float] = {}
                for row, kind in zip((first, last), kinds, strict=True):
                    node_type = self._tables.resources[kind.resource].node_type
                    for _ in mine:
                        at = filled.get(kind.resource, 0.0)
                        filled[kind.resource] = at + 1.0 / int(self._tables.groups_a_node[row])
                        name = f"{part}-{kind.resource}-{int(at + 1e-9)}"
                        members.append((name, node_type))
            rings = float(max(kind.tp_degree for kind in kinds))
            self._tied_rates[number, first, last] = ring_rate(self._cost, members, rings)
        return self._tied_rates[number, first, last]

    def _rate(self, number: int, row: int) -> tuple[float, float, int]:
        """Return latency, seconds a byte, and stages a node for stages of one row.

        The rate is that of a ring over `number` stages of the row while the NIC carries nothing
        else. The third value is the number of stages of one pipeline on a node. All are 0 if row is
        -1.
        """
        if row < 0:
            return 0.0, 0.0, 0
        if (number, row) not in self._rates:
            kind = self._tables.kinds[self._tables.rows[row].kind]
            node = self._tables.resources[kind.resource].node_type
            held = int(self._tables.groups_a_node[row])
            sizes = [len(part) for part in parted(number, min(number, self._parts))]
            members: list[tuple[str, NodeType]] = []
            for part, size in enumerate(sizes):
                members += [(f"{part}-{i // held}", node) for i in range(size)]
            if held % max(sizes):
                members[-1] = ("last", node)
            side = max(sizes)
            whole = held % side == 0 or side % held == 0  # else stages begin anywhere in a node
            stages = max(1, held // side) if whole else 1 + math.ceil((held - 1) / side)
            if len(dict(members)) == 1:
                stages = 1  # no NIC carries them
            self._rates[number, row] = (
                *ring_rate(self._cost, members, float(kind.tp_degree)),
                stages,
            )
        return self._rates[number, row]
