#!/usr/bin/env python3
"""Records search times, plan quality and bounds: results/planner_search.json, with the commit and the machine.

planner_search.py [PART ...]     parts: sailor metis fleets exhaustive scale replan; the others' recorded rows are kept
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from autohet.cli.bench_planner_search import search_rows

RESULTS = Path(__file__).parent / "results" / "planner_search.json"
PARTS = ("sailor", "metis", "fleets", "exhaustive", "scale", "replan")


def main() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False
    ).stdout.strip()
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"parts": {}}
    document["machine"] = {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    for part in sys.argv[1:] or PARTS:
        rows = search_rows((part,))
        document["parts"][part] = {"commit": commit, "rows": rows}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        for row in rows:
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


if __name__ == "__main__":
    main()
