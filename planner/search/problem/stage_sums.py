"""Seconds and bytes of ranges of layers: sums over a table's rows, made once.

The cost of any contiguous range is one subtraction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.arrays import Floats, Ints


@dataclass(frozen=True)
class Row:
    """Costs of a kind at one microbatch size.

    Times are seconds a microbatch, memory is bytes a worker; arrays have shape (num_layers,).

    state_bytes: what a layer holds all step long (parameters, gradients, optimizer).
    activation_bytes: what one microbatch in flight keeps. fixed_bytes: what every stage holds,
    independent of its layers (buffers, workspace). limit_bytes: what a GPU has. sync_bytes:
    gradient bytes a worker sends for the layer. tied_bytes, tied_sync_bytes: what a stage that
    holds embedding and head saves of state and peaks, and of gradients. update_s_a_byte: seconds of
    the optimizer's update a gradient byte.
    """

    kind: int
    microbatch: int
    forward_s: Floats
    backward_s: Floats
    state_bytes: Floats
    activation_bytes: Floats
    sync_bytes: Floats
    fixed_bytes: float
    limit_bytes: float
    tied_bytes: float = 0.0
    tied_sync_bytes: float = 0.0
    update_s_a_byte: float = 0.0

    @property
    def room_bytes(self) -> float:
        """Bytes of a GPU for a stage's layers and what they keep in flight."""
        return self.limit_bytes - self.fixed_bytes


@dataclass(frozen=True)
class StageSums:
    """Sums over the first layers of each row.

    deepest: stages of a pipeline at most.
    """

    rows: Sequence[Row]
    deepest: int

    @cached_property
    def num_layers(self) -> int:
        """Number of layers, embedding and head included."""
        return len(self.rows[0].forward_s)

    @cached_property
    def microbatch_by_row(self) -> list[int]:
        """Microbatch size of each row."""
        return [row.microbatch for row in self.rows]

    @cached_property
    def time_sums(self) -> Floats:
        """(rows, num_layers + 1) forward + backward seconds of the first i layers."""
        times_s = [row.forward_s + row.backward_s for row in self.rows]
        return _sums(times_s)

    @cached_property
    def forward_sums(self) -> Floats:
        return _sums([row.forward_s for row in self.rows])

    @cached_property
    def forward_share(self) -> Floats:
        """Share of the forward in the whole model's seconds, (rows,)."""
        forward_s = self.forward_sums[:, -1]
        whole_s = self.time_sums[:, -1]
        return np.asarray(forward_s / whole_s)

    @cached_property
    def sync_sums(self) -> Floats:
        return _sums([row.sync_bytes for row in self.rows])

    def stage_sync_bytes(self, row: int, start: int, end: int) -> float:
        """Return gradient bytes of a worker of a stage of layers [start, end).

        Plain floats, since searches ask thousands of times.
        """
        sums = self._sync_lists[row]
        twice = 0.0
        if start == 0 and end == self.num_layers:
            twice = self.rows[row].tied_sync_bytes
        return sums[end] - sums[start] - twice

    @cached_property
    def _sync_lists(self) -> list[list[float]]:
        lists: list[list[float]] = self.sync_sums.tolist()
        return lists

    @cached_property
    def last_layer_that_fits(self) -> Ints:
        """Largest end of a stage that starts at each layer, (rows, deepest, num_layers + 1).

        The second axis is the number of microbatches in flight, beginning with one.
        """
        n = self.num_layers
        out = np.zeros((len(self.rows), self.deepest, n + 1), dtype=np.int64)
        for r, row in enumerate(self.rows):
            room = row.room_bytes
            for depth in range(1, self.deepest + 1):
                layer_bytes = row.state_bytes + depth * row.activation_bytes
                sums = np.concatenate([[0.0], np.cumsum(layer_bytes)])

                beyond = np.searchsorted(sums, sums + room, side="right")
                out[r, depth - 1] = beyond - 1

                # a stage of the whole model holds the tied tensor once
                whole_bytes = sums[-1] - row.tied_bytes
                if whole_bytes <= room:
                    out[r, depth - 1, 0] = n
        return out

    def memory_bytes(self, row: int, start: int, end: int, in_flight: int) -> float:
        """Return bytes of a worker of a stage of layers [start, end)."""
        r = self.rows[row]
        state, activations = self._memory_sums[row]
        a_microbatch = activations[end] - activations[start]
        kept = state[end] - state[start] + in_flight * a_microbatch

        tied = 0.0
        if start == 0 and end == self.num_layers:
            tied = r.tied_bytes
        return kept + r.fixed_bytes - tied

    def room(self, row: int, start: int, end: int) -> int:
        """Return microbatches in flight that memory holds at a stage of layers [start, end)."""
        none = self.memory_bytes(row, start, end, 0)
        a_microbatch = self.memory_bytes(row, start, end, 1) - none

        # one byte at least, since a microbatch may keep nothing
        left = self.rows[row].limit_bytes - none
        return int(left / max(1.0, a_microbatch))

    @cached_property
    def state_sums(self) -> Floats:
        """(rows, num_layers + 1) state bytes of the first i layers."""
        return _sums([row.state_bytes for row in self.rows])

    @cached_property
    def activation_sums(self) -> Floats:
        """(rows, num_layers + 1) activation bytes of a microbatch in the first i layers."""
        return _sums([row.activation_bytes for row in self.rows])

    @cached_property
    def _memory_sums(self) -> list[tuple[list[float], list[float]]]:
        """State and activation sums as plain floats: searches ask thousands of times."""
        states: list[list[float]] = self.state_sums.tolist()
        activations: list[list[float]] = self.activation_sums.tolist()
        return list(zip(states, activations, strict=True))


def _sums(per_row: list[Floats]) -> Floats:
    none = np.zeros((len(per_row), 1))
    sums = np.cumsum(np.stack(per_row), axis=1)
    return np.concatenate([none, sums], axis=1)
