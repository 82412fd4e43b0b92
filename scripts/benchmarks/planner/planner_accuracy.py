"""Records the accuracy of the cost model: results/planner_accuracy.json, with the commit and the
machine.
"""

import json
from pathlib import Path

from autohet.bench.planner.layer_times import reaches_limits
from scripts.benchmarks.planner.published_accuracy import accuracy_rows
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "planner_accuracy.json"


def main() -> None:
    document = provenance() | {
        "rows": [row | {"reached": reaches_limits(row)} for row in accuracy_rows()]
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["rows"]:
        verdict = {
            True: "reached",
            False: "NOT reached",
            None: "skipped" if "skipped" in row else "no limit",
        }
        print(verdict[row["reached"]], "|", row["on"])
        print(
            "   ", {k: v for k, v in row.items() if k not in ("on", "reached", "parts", "errors")}
        )


if __name__ == "__main__":
    main()
