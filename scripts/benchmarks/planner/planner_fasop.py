"""Records FASOP's partitions, its searches and its Pareto front: results/planner_fasop.json, with
the commit and the machine.
"""

import json
from pathlib import Path

from scripts.benchmarks.planner.fasop import fasop_rows
from scripts.benchmarks.planner.measurements import measurements_folder
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "planner_fasop.json"


def main() -> None:
    folder = measurements_folder()
    if folder is None:
        raise SystemExit("no folder of published measurements: set AUTOHET_MEASUREMENTS")
    rows = fasop_rows(folder)
    document = provenance() | {"rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print("reached" if row["reached"] else "NOT reached", "|", row["on"])


if __name__ == "__main__":
    main()
