"""Jobs with a deadline on real Ray: what `autohet train` buys, and when it ends.

    python -m scripts.benchmarks.recovery.deadline_on_ray [--minutes 9 11 15]
    [--json scripts/benchmarks/results/deadline_on_ray.json]

Each deadline is one job of 600 paced steps. Two spot nodes (0.50 $ an hour each) make one in 1.1 s,
with an on-demand node (4 $) in 0.43 s; none stands at the start. Nodes are processes of this
machine, launched by Ray's autoscaler (version 2). Exit code 1: a deadline was missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks.provenance import provenance
from tests.harness.autoscaling_cluster import at_most, autoscaling_cluster
from tests.harness.local_fleet import write_documents
from tests.harness.s3_server import s3_server

RESULTS = Path(__file__).resolve().parents[1] / "results/deadline_on_ray.json"
STEPS = 600
PRICES = {"small": ("0.5", "true"), "big": ("4", "false")}
"""Dollars an hour, and whether the type is spot."""
SPEEDS = {"relative_speed_by_gpu_type": {"A100-40": 4.0, "A10G": 1.0}, "block_forward_s": 0.02}


def train_by(minutes: int, root: Path) -> dict[str, Any]:
    """Train under one deadline; return what was asked for, when it ended and what it cost."""
    root.mkdir()
    kinds = at_most(small=2, big=1)
    for name, (usd, spot) in PRICES.items():
        labels = {"autohet.io/usd-per-hour": usd, "autohet.io/spot": spot}
        # Ray's fake provider says of each node that its type is the head's.
        kinds[name]["labels"] |= labels | {"ray.io/node-group": name}
    sections: dict[str, Any] = {
        "training": {"steps": STEPS, "decay_steps": STEPS},
        "elastic": {"deadline": f"{minutes}m", "notice_sources": ["ray"]},
        "parallelism": {"min_pipelines": 1},
        "emulation": SPEEDS,
    }
    with s3_server() as server, autoscaling_cluster(root, kinds) as document:
        sections["checkpoint"] = {"storage": server.create_bucket("deadline") + "/job"}
        job, _ = write_documents(root, {}, **sections)
        began = time.monotonic()
        command = [
            *(str(Path(sys.executable).parent / "autohet"), "train", "--json"),
            *("--job", str(job), "--cluster", str(root / "autoscaled.yaml")),
            *("--events", str(root / "events.jsonl")),
            *("--address", document["provider"]["gcs_address"]),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120 * minutes)
        seconds = time.monotonic() - began
    summary = json.loads(done.stdout)
    events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    decisions = [each["reason"] for each in events if each["kind"] == "decision"]
    return {
        "deadline_s": 60 * minutes,
        "seconds": round(seconds),
        "goal": summary["goal"],
        "steps": summary["steps"],
        "asked_for": [reason for reason in decisions if "Deciding to ask for" in reason],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=int, nargs="*", default=[9, 11, 15])
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        jobs = [train_by(minutes, Path(directory, str(minutes))) for minutes in options.minutes]
    what = "jobs with a deadline on Ray's autoscaler"
    options.json.write_text(json.dumps({"what": what, **provenance(), "jobs": jobs}, indent=1))
    return int(any(not job["goal"]["in_time"] or job["steps"] < STEPS for job in jobs))


if __name__ == "__main__":
    raise SystemExit(main())
