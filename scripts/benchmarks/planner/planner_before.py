"""Plans of a former planner beside today's on the same random fleets: results/planner_before.json,
with the commit and the machine.

    planner_before.py FLEET...     folders with cluster.yaml, job.yaml and before.plan.json (of AUTOHET_MEASUREMENTS's data/fleets); rows
                                   of other fleets that this commit recorded are kept

Seconds of the search are its processor's, the bound included, since the machine is shared.

Today's memory model charges more than the one under which the former plans were chosen, so that
many of them fit no more. Two comparisons are fair, and both sides are costed by today's model in
either:

* `lifted`: on each fleet every GPU's limit is raised, for both, to what the former plan's fullest
  worker needs, and today's planner searches under that limit;
* `repaired`: limits as they are; each stage of the former plan that does not fit recomputes or
  shares out optimizer state, as little as makes it fit, and today's planner may do the same where
  that is faster (`auto`). Fleets where that does not help it are left out.
"""  # noqa: E501

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from planner.cost.layers.layer_costs import Assumed
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, framework_parameters
from planner.errors import InfeasibleError
from planner.inputs.cluster import cluster_from_yaml
from planner.plans.plan import Plan
from planner.strategies import Request, plan_with
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "planner_before.json"
BANDS = (16, 64, 256, 1024)


def request_of(folder: Path, lifted: float | None = None, *, auto: bool = False) -> Request:
    """The fleet's planning problem; with so many times the usable memory of each GPU, and nothing
    proved. auto: with memory choices also where something fits without.
    """
    job = Job.from_yaml(folder / "job.yaml")
    inputs = planning_inputs(job)
    parameters = framework_parameters(OURS, inputs.parameters)
    parameters = replace(
        parameters, memory_margin=1 - (1 - parameters.memory_margin) * (lifted or 1.0)
    )
    fleet = inputs.fleet(cluster_from_yaml(folder / "cluster.yaml").fleet())
    cost = inputs.cost_model(fleet, parameters=parameters)
    cost.choices = replace(cost.choices, only_if_needed=cost.choices.only_if_needed and not auto)
    batch, length = job.training.global_batch_sequences, job.training.sequence_length
    return Request(
        fleet,
        inputs.spec,
        cost,
        batch,
        length,
        clock=time.process_time,
        prove=lifted is None and not auto,
    )


def repaired(cost: CostModel, plan: Plan) -> Plan:
    """With what its stages need to do for memory."""
    ways = cost.choices.recompute
    assumed = Assumed(ways[-1], max(1, len(plan.pipelines)), choices=ways)
    return cost.with_assumption(assumed).stage_choices.working_ahead(plan)


def seconds(request: Request) -> float | None:
    try:
        return plan_with("autohet", request).prediction.step_time_s
    except InfeasibleError:
        return None


def row(folder: Path) -> dict[str, Any]:
    request = request_of(folder)
    plan = Plan.from_json((folder / "before.plan.json").read_text())
    before = request.cost.predict(plan)
    needed = max(1.0, before.tightest_worker[1] * (1 + 1e-9))
    mended = request.cost.predict(repaired(request.cost, plan))
    begin, now = time.process_time(), seconds(request)
    spent = time.process_time() - begin
    lifted = now if needed == 1.0 else seconds(request_of(folder, needed))
    chosen = now if needed == 1.0 or not mended.fits else seconds(request_of(folder, auto=True))
    return {
        "fleet": folder.name,
        "gpus": len(request.fleet.workers),
        "search_cpu_s": round(spent, 2),
        "before_needs": round(needed, 4),
        "new_s": now,
        "before_s": before.step_time_s,
        "lifted_new_s": lifted,
        "repaired_new_s": chosen,
        "repaired_before_s": mended.step_time_s if mended.fits else None,
    }


def bands(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Ratios new / before by size, geometric means."""
    for least, most in zip((0, *BANDS), BANDS):
        mine = [each for each in rows if least < each["gpus"] <= most]
        if not mine:
            continue
        as_is = [
            r["new_s"] / r["before_s"] for r in mine if r["before_needs"] == 1.0 and r["new_s"]
        ]
        lifted = [r["lifted_new_s"] / r["before_s"] for r in mine if r["lifted_new_s"]]
        repaired_ = [
            r["repaired_new_s"] / r["repaired_before_s"]
            for r in mine
            if r["repaired_before_s"] and r["repaired_new_s"]
        ]
        named = {"fits as it is": as_is, "lifted": lifted, "repaired": repaired_}
        yield {
            "gpus": f"{least + 1} to {most}",
            "fleets": len(mine),
            "search_cpu_s": median(r["search_cpu_s"] for r in mine),
        } | {
            name: {
                "fleets": len(found),
                "mean": math.exp(fmean(map(math.log, found))),
                "p95": _p95(found),
                "worst": max(found),
            }
            for name, found in named.items()
            if found
        }


def _p95(ratios: list[float]) -> float:
    return sorted(ratios)[math.ceil(0.95 * len(ratios)) - 1]


def main() -> None:
    now, rows = provenance(), dict[str, dict[str, Any]]()
    if RESULTS.exists() and (known := json.loads(RESULTS.read_text()))["commit"] == now["commit"]:
        rows = {each["fleet"]: each for each in known["rows"]}
    for folder in map(Path, sys.argv[1:]):
        if (folder / "before.plan.json").exists():
            rows[folder.name] = row(folder)
            print(rows[folder.name], flush=True)
            every = sorted(rows.values(), key=lambda each: int(each["fleet"]))
            RESULTS.write_text(
                json.dumps({**now, "bands": list(bands(every)), "rows": every}, indent=1) + "\n"
            )
    for each in bands(list(rows.values())):
        print(each)


if __name__ == "__main__":
    main()
