"""Plans of random fleets in several zones, beside plans made as if zones were one, by true price.

    python -m scripts.benchmarks.planner.zone_fleets [--fleets 400] [--minutes 6] [--append]

No plan may be dearer than the one made without zones; exit code 1: one is. The fleets are those of
`tests/planner/test_zone_plans.py`. Figures go to results/zone_fleets.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from planner.search.walk.judge import zones_of
from planner.strategies import Request, plan_with
from scripts.benchmarks.provenance import provenance
from tests.planner.test_zone_plans import random_requests, true_usd, without_zones

ROOT = Path(__file__).resolve().parents[3]

OBJECTIVES = ("time", "cost")
RESULT = ROOT / "scripts/benchmarks/results/zone_fleets.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleets", type=int, default=400, help="of each objective")
    parser.add_argument("--minutes", type=float, default=6.0, help="begin no fleet after that")
    parser.add_argument("--append", action="store_true", help="go on after the recorded fleets")
    options = parser.parse_args()
    fleets = json.loads(RESULT.read_text())["fleets"] if options.append else []
    until = time.monotonic() + 60 * options.minutes
    for objective in OBJECTIVES:
        known = sum(each["objective"] == objective for each in fleets)
        requests = random_requests(options.fleets, objective)
        for number, asked in enumerate(requests):
            if time.monotonic() >= until:
                break
            if number >= known:
                fleets.append({"objective": objective, "number": number, **_compared(asked)})
    document = {**provenance(), **_summary(fleets), "fleets": fleets}
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "fleets"}))
    return int(bool(document["dearer"]))


def _compared(asked: Request) -> dict[str, Any]:
    """Return the true price of the plan and of the plan without zones, in dollars per M tokens.

    The latter is None if that plan sends data between regions that nothing links.
    """
    blind = without_zones(asked).plan
    seen = plan_with("autohet", asked)
    zones = zones_of(asked.fleet, seen.plan)
    usd_without_zones = true_usd(asked.cost, blind)
    return {
        "zones": len(asked.cost.zones),
        "zones_used": len(zones),
        "connected": asked.cost.links.zones.first_unconnected(zones) is None,
        "usd": seen.prediction.usd_per_million_tokens,
        "usd_without_zones": usd_without_zones if math.isfinite(usd_without_zones) else None,
    }


def _summary(fleets: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many plans are dearer, and the mean saving, by objective."""
    ratios = {
        objective: [
            each["usd"] / each["usd_without_zones"]
            for each in fleets
            if each["objective"] == objective and each["usd_without_zones"] is not None
        ]
        for objective in OBJECTIVES
    }
    every = list(itertools.chain(*ratios.values()))
    return {
        "what": "price of plans that know zones over plans that do not, by true price",
        "num_fleets": dict(Counter(each["objective"] for each in fleets)),
        "impossible_without_zones": sum(each["usd_without_zones"] is None for each in fleets),
        "dearer": sum(ratio > 1 + 1e-9 for ratio in every),
        "across_unlinked_regions": sum(not each["connected"] for each in fleets),
        "worst_ratio": max(every, default=None),
        "mean_ratio": {
            objective: statistics.fmean(found) for objective, found in ratios.items() if found
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
