"""Comparison of measured compute with the plan: slow nodes, and GPU types whose rate is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_low

from planner.inputs.fleet import node_of

MIN_RATE_CHANGE = 1.2
"""Least factor by which a GPU type's compute is off its profile before plans count on it.

Less is within the model's error and a busy machine's noise.
"""


MOST_RATE_FACTOR = 4.0
"""Largest factor, either way, that is believed of a GPU type."""


def find_slow(
    measured_s: Mapping[str, Sequence[float]],
    planned_s: Mapping[str, float],
    slowdowns: Mapping[str, float],
    ratio: float,
) -> dict[str, float]:
    """Return the nodes whose compute has left the plan for good, with their new slowdown.

    A slowdown of 1.0 means: as fast as their type again.

    measured_s: each worker's compute of the last steps; planned_s: the plan's compute seconds with
    the `slowdowns` known so far. A worker is slow when every one of its steps takes `ratio` times
    what the fleet's typical worker takes of its own plan, and recovered when the reverse holds: a
    profile that is wrong for the whole fleet makes no worker slow.
    """
    shares = _shares_of_plan(measured_s, planned_s)
    is_known_of_all = len(shares) >= 2 and len(shares) >= len(planned_s)
    if ratio == 0 or not is_known_of_all:
        return {}

    # The lower one, so that of two workers the slower one is compared with the faster one.
    typical = median_low(median(steps) for steps in shares.values())
    found: dict[str, float] = {}
    for worker, steps in shares.items():
        node = node_of(worker)
        known = slowdowns.get(node, 1.0)
        slowdown = known * median(steps) / typical
        new = round(slowdown, 2)
        if min(steps) >= ratio * typical:
            # A node is as slow as its slowest worker.
            found[node] = max(found.get(node, 1.0), new)
        elif known > 1.0 and max(steps) * ratio <= typical:
            found.setdefault(node, max(1.0, new))
    return found


def _shares_of_plan(
    measured_s: Mapping[str, Sequence[float]], planned_s: Mapping[str, float]
) -> dict[str, list[float]]:
    """Return the steps of each measured worker, each over the worker's planned seconds."""
    shares = {}
    for worker, steps in measured_s.items():
        if steps:
            shares[worker] = [seconds / planned_s[worker] for seconds in steps]
    return shares


def find_rates(
    measured_s: Mapping[str, Sequence[float]],
    planned_s: Mapping[str, float],
    gpu_types: Mapping[str, str],
    factors: Mapping[str, float],
) -> dict[str, float]:
    """Return the GPU types whose rate the profile has wrong, with the factor on its compute time.

    measured_s: each worker's compute of the last steps; planned_s: the plan's, with the `factors`
    known so far; gpu_types: by worker. Factors are relative to the fleet's typical worker, since a
    profile that is wrong for all alike changes no plan. A type's own is the median over its workers
    of the median over their steps, and most of its workers must be off in every step, so that
    neither odd steps nor a few slow nodes move it. Factors stay within MOST_RATE_FACTOR.
    """
    all_types = sorted(set(gpu_types.values()))
    if len(measured_s) < len(planned_s) or len(all_types) < 2:
        return {}

    shares = _shares_of_plan(measured_s, planned_s)
    typical = median_low(median(steps) for steps in shares.values())
    found = {}
    for gpu_type in all_types:
        own = []
        for worker in sorted(shares):
            if gpu_types[worker] == gpu_type:
                own.append([share / typical for share in shares[worker]])

        off = median(median(steps) for steps in own)
        if off > 1.0:
            agreeing = [steps for steps in own if min(steps) > 1.0]
        else:
            agreeing = [steps for steps in own if max(steps) < 1.0]

        known = factors.get(gpu_type, 1.0)
        factor = max(known * off, 1 / MOST_RATE_FACTOR)
        factor = min(factor, MOST_RATE_FACTOR)
        new = round(factor, 3)
        is_clear = max(new / known, known / new) >= MIN_RATE_CHANGE
        if is_clear and 2 * len(agreeing) > len(own):
            found[gpu_type] = new
    return found
