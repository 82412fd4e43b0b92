"""Accuracy of the bundled layer times, and the verdict on rows of accuracy."""

import statistics
from typing import Any

from planner.cost.layers.curves import make_curve
from planner.inputs.profile import default_profile

ResultRow = dict[str, Any]


def layer_times_row() -> ResultRow:
    """Return the row of the layer times' interpolation.

    Every third measured microbatch of each curve is left out and read from the curve through the
    others.
    """
    errors = []
    table = default_profile()
    for key in table.keys:
        for points in table.layers(key).values():
            held_out = sorted(points)[2::3]
            for backward in (False, True):
                values = {}
                for size, point in sorted(points.items()):
                    seconds = point.backward_s if backward else point.forward_s
                    if seconds:
                        values[size] = seconds

                kept = {size: values[size] for size in values if size not in held_out}
                if len(kept) < 2:
                    continue
                curve = make_curve(kept)
                for size in held_out:
                    if size in values:
                        errors.append(abs(curve.at(size) / values[size] - 1))
    return {
        "on": "layer times of Cephalo and Zorse (bundled)",
        "fitted": "two of three points of each curve",
        "held_out": f"every third point, {len(errors)} of them",
        "median": statistics.median(errors),
        "mean": statistics.mean(errors),
        "reach": {"median": 0.03},
    }


def reaches_limits(row: ResultRow) -> bool | None:
    """Return True if a row reaches all its limits; None if it was skipped or has no limits."""
    if "skipped" in row or not row["reach"]:
        return None
    for name, limit in row["reach"].items():
        # a rank correlation should be large, all other figures small
        if name == "spearman":
            is_reached = row[name] >= limit
        else:
            is_reached = row[name] <= limit
        if not is_reached:
            return False
    return True
