"""Searches of this checkout beside those of another one, fleet by fleet: results/search_pairs.json.

    search_pairs.py CHECKOUT FLEET...     folders with cluster.yaml and job.yaml

Each search runs in a process of its own, the two of a fleet one after the other, the first of them
by turns. Seconds are the processor's, without imports, since the machine may be shared; rows of
other fleets that this commit recorded against the same checkout are kept.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.benchmarks.provenance import provenance

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "scripts" / "benchmarks" / "results" / "search_pairs.json"
SEARCH = """
import gc, importlib, json, sys, time
from pathlib import Path
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from planner.errors import InfeasibleError
from planner.inputs.cluster import cluster_from_yaml
from planner.strategies import Request, plan_with
importlib.import_module("scipy.optimize")
gc.set_threshold(300_000)  # as autohet plan
folder = Path(sys.argv[1])
job = Job.from_yaml(folder / "job.yaml")
inputs = planning_inputs(job)
fleet = inputs.fleet(cluster_from_yaml(folder / "cluster.yaml").fleet())
training = job.training
asked = Request(fleet, inputs.spec, inputs.cost_model(fleet),
                training.global_batch_sequences, training.sequence_length)
begin = time.process_time()
try:
    step_s = plan_with("autohet", asked).step_time_s
except InfeasibleError:
    step_s = None
print(json.dumps([time.process_time() - begin, step_s, len(fleet.workers)]))
"""


def search(checkout: Path, folder: Path) -> tuple[float, float | None, int]:
    """Return the processor seconds of a search, its step time (None: no plan) and the GPUs."""
    done = subprocess.run(
        [sys.executable, "-c", SEARCH, str(folder)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, step_s, gpus = json.loads(done.stdout)
    return seconds, step_s, gpus


def row(before: Path, folder: Path, *, is_odd: bool) -> dict[str, Any]:
    """Search a fleet by both checkouts."""
    found = {}
    for checkout in [before, ROOT] if is_odd else [ROOT, before]:
        found[checkout] = search(checkout, folder)
    before_cpu_s, before_s, gpus = found[before]
    cpu_s, step_s, _ = found[ROOT]
    return {
        "fleet": folder.name,
        "gpus": gpus,
        "before_cpu_s": before_cpu_s,
        "cpu_s": cpu_s,
        "before_s": before_s,
        "step_time_s": step_s,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of this checkout to the other one."""
    times = [each["cpu_s"] / each["before_cpu_s"] for each in rows]
    both = [each for each in rows if each["before_s"] and each["step_time_s"]]
    steps = [each["step_time_s"] / each["before_s"] for each in both]
    total_s = sum(each["cpu_s"] for each in rows)
    return {
        "fleets": len(rows),
        "mean_of_ratios": fmean(times),
        "ratio_of_sums": total_s / sum(each["before_cpu_s"] for each in rows),
        "mean_step": math.exp(fmean(map(math.log, steps))),
        "worst_step": max(steps),
        "best_step": min(steps),
    }


def main() -> None:
    before = Path(sys.argv[1]).resolve()
    now = provenance() | {"before": before.name}
    rows = dict[str, dict[str, Any]]()
    if RESULTS.exists():
        known = json.loads(RESULTS.read_text())
        if (known["commit"], known["before"]) == (now["commit"], now["before"]):
            rows = {each["fleet"]: each for each in known["rows"]}
    for number, folder in enumerate(map(Path, sys.argv[2:])):
        rows[folder.name] = row(before, folder, is_odd=number % 2 == 1)
        every = sorted(rows.values(), key=lambda each: int(each["fleet"]))
        document = {**now, **summary(every), "rows": every}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(summary(list(rows.values())), indent=1))


if __name__ == "__main__":
    main()
