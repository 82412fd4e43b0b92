#!/usr/bin/env python3
"""Records FASOP's partitions, its searches and its Pareto front: results/planner_fasop.json, with the commit and the machine."""

import json
import os
import platform
import subprocess
from pathlib import Path

from autohet.cli.bench_planner_accuracy import measurements_folder
from autohet.cli.bench_planner_fasop import fasop_rows

RESULTS = Path(__file__).parent / "results" / "planner_fasop.json"


def main() -> None:
    folder = measurements_folder()
    if folder is None:
        raise SystemExit("no folder of published measurements: set AUTOHET_MEASUREMENTS")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False
    )
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    rows = fasop_rows(folder)
    document = {"commit": commit.stdout.strip(), "machine": machine | {"load": os.getloadavg()[0]}, "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print("reached" if row["reached"] else "NOT reached", "|", row["on"])


if __name__ == "__main__":
    main()
