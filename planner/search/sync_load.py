"""Gradient sync of a draft of many pipelines: how long each worker's link is occupied by the all-reduces that it takes part in.

A layer is summed over its holders, one all-reduce for each finest slice, all side by side: the fullest link or the slowest all-reduce
tells when sync ends. Unlike in `planner.cost.sync` each GPU always has its share of the NIC, whatever the others do.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.tables import Tables

Ring = Callable[[frozenset[int], float, int], float]


@dataclass(frozen=True)
class Member:
    """A pipeline's shape in the sync. ends: block after which each stage ends; degrees, resources: of each stage;
    ready_s: when each stage has done its last backward."""

    ends: tuple[int, ...]
    degrees: tuple[int, ...]
    resources: tuple[int, ...]
    ready_s: tuple[float, ...]


def sync_end_s(
    members: Sequence[Member], pipelines: int, segment_bytes: Callable[[int, int], float], ring: Ring
) -> float:
    """When the last all-reduce ends. segment_bytes(first, end): gradient bytes of blocks [first, end), whole; ring: seconds of
    one all-reduce of so many bytes over so many pipelines on these node types. Equal pipelines count as one member."""
    cuts = sorted({0, *itertools.chain.from_iterable(member.ends for member in members)})
    stages = [np.searchsorted(np.array(member.ends), np.array(cuts[:-1]), side="right").tolist() for member in members]
    held = list(zip(*stages, strict=True))
    ready = [max(m.ready_s[s] for m, s in zip(members, each, strict=True)) for each in held]
    carried = [list(member.ready_s) for member in members]
    end = max(max(member.ready_s) for member in members)
    for i in sorted(range(len(held)), key=ready.__getitem__):
        both = list(zip(members, held[i], carried, strict=True))
        slices = max(m.degrees[s] for m, s, _ in both)
        num_bytes = segment_bytes(cuts[i], cuts[i + 1]) / slices
        end = max(end, ready[i] + ring(frozenset(m.resources[s] for m, s, _ in both), num_bytes, pipelines))
        for m, s, busy in both:
            own_s = ring(frozenset({m.resources[s]}), num_bytes, pipelines) * slices / m.degrees[s]
            busy[s] = max(busy[s], ready[i]) + own_s
            end = max(end, busy[s])
    return end


def block_bytes(tables: Tables, row: int) -> Callable[[int, int], float]:
    """Gradient bytes of blocks [first, end), with the embedding before block 0 and the head after the last."""
    degree, last = tables.kinds[tables.rows[row].kind].tp_degree, tables.num_blocks

    def between(first: int, end: int) -> float:
        start, stop = 0 if first == 0 else first + 1, end + 2 if end == last else end + 1
        return degree * tables.stage_sync_bytes(row, start, stop)

    return between
