"""Run the whole fault matrix and record what came of each cell.

    python -m scripts.benchmarks.recovery.fault_matrix [--times 3] [--processes 2] [--only forward]
    [--json results/fault_matrix.json]

Cells are those of tests/faults/fault_matrix.py, each a run of the exact model that is struck once
and must end bit-equal to an undisturbed one. With `--times`, the whole matrix again and again; the
document is written after each time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]


def main() -> int:
    options = _options()
    rounds: list[dict[str, Any]] = (
        json.loads(options.json.read_text())["rounds"] if options.append else []
    )
    earlier = len(rounds)
    for _ in range(options.times):
        rounds.append({"where": _where(options.commit), **_run(options.only, options.processes)})
        document = {"what": "fault matrix on the exact model, real processes", "rounds": rounds}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(
            f"{rounds[-1]['passed']} of {rounds[-1]['cells']} cells in"
            f" {rounds[-1]['seconds']:.0f} s",
            flush=True,
        )
    return 0 if all(each["passed"] == each["cells"] for each in rounds[earlier:]) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument(
        "--append", action="store_true", help="to the rounds that the document has already"
    )
    parser.add_argument("--only", default="", help="as pytest's -k")
    parser.add_argument("--processes", type=int, default=1, help="cells that run side by side")
    parser.add_argument(
        "--commit", default="", help="of the tree that is run, where it is no git checkout"
    )
    parser.add_argument(
        "--json", type=Path, default=REPOSITORY / "scripts/benchmarks/results/fault_matrix.json"
    )
    return parser.parse_args()


def _run(only: str, processes: int) -> dict[str, Any]:
    """One pass over the matrix, `processes` cells at a time: seconds of each cell, and what
    failed.
    """
    load, began = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/faults/test_matrix.py",
            f"--junitxml={report}",
            "-k",
            only,
            "-n",
            str(processes),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, timeout=7200
        )
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    cells = {_name(case): round(float(case.get("time", 0)), 2) for case in cases}
    failed = {_name(case): _reason(case) for case in cases if _reason(case)}
    seconds = round(time.monotonic() - began, 1)
    return {
        "cells": len(cells),
        "passed": len(cells) - len(failed),
        "failed": failed,
        "seconds": seconds,
        "load_before": round(load, 1),
        "side_by_side": processes,
        "seconds_by_cell": cells,
    }


def _name(case: ElementTree.Element) -> str:
    return str(case.get("name")).removeprefix("test_cell[").removesuffix("]")


def _reason(case: ElementTree.Element) -> str:
    found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    return "" if found is None else str(found.get("message"))[:300]


def _where(commit: str) -> dict[str, Any]:
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=10,
    )
    models = {
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "commit": commit or head.stdout.strip(),
        "cpu": sorted(models),
        "num_cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
