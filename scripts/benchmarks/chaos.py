"""Strike jobs at random on real processes, and compare them with one undisturbed process.

    python scripts/benchmarks/chaos.py [--seeds 1,2,3,4] [--strikes 50] [--minutes 5] [--append]
    [--json scripts/benchmarks/results/chaos.json] [--keep DIRECTORY]

The product's controller, workers, agents, planner and storage run the exact model on a fleet of
plain processes (tests/harness/process_fleet.py). Workers, agents, nodes and the driver are killed
and frozen, nodes come back under the name of one that is gone and with other GPUs, notices are
given, repeated and withdrawn, the storage is away, read-only and full, disks and host memory are
full, snapshots are flipped, and workers are killed inside rebuilds.

Each seed gives one sequence of strikes (tests/harness/chaos/strikes.py). Afterwards every step has
the loss of the undisturbed process, the last checkpoint has its bits, no step was lost while a
holder lived, and no run ended early. Exit code 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from provenance import provenance  # noqa: E402

from tests.harness.chaos.judge import judge, save_logs  # noqa: E402
from tests.harness.chaos.lives import strike_job  # noqa: E402
from tests.harness.chaos.places import make_places  # noqa: E402
from tests.harness.chaos.strikes import draw_strikes  # noqa: E402
from tests.harness.exact_job import Reference, train_alone  # noqa: E402

STEPS, STRIKES_A_JOB = 60, 12


def main() -> int:
    options = _options()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    jobs = json.loads(options.json.read_text())["jobs"] if options.append else []
    until = time.monotonic() + 60 * options.minutes
    broken = False
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        reference = _reference(root)
        for seed in seeds:
            while _num_drawn(jobs, seed) < options.strikes and time.monotonic() < until:
                job = _strike(seed, jobs, options, root, reference)
                broken = broken or bool(job["wrong"])
                jobs.append(job)
                print(json.dumps(job), flush=True)
                options.json.write_text(json.dumps(_document(jobs), indent=1) + "\n")
    return int(broken)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3,4")
    parser.add_argument("--strikes", type=int, default=50, help="of each seed")
    parser.add_argument("--minutes", type=float, default=5.0, help="start no job after that")
    parser.add_argument(
        "--append", action="store_true", help="go on after the jobs that the document has"
    )
    parser.add_argument("--keep", type=Path, help="keep the logs of jobs that broke a promise here")
    where = REPOSITORY / "scripts/benchmarks/results/chaos.json"
    parser.add_argument("--json", type=Path, default=where)
    return parser.parse_args()


def _reference(root: Path) -> Reference:
    for name in ("shared", "alone"):
        (root / name).mkdir()
    training = {"steps": STEPS, "decay_steps": STEPS}
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
    last = min(drawn + STRIKES_A_JOB, options.strikes)
    with make_places(root / f"seed-{seed}-from-{drawn}") as places:
        struck = strike_job(places, root / "shared", STEPS, draw_strikes(seed, last)[drawn:])
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
