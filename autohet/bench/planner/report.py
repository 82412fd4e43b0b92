"""`autohet bench planner`: accuracy of the cost model and the searches, one row per result.

Quick by default; `--full` adds mixtures of experts and up to 4,096 GPUs. Every row
has the limits that it should reach and `reached` (null if the material for it is absent).
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from autohet.bench.planner.layer_times import layer_times_row, reaches_limits
from autohet.bench.planner.searches import SEARCH_PARTS, search_rows

ResultRow = dict[str, Any]
QUICK_PARTS = ("metis", "replan")
ELSEWHERE = (
    ("accuracy", "steps that AMP, Sailor, FASOP, Metis and HAP measured", "planner_accuracy"),
    ("search", "FASOP's partitions and searches", "planner_fasop"),
    ("search", "Sailor's and random fleets, small cases against every plan", "planner_search"),
)
"""(part, what, program) of comparisons that need a checkout."""
WIDTH = 80
"""Columns that every pipe, file and log of a CI has."""
_INDENT = "    "
_HIDDEN = ("on", "reached", "parts", "errors", "front")


def rows(*, full: bool = False) -> Iterator[tuple[str, ResultRow]]:
    """Yield (part, row) as they are measured: `accuracy`, then `search`."""
    layers = layer_times_row()
    yield "accuracy", layers | {"reached": reaches_limits(layers)}
    for part, what, program in ELSEWHERE:
        why = f"in a checkout: python -m scripts.benchmarks.planner.{program}"
        yield part, {"on": what, "skipped": why, "reached": None}

    parts = SEARCH_PARTS if full else QUICK_PARTS
    for part in parts:
        for row in search_rows(part):
            if "reached" not in row:
                row |= {"reached": search_reaches_limits(row)}
            yield "search", row


def search_reaches_limits(row: ResultRow) -> bool | None:
    """Return True if a search row reaches its limits on time, gap and ratio; None if it has none.

    reach_s bounds the CPU seconds (the machine may be shared), reach_gap the gap; `ratio` is our
    step time over the other planner's and should not exceed `reach` (else 1).
    """
    if "skipped" in row:
        return None
    checks = []
    if "reach_s" in row:
        checks.append(row["cpu_s"] <= row["reach_s"])
    if "reach_gap" in row:
        checks.append(row["gap"] is not None and row["gap"] <= row["reach_gap"])
    if row.get("ratio") is not None:
        checks.append(row["ratio"] <= row.get("reach", 1.0) * (1 + 1e-9))
    return all(checks) if checks else None


def run(args: argparse.Namespace) -> int:
    """Print the rows; return exit code 1 if a row that was run does not reach its limits."""
    file = sys.stderr if args.json else sys.stdout
    document: dict[str, list[ResultRow]] = {"accuracy": [], "search": []}
    all_reached = True
    for part, row in rows(full=args.full):
        document[part].append(row)
        all_reached = all_reached and row["reached"] is not False
        print_row(part, row, file, brief=args.json)
    if args.json:
        json.dump(document, sys.stdout)
        print()
    return 0 if all_reached else 1


def print_row(part: str, row: ResultRow, file: Any, *, brief: bool = False) -> None:
    """Print one row for a person; `brief` leaves out its figures."""
    if row["reached"] is None:
        verdict = "skipped" if "skipped" in row else "no limit"
    else:
        verdict = "reached" if row["reached"] else "NOT REACHED"
    print(f"{part} | {verdict} | {row['on']}", file=file, flush=True)
    if brief:
        return

    for key, value in row.items():
        if key in _HIDDEN:
            continue
        line = f"{key.replace('_', ' ')}: {_words(value)}"
        lines = textwrap.wrap(line, WIDTH - len(_INDENT), subsequent_indent=_INDENT)
        print(textwrap.indent("\n".join(lines), _INDENT), file=file, flush=True)


def _words(value: Any) -> str:
    """Return a figure, or figures by name, in words."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(name)} {_words(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_words(each) for each in value)
    return "-" if value is None else str(value).replace("_", " ")
