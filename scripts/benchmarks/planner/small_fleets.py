"""Searches of random fleets of up to 128 GPUs beside another checkout: results/small_fleets.json.

    small_fleets.py CHECKOUT FIRST END      seeds FIRST to END - 1

Fleets have one to four nodes of each of two to four types, so that their best plans are often
crooked: pipelines of unlike depths, sizes and types. Both checkouts search at the same time, each
in a process of its own. Seconds are the processor's, without imports.
"""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from autohet.bench.planner.synthetic import (
    GPT_26,
    TYPES,
    model_spec,
    request_of,
    synthetic_fleet,
    tie_embeddings,
)
from planner.errors import InfeasibleError
from planner.strategies import Request, plan_with

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "scripts" / "benchmarks" / "results" / "small_fleets.json"
SPECS = (
    tie_embeddings(model_spec("gpt2-like", 12, 768, 2048, 50304, 768)),
    tie_embeddings(model_spec("llama-1b", 16, 2048, 8192, 32000, 1024)),
    GPT_26,
    model_spec("llama-7b", 32, 4096, 11008, 32000, 1024),
)


def case(seed: int) -> Request:
    """Return a random model, fleet and batch of one to eight sequences a GPU."""
    rng = random.Random(seed)
    per_node = rng.choice([1, 4, 4, 8])
    kinds = rng.sample(sorted(TYPES), rng.choice([2, 2, 3, 4]))
    counts = {kind: per_node * rng.randint(1, 4) for kind in kinds}
    spec = rng.choice(SPECS)
    gpus = sum(counts.values())
    batch = max(8, gpus * rng.choice([1, 2, 4, 8]))
    fleet = synthetic_fleet(counts, per_node)
    asked = request_of(spec, fleet, batch, rng.choice([1024, 2048]))
    return replace(asked, prove=False, min_node_disjoint_holders=rng.choice([1, 2]))


def search(first: int, end: int) -> None:
    """Print seconds of the processor and of a step (null: no plan) for each seed."""
    for seed in range(first, end):
        asked = case(seed)
        begin = time.process_time()
        try:
            step_s = plan_with("autohet", asked).step_time_s
        except InfeasibleError:
            step_s = None
        row = [seed, time.process_time() - begin, step_s, len(asked.fleet.workers)]
        print(json.dumps(row), flush=True)


def main() -> None:
    if sys.argv[1] == "--search":
        search(int(sys.argv[2]), int(sys.argv[3]))
        return

    # another checkout may lack them
    from scripts.benchmarks.planner.search_pairs import summary
    from scripts.benchmarks.provenance import provenance

    before = Path(sys.argv[1]).resolve()
    searches = []
    for checkout in (before, ROOT):
        command = [sys.executable, __file__, "--search", *sys.argv[2:4]]
        environment = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        searches.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    found = [[json.loads(line) for line in each.communicate()[0].splitlines()] for each in searches]

    rows = list[dict[str, Any]]()
    for (seed, before_cpu_s, before_s, gpus), (_, cpu_s, step_s, _) in zip(*found, strict=True):
        rows.append(
            {
                "seed": seed,
                "gpus": gpus,
                "before_cpu_s": before_cpu_s,
                "cpu_s": cpu_s,
                "before_s": before_s,
                "step_time_s": step_s,
            }
        )
    ratios = summary(rows)
    document = {**provenance(), "before": before.name, **ratios, "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
