"""Run the tests that are marked `slow`, which CI leaves out, and record which of them pass.

    python -m scripts.benchmarks.quality.slow_tests [--only tests/faults ...] [--processes 2]

An hour or two on two quiet cores. Files that were not run keep their record in
`scripts/benchmarks/results/slow_tests.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.benchmarks.provenance import provenance

REPOSITORY = Path(__file__).parents[3]
RECORD = REPOSITORY / "scripts" / "benchmarks" / "results" / "slow_tests.json"
STAGES = {"plain": "slow and not cluster and not gpu", "ray": "slow and cluster and not gpu"}
"""Tests that start a Ray cluster run one after the other: Ray finds any on the machine."""


def main() -> int:
    options = parse()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    where = provenance()
    num_failed = 0
    for stage, marks in STAGES.items():
        processes = options.processes if stage == "plain" else 0
        for file, found in run_tests(marks, options.only, processes).items():
            record[file] = {**found, **where}
            num_failed += len(found["failed"])
            print(f"{file}: {found['passed']} passed, {len(found['failed'])} failed")
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return int(num_failed > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["tests"], help="files or folders")
    parser.add_argument("--processes", type=int, default=2, help="tests at a time, without Ray")
    return parser.parse_args()


def run_tests(marks: str, places: list[str], processes: int) -> dict[str, Any]:
    """Run the tests with these marks; return passed, skipped and failed ones by file."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, *places]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "-n", str(processes)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    found: dict[str, Any] = defaultdict(lambda: {"passed": 0, "skipped": 0, "failed": {}})
    for case in cases:
        of_file = found[str(case.get("file"))]
        outcome = next((each for each in case if each.tag != "properties"), None)
        if outcome is None or outcome.tag.startswith("system"):
            of_file["passed"] += 1
        elif outcome.tag == "skipped":
            of_file["skipped"] += 1
        else:
            of_file["failed"][str(case.get("name"))] = str(outcome.get("message"))[:300]
    return found


if __name__ == "__main__":
    sys.exit(main())
