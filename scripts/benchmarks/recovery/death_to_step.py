"""From a death to the first new step, on this machine's CPU: eight workers over gloo, and where
each second goes.

    python -m scripts.benchmarks.recovery.death_to_step [--rounds 3] [--heartbeat-s S] [--json FILE]

Two pipelines of two stages of TP 2 on four nodes of two workers, real processes, the exact model
(its state is small: what is timed is detection, planning, groups and the first step, not bytes). A
process or a node is killed or frozen at step 20, or a node gets a notice. Seconds are those of the
controller's own `reconfigure` event, and beside them what a bystander's clock saw from the strike
to the step. The heartbeat is the default unless given, and Ray's own health check (64 s by default)
tells nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from autohet.runtime.job.elastic import ElasticSection
from tests.harness.exact_job import BATCH, LENGTH, exact_job
from tests.harness.host_memory import memory_directory, owned_memory
from tests.harness.local_fleet import Interference, trains_a_while, trains_at
from tests.harness.struck_run import StruckRun

REPOSITORY = Path(__file__).resolve().parents[3]

NODES = {"n0": 2, "n1": 2, "n2": 2, "n3": 2}
CASES = {
    "process killed": ("kill", "n3/1"),
    "process frozen": ("freeze", "n3/1"),
    "node killed": ("kill", "n3"),
    "node frozen": ("freeze", "n3"),
    "notice": ("notice", "n3"),
    "notice, nothing prepared": ("unprepared notice", "n3"),
}
NOTICE_S = 120.0
"""Seconds from a notice to the end of its node, as on EC2."""


RAY_NOTICES_S = 64.0


def plan() -> dict[str, Any]:
    pipelines = [
        {
            "num_microbatches": 4,
            "stages": [
                {
                    "first_layer": 2 * stage,
                    "num_layers": 2,
                    "workers": [f"n{2 * pipeline + stage}/0", f"n{2 * pipeline + stage}/1"],
                }
                for stage in range(2)
            ],
        }
        for pipeline in range(2)
    ]
    common = {
        "version": 1,
        "model": "exact",
        "global_batch_sequences": BATCH,
        "microbatch_sequences": 1,
    }
    return {**common, "sequence_length": LENGTH, "pipelines": pipelines}


def main() -> None:
    options = _options()
    cases: dict[str, Any] = {}
    for name in options.cases:
        mode, victim = CASES[name]
        rounds = [_strike(mode, victim, options.heartbeat_s) for _ in range(options.rounds)]
        parts = {
            part: statistics.median(r["seconds"][part] for r in rounds)
            for part in rounds[0]["seconds"]
        }
        measured = statistics.median(r["measured_s"] for r in rounds)
        cases[name] = {"median_seconds": parts, "median_measured_s": measured, "rounds": rounds}
        print(
            f"{name}: {measured:.2f} s; "
            + ", ".join(f"{part} {value:.2f}" for part, value in parts.items()),
            flush=True,
        )
    document = {
        "what": "death to first new step, 8 workers, CPU, gloo",
        "waits": _waits(options.heartbeat_s),
        "where": _where(options.commit),
        "cases": cases,
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--heartbeat-s", type=float, help="default: the job document's")
    parser.add_argument(
        "--commit", default="", help="of the tree that is run, where it is no git checkout"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _strike(mode: str, victim: str, heartbeat_s: float | None) -> dict[str, Any]:
    """One run, struck once: seconds by part, and those that passed between the strike and the next
    step's end.
    """
    directory = Path(tempfile.mkdtemp(prefix="autohet-death-"))
    memory = memory_directory(directory)
    struck_at: list[float] = []

    def strike(run: StruckRun, seen: object) -> None:
        if mode in ("kill", "freeze"):
            run.harm(mode, victim)
        else:
            run.fleet.warn(victim, NOTICE_S)
        struck_at.append(time.time())

    events = Interference()
    events.when(trains_at(20), strike)
    events.when(lambda run, seen: run.controller.memory.generation > 1, lambda run, seen: None)
    events.when(
        trains_a_while(), lambda run, seen: setattr(run.fleet, "stop_reason", "the benchmark")
    )
    elastic = {"heartbeat_timeout_s": heartbeat_s, "step_timeout_s": 60}
    job = exact_job(
        directory,
        directory,
        memory,
        plan(),
        training={"steps": 100_000, "decay_steps": 100},
        elastic=elastic,
    )
    try:
        run = StruckRun(job, directory, nodes=NODES)
        run.fleet.silent_node_s = RAY_NOTICES_S
        run.controller.memory.prepares = mode != "unprepared notice"
        with owned_memory():
            result = run.run(events)
        (change, *_) = result.summary["reconfigurations"]
        assert change["cause"] == ("death" if mode in ("kill", "freeze") else "notice")
        reconfigured = next(e for e in result.events if e["kind"] == "reconfigure")
        return {
            "seconds": change["seconds"],
            "measured_s": round(reconfigured["time"] - struck_at[0], 4),
            "steps_lost": change["steps_lost"],
            "reason": reconfigured["reason"],
            "bytes_by_tier": change["bytes_by_tier"],
            "load": round(os.getloadavg()[0], 1),
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _waits(heartbeat_s: float | None) -> dict[str, float]:
    """The silences that detection waits for."""
    timeouts = ElasticSection(heartbeat_timeout_s=heartbeat_s, step_timeout_s=60).timeouts()
    return {
        name: getattr(timeouts, name) for name in ("heartbeat_s", "suspicion_s", "node_silence_s")
    }


def _where(commit: str) -> dict[str, Any]:
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=10,
    )
    models = {
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "commit": commit or head.stdout.strip(),
        "cpu": sorted(models),
        "num_cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
