"""Goodput: the part of a run's time in which it computed steps that count."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

WARM_STEPS = 1
"""First steps of a generation, which pay for what later ones do not."""


def usual_step_s(seconds: Sequence[float]) -> float | None:
    """Return the median of a generation's step seconds without its first step.

    None where nothing was measured.
    """
    if not seconds:
        return None
    return statistics.median(seconds[WARM_STEPS:] or seconds)


def goodput(
    kept: Mapping[int, int], seconds: Mapping[int, Sequence[float]], elapsed_s: float
) -> float | None:
    """Return the usual time of all steps that count over the time that passed, at most 1.

    kept: by generation, its number of steps that count. seconds: by generation, the seconds of all
    its steps. elapsed_s: seconds from the begin of the first step to the end of the last. None
    where nothing was measured.
    """
    useful_s = 0.0
    for generation, number in kept.items():
        useful_s += number * (usual_step_s(seconds.get(generation, ())) or 0.0)
    if not useful_s or elapsed_s <= 0:
        return None
    return min(1.0, useful_s / elapsed_s)
