"""Strike jobs at random on real processes, and compare them with one undisturbed process.

    python -m scripts.benchmarks.recovery.chaos [--seeds 1,2,3,4] [--strikes 50] [--minutes 5]
    [--append] [--raylets] [--json scripts/benchmarks/results/chaos.json] [--keep DIRECTORY]

The product's controller, workers, agents, planner and storage run the exact model on a fleet of
plain processes (tests/harness/process_fleet.py). Workers, agents, nodes and the driver are killed
and frozen, nodes come back under the name of one that is gone and with other GPUs, notices are
given, repeated and withdrawn, the storage is away, read-only and full, disks and host memory are
full, snapshots are flipped, and workers are killed inside rebuilds.

With --raylets the job runs on a real Ray cluster on this machine instead, and the raylets of its
nodes are killed and frozen (tests/harness/chaos/raylets.py).

Each seed gives one sequence of strikes (tests/harness/chaos/strikes.py). Afterwards every step has
the loss of the undisturbed process, the last checkpoint has its bits, no step was lost while a
holder lived, and no run ended early. Exit code 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.benchmarks.provenance import provenance
from tests.harness.chaos.judge import judge, save_logs
from tests.harness.chaos.lives import strike_job
from tests.harness.chaos.places import make_places
from tests.harness.chaos.raylets import RAYLET_WEIGHTS, strike_raylets
from tests.harness.chaos.strikes import draw_strikes
from tests.harness.exact_job import Reference, train_alone

REPOSITORY = Path(__file__).resolve().parents[3]

STEPS, STRIKES_A_JOB = 60, 12
RAYLET_STEPS, RAYLET_STRIKES_A_JOB = 120, 5
RESULTS = REPOSITORY / "scripts/benchmarks/results"


def main() -> int:
    options = _options()
    steps = RAYLET_STEPS if options.raylets else STEPS
    seeds = [int(seed) for seed in options.seeds.split(",")]
    jobs = json.loads(options.json.read_text())["jobs"] if options.append else []
    until = time.monotonic() + 60 * options.minutes
    broken = False
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        reference = _reference(root, steps)
        for seed in seeds:
            while _num_drawn(jobs, seed) < options.strikes and time.monotonic() < until:
                job = _strike(seed, jobs, options, root, reference)
                broken = broken or bool(job["wrong"])
                jobs.append(job)
                print(json.dumps(job), flush=True)
                options.json.write_text(json.dumps(_document(jobs), indent=1) + "\n")
    return int(broken)


def strike_parser(
    description: str | None, seeds: str, strikes: int, minutes: float
) -> argparse.ArgumentParser:
    """Return the options that benchmarks of drawn strikes share, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default=seeds)
    parser.add_argument("--strikes", type=int, default=strikes, help="of each seed")
    parser.add_argument("--minutes", type=float, default=minutes, help="start no job after that")
    parser.add_argument(
        "--append", action="store_true", help="go on after the jobs that the document has"
    )
    parser.add_argument("--keep", type=Path, help="keep the files of jobs that went wrong here")
    return parser


def _options() -> argparse.Namespace:
    parser = strike_parser(__doc__, "1,2,3,4", 50, 5.0)
    parser.add_argument("--raylets", action="store_true", help="strike raylets of a Ray cluster")
    parser.add_argument("--json", type=Path, help="default: chaos.json, or chaos_raylets.json")
    options = parser.parse_args()
    if options.json is None:
        options.json = RESULTS / ("chaos_raylets.json" if options.raylets else "chaos.json")
    return options


def _reference(root: Path, steps: int) -> Reference:
    for name in ("shared", "alone"):
        (root / name).mkdir()
    training = {"steps": steps, "decay_steps": steps}
    return train_alone(root / "alone", root / "shared", training=training)


def _num_drawn(jobs: list[dict[str, Any]], seed: int) -> int:
    """How many of a seed's strikes came, or were left out."""
    return sum(job["strikes"] + job["left_out"] for job in jobs if job["seed"] == seed)


def _strike(
    seed: int,
    jobs: list[dict[str, Any]],
    options: argparse.Namespace,
    root: Path,
    reference: Reference,
) -> dict[str, Any]:
    """One job under the next strikes of a seed."""
    drawn = _num_drawn(jobs, seed)
    a_job = RAYLET_STRIKES_A_JOB if options.raylets else STRIKES_A_JOB
    last = min(drawn + a_job, options.strikes)
    with make_places(root / f"seed-{seed}-from-{drawn}") as places:
        if options.raylets:
            strikes = draw_strikes(seed, last, RAYLET_WEIGHTS)[drawn:]
            struck = strike_raylets(places, root / "shared", RAYLET_STEPS, strikes)
        else:
            strikes = draw_strikes(seed, last)[drawn:]
            struck = strike_job(places, root / "shared", STEPS, strikes)
        found = judge(struck, reference)
        if found["wrong"] and options.keep is not None:
            save_logs(struck, options.keep / f"seed-{seed}-from-{drawn}")
    return {"seed": seed, "first": drawn, **found, "commit": provenance()["commit"]}


def _document(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    for job in jobs:
        kinds.update(job["by_kind"])
    return {
        "what": "random strikes on the exact model, real processes",
        **provenance(),
        "strikes": sum(job["strikes"] for job in jobs),
        "left_out": sum(job["left_out"] for job in jobs),
        "seeds": sorted({job["seed"] for job in jobs}),
        "by_kind": dict(sorted(kinds.items())),
        "wrong": [
            f"seed {job['seed']} from {job['first']}: {wrong}"
            for job in jobs
            for wrong in job["wrong"]
        ],
        "jobs": jobs,
    }


if __name__ == "__main__":
    raise SystemExit(main())
