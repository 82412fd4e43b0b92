"""Records search times, plan quality and bounds: results/planner_search.json, with the commit and
the machine.

planner_search.py [PART ...]     parts: those of SEARCH_PARTS; the others' recorded rows are kept
"""

import json
import sys
from pathlib import Path

from autohet.bench.planner.searches import SEARCH_PARTS, search_rows
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "planner_search.json"


def main() -> None:
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"parts": {}}
    now = provenance()
    document["machine"] = now["machine"]
    for part in sys.argv[1:] or SEARCH_PARTS:
        rows = search_rows(part)
        document["parts"][part] = {"commit": now["commit"], "rows": rows}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        for row in rows:
            print(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True
            )


if __name__ == "__main__":
    main()
