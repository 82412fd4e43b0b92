"""Records search times, plan quality and bounds: results/planner_search.json, with the commit and
the machine.

planner_search.py [PART ...]     parts: those of PARTS; others keep their rows
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from autohet.bench.planner.searches import SEARCH_PARTS
from scripts.benchmarks.planner.exhaustive import apart_rows, exhaustive_rows, further_rows
from scripts.benchmarks.planner.fleets import fleet_rows
from scripts.benchmarks.planner.sailor import sailor_rows
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "planner_search.json"

PARTS = {
    "sailor": sailor_rows,
    "fleets": fleet_rows,
    "exhaustive": exhaustive_rows,
    "further": further_rows,
    "apart": apart_rows,
    **SEARCH_PARTS,
}


def main() -> None:
    # No measurement includes the import of scipy, which takes half a second.
    import_module("scipy.optimize")
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"parts": {}}
    now = provenance()
    document["machine"] = now["machine"]
    for part in sys.argv[1:] or PARTS:
        rows = list(PARTS[part]())
        document["parts"][part] = {"commit": now["commit"], "rows": rows}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        for row in rows:
            print(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True
            )


if __name__ == "__main__":
    main()
