"""Gradient sync of a draft of many pipelines, as the step simulation orders it: which all-reduces wait for which.

A layer is summed over its holders, one all-reduce for each finest slice; a worker takes part in one at a time, those of
late stages first. Where pipelines are cut at different blocks neighbouring all-reduces share a worker, so one waits for
the next through all layers; where their cuts agree they run side by side.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.strategies.tables import Floats, Ints

Ring = Callable[[frozenset[int], float, int], float]


@dataclass(frozen=True)
class Member:
    """A pipeline's shape in the sync. ends: block after which each stage ends; degrees, resources: of each stage;
    ready_s: when each stage has done its last backward."""

    ends: tuple[int, ...]
    degrees: tuple[int, ...]
    resources: tuple[int, ...]
    ready_s: tuple[float, ...]


def chain_s(members: Sequence[Member], pipelines: int, segment_bytes: Callable[[int, int], float], ring: Ring) -> float:
    """When the last all-reduce ends. segment_bytes(first, end): gradient bytes of blocks [first, end), whole; ring: seconds of
    one all-reduce of so many bytes over so many pipelines on these node types. Equal pipelines count as one member."""
    cuts = sorted({0, *itertools.chain.from_iterable(member.ends for member in members)})
    units = max(max(member.degrees) for member in members)
    stages = [np.searchsorted(np.array(member.ends), np.array(cuts[:-1]), side="right") for member in members]
    free = [np.repeat(np.array(member.ready_s)[:, None], max(member.degrees), axis=1) for member in members]
    ready = [max(m.ready_s[s[i]] for m, s in zip(members, stages, strict=True)) for i in range(len(cuts) - 1)]
    end = max(max(member.ready_s) for member in members)
    for i in sorted(range(len(ready)), key=lambda i: (ready[i], i)):
        held = [int(s[i]) for s in stages]
        kinds = frozenset(m.resources[s] for m, s in zip(members, held, strict=True))
        seconds = ring(kinds, segment_bytes(cuts[i], cuts[i + 1]) / units, pipelines)
        degrees = [m.degrees[s] for m, s in zip(members, held, strict=True)]
        end = max(end, _slices(free, held, degrees, units, seconds))
    return end


def _slices(free: Sequence[Floats], held: Sequence[int], degrees: Sequence[int], units: int, seconds: float) -> float:
    """Runs the all-reduces of one segment, slice by slice; when the last ends."""
    if len(set(degrees)) == 1:
        done = max(float(times[s, 0]) for times, s in zip(free, held, strict=True)) + seconds * units / degrees[0]
        for times, s in zip(free, held, strict=True):
            times[s] = done
        return done
    done = 0.0
    for unit in range(units):
        ranks = [unit * degree // units for degree in degrees]
        start = max(float(times[s, r]) for times, s, r in zip(free, held, ranks, strict=True))
        done = start + seconds
        for times, s, r in zip(free, held, ranks, strict=True):
            times[s, r] = done
    return done


def block_bytes(sync_sums: Floats, row: int, degree: int) -> Callable[[int, int], float]:
    """Gradient bytes of blocks [first, end), with the embedding before block 0 and the head after the last."""
    sums: Ints | Floats = sync_sums[row] * degree
    last = len(sums) - 3

    def between(first: int, end: int) -> float:
        return float(sums[end + 2 if end == last else end + 1] - sums[0 if first == 0 else first + 1])

    return between
