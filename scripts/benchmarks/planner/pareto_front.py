"""The front of the README's pair, gpt2.yaml on aws-mixed-spot.yaml: results/pareto_front.json.

    pareto_front.py                   the front and the plans of the other objectives
    pareto_front.py --every SECONDS   also each fleet searched in full, for so many seconds; a later
                                      run goes on with the fleets that are left

`worst_over_every` is the largest ratio of the front's step to that of any plan that a full search
of any fleet found, at the price of that plan or below it. Seconds are the processor's.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autohet.driver.loop.planning import make_planning
from autohet.runtime.job import Job
from planner.errors import InfeasibleError
from planner.inputs.cluster import cluster_from_yaml
from planner.search.problem.request import Answer, Request, narrow_to
from planner.strategies import plan_with
from planner.strategies.fleets import FleetSpace, TypeCounts
from scripts.benchmarks.provenance import provenance

JOB = "cluster_configs/jobs/gpt2.yaml"
CLUSTER = "cluster_configs/aws-mixed-spot.yaml"
RESULT = Path(__file__).parents[1] / "results" / "pareto_front.json"
OBJECTIVES: tuple[Mapping[str, Any], ...] = (
    {"objective": "pareto"},
    {"objective": "cost"},
    {"objective": "time", "max_usd_per_hour": 50.0},
)


def request_of(**wishes: Any) -> Request:
    cluster = cluster_from_yaml(CLUSTER)
    planning = make_planning(Job.from_yaml(JOB), zones=cluster.zones)
    fleet = cluster.fleet()
    return replace(planning.request(fleet, planning.make_cost(fleet)), **wishes)


def row(answer: Answer) -> dict[str, Any]:
    said = answer.prediction
    return {
        "step_time_s": said.step_time_s,
        "usd_per_hour": said.usd_per_hour,
        "usd_per_million_tokens": said.usd_per_million_tokens,
    }


def measured(wishes: Mapping[str, Any]) -> dict[str, Any]:
    request = request_of(**wishes)
    begin = time.process_time()
    answer = plan_with("autohet", request)
    return {
        **wishes,
        "processor_s": time.process_time() - begin,
        "fleets_looked_at": answer.search.fleets_searched,
        "fleets": answer.search.fleets,
        "plans": [row(each) for each in answer.front or (answer,)],
    }


def search_every(known: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Each fleet's answer by its numbers of nodes; None where the search refuses it."""
    request = request_of(objective="time", prove=False)
    space = FleetSpace(request)
    begin = time.monotonic()
    for counts in space.all(10**6) or ():
        key = " ".join(map(str, counts))
        if key not in known and time.monotonic() - begin < seconds:
            known[key] = searched(request, space, counts)
    return known


def searched(request: Request, space: FleetSpace, counts: TypeCounts) -> dict[str, Any] | None:
    try:
        return row(plan_with("autohet", narrow_to(request, space.fleet(counts))))
    except InfeasibleError:
        return None


def worst(front: list[dict[str, Any]], every: dict[str, Any]) -> float:
    ratios = [1.0]
    for found in every.values():
        if found is not None:
            price = found["usd_per_hour"] + 1e-9
            met = [each["step_time_s"] for each in front if each["usd_per_hour"] <= price]
            ratios.append(min(met, default=float("inf")) / found["step_time_s"])
    return max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=float, default=0.0, metavar="SECONDS")
    seconds = parser.parse_args().every
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    runs = list(map(measured, OBJECTIVES))
    every = search_every(before.get("every_fleet", {}), seconds)
    front = runs[0]["plans"]
    document = {
        **provenance(),
        "runs": runs,
        "every_fleet": every,
        "fleets_searched_in_full": len(every),
        "worst_over_every": worst(front, every),
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
