"""SPMD programs and uneven stages on fleets of paced processes: the plan that is found beside even
and proportional ones, predicted and measured.

    python -m scripts.benchmarks.step.spmd_paced [--steps 5] [--cells lost_gpu ...] [--json
    scripts/benchmarks/results/spmd_paced.json]

Each worker is a real process with real gloo collectives; its operators take the time of the GPU
type that it poses as (`autohet.runtime.step.pacing`). Links are this machine's loopback, not slowed
down: the cells show what a share costs, not what a slow network does.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from planner.plans.plan import Plan
from planner.search.memory import search_with_memory
from planner.search.problem.request import Request
from planner.strategies.autohet_uneven import uneven_stages
from scripts.benchmarks.provenance import provenance
from tests.harness.paced_programs import (
    LENGTH,
    PacedFleet,
    chosen_plan,
    data_parallel_plan,
    predicted_and_measured,
    speeds_of,
)

RESULTS = Path(__file__).parents[1] / "results" / "spmd_paced.json"


def plans_of(name: str, of: PacedFleet) -> dict[str, Plan]:
    """The plan of hap, or of autohet with uneven stages, and those that it is compared with."""
    if name == "uneven_stage":
        return {"autohet": chosen_plan(of, "autohet"), "even_stages": best_of_even_stages(of)}
    count = len(of.fleet().workers)
    plans = {"hap": chosen_plan(of, "hap")}
    if name == "lost_gpu":
        return plans | {"symmetric": chosen_plan(of, "megatron")}
    even, proportional = (
        data_parallel_plan(of, [1.0] * count),
        data_parallel_plan(of, speeds_of(of)),
    )
    return plans | {"even": even, "proportional": proportional}


def best_of_even_stages(of: PacedFleet) -> Plan:
    """What autohet finds where no stage may have uneven shares."""
    cost = of.cost()
    return search_with_memory(Request(cost.fleet, cost.spec, cost, of.batch, LENGTH)).plan


CELLS = {
    "fast_and_two_slow": (
        "1 GPU of speed 2 and 2 of speed 1 in one stage, 16 sequences",
        PacedFleet((("A100-40", 1, 1), ("A10G", 1, 2)), {"A100-40": 2.0, "A10G": 1.0}, 16, 0.03),
    ),
    "fast_and_slow": (
        (
            "1 GPU of speed 5 and 1 of speed 1, 4 sequences: in proportion the slow one has a whole"
            " sequence"
        ),
        PacedFleet((("A100-40", 1, 1), ("T4", 1, 1)), {"A100-40": 5.0, "T4": 1.0}, 4, 0.1),
    ),
    "lost_gpu": (
        "a node of 4 that lost a GPU, 16 sequences; beside the best symmetric plan",
        PacedFleet((("L40S", 3, 1),), {"L40S": 1.0}, 16, 0.03),
    ),
    "uneven_stage": (
        (
            "a node of 4 that lost a GPU, 2 sequences: the plan of autohet beside its best of even"
            " stages"
        ),
        PacedFleet((("L40S", 3, 1),), {"L40S": 1.0}, 2, 0.2),
    ),
}


def measured(name: str, steps: int) -> dict[str, Any]:
    what, of = CELLS[name]
    rows: dict[str, Any] = {}
    for kind, plan in plans_of(name, of).items():
        predicted_s, measured_s = predicted_and_measured(of, plan, steps)
        shares = (
            dict(plan.spmd.units)
            if plan.spmd is not None
            else [s.tp_shares for s in uneven_stages(plan)] or None
        )
        rows[kind] = {
            "gpus": len(plan.workers),
            "microbatches": [p.num_microbatches for p in plan.pipelines],
            "units": shares,
            "predicted_s": predicted_s,
            "measured_s": measured_s,
            "measured_over_predicted": measured_s / predicted_s,
        }
        error = measured_s / predicted_s - 1
        print(
            f"{name}, {kind}: predicted {predicted_s:.3f} s, measured {measured_s:.3f} s"
            f" ({error:+.1%})",
            flush=True,
        )
    (found, ours), *others = rows.items()
    for _, row in others:
        row[f"{found}_faster_predicted"] = row["predicted_s"] / ours["predicted_s"]
        row[f"{found}_faster_measured"] = row["measured_s"] / ours["measured_s"]
    return {"what": what, "load": os.getloadavg()[0], "plans": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    cells: dict[str, Any] = {}
    for name in options.cells:
        cells[name] = measured(name, options.steps)
        options.json.write_text(
            json.dumps({**provenance(), "steps": options.steps, "cells": cells}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
