"""Peak memory of `autohet plan`, a process of its own for each fleet: results/planner_memory.json,
with the commit and the machine.

planner_memory.py FLEET...     folders with cluster.yaml and job.yaml; rows of other fleets that this commit recorded are kept
"""  # noqa: E501

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "planner_memory.json"
REACH_MIB = 512


def row(folder: Path) -> dict[str, Any]:
    """Imports, the search and what is told of its plan; seconds are the processor's."""
    command = [
        sys.executable,
        "-m",
        "autohet.cli.main",
        "plan",
        "--json",
        "--job",
        str(folder / "job.yaml"),
    ]
    command += ["--cluster", str(folder / "cluster.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        document = json.loads(child.stdout.read())
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    limits = (document["predicted"] or {}).get("memory_limit_bytes_by_worker", {})
    return {
        "fleet": folder.name,
        "feasible": document["feasible"],
        "gpus_used": len(limits),
        "peak_mib": used.ru_maxrss // 1024,
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "reach_mib": REACH_MIB,
    }


def main() -> None:
    now, rows = provenance(), dict[str, dict[str, Any]]()
    if RESULTS.exists() and (known := json.loads(RESULTS.read_text()))["commit"] == now["commit"]:
        rows = {each["fleet"]: each for each in known["rows"]}
    for folder in map(Path, sys.argv[1:]):
        rows[folder.name] = row(folder)
        print(rows[folder.name], flush=True)
        every = sorted(rows.values(), key=lambda each: int(each["fleet"]))
        RESULTS.write_text(json.dumps({**now, "rows": every}, indent=1) + "\n")


if __name__ == "__main__":
    main()
