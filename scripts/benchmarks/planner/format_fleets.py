"""Plans of random fleets with T4 and V100 among them, formats by GPU type on and off.

    python -m scripts.benchmarks.planner.format_fleets [--fleets 200] [--minutes 6] [--append]

No plan with formats may be slower than the one without; exit code 1: one is. The fleets are those
of `tests/harness/format_fleets.py`. Figures go to results/format_fleets.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from autohet.runtime.job import Job
from planner.inputs.cluster import Cluster
from scripts.benchmarks.provenance import provenance
from tests.harness.format_fleets import planned, random_cases

ROOT = Path(__file__).resolve().parents[3]

RESULT = ROOT / "scripts/benchmarks/results/format_fleets.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=6.0, help="begin no fleet after that")
    parser.add_argument("--append", action="store_true", help="go on after the recorded fleets")
    options = parser.parse_args()
    fleets = json.loads(RESULT.read_text())["fleets"] if options.append else []
    until = time.monotonic() + 60 * options.minutes
    for number, (job, cluster) in enumerate(random_cases(options.fleets)):
        if time.monotonic() >= until:
            break
        if number >= len(fleets):
            fleets.append({"number": number, **_compared(job, cluster)})
    document = {**provenance(), **_summary(fleets), "fleets": fleets}
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "fleets"}))
    return int(bool(document["slower"]))


def _compared(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Return the predicted seconds of a step with formats and without; null: no plan fits."""
    nodes = {kind.name: kind.max_nodes for kind in cluster.node_types}
    on, off = (planned(job, cluster, formats) for formats in ("auto", "off"))
    stages = [] if on is None else [s for p in on.plan.pipelines for s in p.stages]
    return {
        "nodes": nodes,
        "layers": (job.model.config or {})["num_hidden_layers"],
        "hidden_size": (job.model.config or {})["hidden_size"],
        "batch": job.training.global_batch_sequences,
        "length": job.training.sequence_length,
        "step_s": None if on is None else on.prediction.step_time_s,
        "step_s_without": None if off is None else off.prediction.step_time_s,
        "fp16_stages": sum(stage.compute == "fp16" for stage in stages),
        "stages": len(stages),
    }


def _summary(fleets: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many plans are slower, and the gain where both ways have a plan."""
    ratios = [
        each["step_s_without"] / each["step_s"]
        for each in fleets
        if each["step_s"] is not None and each["step_s_without"] is not None
    ]
    gained = [ratio for ratio in ratios if ratio > 1 + 1e-9]
    return {
        "what": "predicted step without fp16 on T4 and V100 over the step with it",
        "num_fleets": len(fleets),
        "no_plan_either_way": sum(each["step_s"] is None for each in fleets),
        "possible_only_with_formats": sum(
            each["step_s"] is not None and each["step_s_without"] is None for each in fleets
        ),
        "both": len(ratios),
        "slower": sum(ratio < 1 - 1e-9 for ratio in ratios),
        "lost_plan": sum(
            each["step_s"] is None and each["step_s_without"] is not None for each in fleets
        ),
        "faster": len(gained),
        "mean_ratio": statistics.fmean(ratios) if ratios else None,
        "mean_ratio_of_faster": statistics.fmean(gained) if gained else None,
        "best_ratio": max(ratios, default=None),
        "worst_ratio": min(ratios, default=None),
    }


if __name__ == "__main__":
    raise SystemExit(main())
