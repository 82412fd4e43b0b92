"""What a node of each type costs at each moment: the cluster file's price, or a series of spot prices."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.cluster import Cluster, NodeType
from planner.errors import ConfigError

COLUMNS = ("time_s", "node_type", "usd_per_hour")


class Prices:
    """Piecewise constant; before a type's first row, and without rows, its price is the cluster file's (label or catalogue)."""

    def __init__(self, kinds: Mapping[str, NodeType], rows: Sequence[tuple[float, str, float]] = ()) -> None:
        self._steps: dict[str, list[tuple[float, float]]] = {}
        for name, kind in kinds.items():
            later = sorted((time_s, usd) for time_s, of, usd in rows if of == name)
            self._steps[name] = [(-math.inf, kind.usd_per_hour or 0.0), *later]

    def usd_per_hour(self, node_type: str, time_s: float) -> float:
        steps = self._steps[node_type]
        return steps[bisect_right(steps, (time_s, math.inf)) - 1][1]

    def usd(self, node_type: str, begin_s: float, end_s: float) -> float:
        """Dollars for one node from `begin_s` to `end_s`."""
        steps = self._steps[node_type]
        ends = [time_s for time_s, _ in steps[1:]] + [math.inf]
        hours = (
            max(0.0, min(end, end_s) - max(begin, begin_s)) / 3600.0
            for (begin, _), end in zip(steps, ends, strict=True)
        )
        return sum(hour * usd for hour, (_, usd) in zip(hours, steps, strict=True) if hour)


def read_prices(path: str | Path, cluster: Cluster) -> list[tuple[float, str, float]]:
    """Rows of a CSV `time_s, node_type, usd_per_hour` (of a node).

    Raises:
        ConfigError: a column or a value that does not fit, a node type that the cluster does not have.
    """
    try:
        with Path(path).open(newline="") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            rows, columns = list(reader), tuple(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read prices '{path}': {getattr(error, 'strerror', None) or error}") from None
    if columns != COLUMNS:
        raise ConfigError(
            f"prices '{path}' has columns {', '.join(columns) or 'none'}; they must be {', '.join(COLUMNS)}"
        )
    names = {kind.name for kind in cluster.node_types}
    found = []
    for number, row in enumerate(rows, 1):
        if row["node_type"] not in names:
            raise ConfigError(
                f"row {number} of prices '{path}' names node type '{row['node_type']}'; the cluster has {', '.join(sorted(names))}"
            )
        found.append(
            (_number(row, "time_s", number, path), row["node_type"], _number(row, "usd_per_hour", number, path))
        )
    return found


def _number(row: Mapping[str, str], name: str, number: int, path: str | Path) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise ConfigError(
            f"'{name}' of row {number} of prices '{path}' must be a number of at least 0, not {row[name]!r}"
        )
    return value
