"""`autohet bench planner`: accuracy of the cost model, and the searches where their benchmark is installed."""

import argparse
import importlib
import importlib.util
import json
import sys
from typing import Any

from autohet.cli.bench_planner_accuracy import accuracy_rows, reached

_SEARCH = "autohet.cli.bench_planner_search"


def rows() -> dict[str, list[dict[str, Any]]]:
    """Rows by part: `accuracy`, and `search` (module `bench_planner_search`, function `search_rows`)."""
    document = {"accuracy": [row | {"reached": reached(row)} for row in accuracy_rows()]}
    if importlib.util.find_spec(_SEARCH) is not None:
        document["search"] = importlib.import_module(_SEARCH).search_rows()
    return document


def run(args: argparse.Namespace) -> int:
    """Prints the rows; exit code 1 where one that was run does not reach what it should."""
    document = rows()
    if args.json:
        json.dump(document, sys.stdout)
        print()
    else:
        for part, found in document.items():
            for row in found:
                _print(part, row)
    return int(any(row.get("reached") is False for found in document.values() for row in found))


def _print(part: str, row: dict[str, Any]) -> None:
    verdict = {True: "reached", False: "NOT REACHED", None: "skipped"}[row.get("reached")]
    print(f"{part} | {verdict} | {row['on']}")
    for key, value in row.items():
        if key not in ("on", "reached", "parts", "errors"):
            print(f"    {key}: {value}")
