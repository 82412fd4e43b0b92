"""From a death to the first new step, on this machine's CPU: eight workers over gloo, and where
each second goes.

    python -m scripts.benchmarks.recovery.death_to_step [--rounds 3] [--heartbeat-s S] [--json FILE]
    python -m scripts.benchmarks.recovery.death_to_step --cases --paced 6 [--paced-again 3]

Two pipelines of two stages of TP 2 on four nodes of two workers, real processes, the exact model
(its state is small: what is timed is detection, planning, groups and the first step, not bytes). A
process or a node is killed or frozen at step 20, or a node gets a notice. `--paced`: steps of 12 s,
of three pipelines of one worker, one of which dies at a random moment. Seconds are those of the
controller's own `reconfigure` event, and beside them what a bystander's clock saw from the strike
to the step. The heartbeat is the default unless given, and Ray's own health check (64 s by default)
tells nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from autohet.driver.loop.emulated_paces import paces_of
from autohet.runtime.job.elastic import ElasticSection
from tests.harness.exact_job import BATCH, LAYERS, LENGTH, exact_job
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
    "notice, with a stop": ("stopping notice", "n3"),
    "notice, nothing prepared": ("unprepared notice", "n3"),
}
NOTICE_S = 120.0
"""Seconds from a notice to the end of its node, as on EC2."""


RAY_NOTICES_S = 64.0
WHOLE = {"first_layer": 0, "num_layers": LAYERS}
ROW_S = 4.0
"""Seconds of a row's passes in paced steps, which have three rows a pipeline."""


def plan() -> dict[str, Any]:
    pipelines = [
        {
            "num_microbatches": 4,
            "stages": [
                {
                    "first_layer": stage,
                    "num_layers": 1,
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
    draw = random.Random(options.seed)
    for number in range(options.paced):
        moment = draw.random()
        # In turns, so that both meet the machine's load.
        for keeps in (True, False) if number < options.paced_again else (True,):
            found = _strike_paced(moment, keeps=keeps)
            cases.setdefault(f"paced, {'kept' if keeps else 'run again'}", []).append(found)
            print(keeps, found, flush=True)
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
    parser.add_argument("--paced", type=int, default=0, help="deaths in paced steps")
    parser.add_argument("--paced-again", type=int, default=0, help="of these, also without a gate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--heartbeat-s", type=float, help="default: the job document's")
    parser.add_argument(
        "--commit", default="", help="of the tree that is run, where it is no git checkout"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def paced_plan() -> dict[str, Any]:
    """Three pipelines of one worker with 3, 3 and 2 rows; the survivors of a death have 4 each."""
    pipelines = [
        {"num_microbatches": count, "stages": [{**WHOLE, "workers": [f"n{number}/0"]}]}
        for number, count in enumerate((3, 3, 2))
    ]
    return {**plan(), "pipelines": pipelines}


def _strike_paced(moment: float, *, keeps: bool) -> dict[str, Any]:
    """Kill one of three pipelines at this part of a paced step.

    over_makespan_s: seconds from the end of the step before to that of the struck one, beyond the
    passes of the survivors' four rows: three of their own and one of the dead's.
    """
    directory = Path(tempfile.mkdtemp(prefix="autohet-death-"))
    began: list[float] = []

    def due(run: StruckRun, seen: object) -> bool:
        step_s = 3 * ROW_S
        return bool(began) and time.time() - began[0] >= moment * step_s

    events = Interference()
    events.when(trains_at(2), lambda run, seen: began.append(time.time()))
    events.when(due, lambda run, seen: run.harm("kill", "n2/0"))
    events.when(trains_at(3), lambda run, seen: setattr(run.fleet, "stop_reason", "the benchmark"))
    job = exact_job(
        directory,
        directory,
        memory_directory(directory),
        paced_plan(),
        training={"steps": 100, "decay_steps": 100},
        elastic={"step_timeout_s": 120},
        emulation={"block_forward_s": ROW_S / 12},
    )
    try:
        run = StruckRun(job, directory, nodes={"n0": 1, "n1": 1, "n2": 1})
        run.orders._pace = paces_of
        run.controller.memory.keeps_passes = keeps
        with owned_memory():
            result = run.run(events)
        steps = {event["step"]: event for event in result.events if event["kind"] == "step"}
        (change, *_) = result.summary["reconfigurations"]
        assert change["cause"] == "death"
        row_s = steps[1]["seconds"] / 3
        kept = sum(event.get("kept_rows", 0) for event in result.events)
        seconds = change["seconds"]
        # Only the rows that are not kept count as redone.
        until_death_s = seconds["redone"] / (1 - kept / BATCH)
        return {
            "moment": round(moment, 3),
            "makespan_s": round(4 * row_s, 2),
            "over_makespan_s": round(until_death_s + seconds["total"] - 4 * row_s, 2),
            "kept_rows": kept,
            "seconds": seconds,
            "load": round(os.getloadavg()[0], 1),
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)


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
        run.controller.memory.cuts_over = mode == "notice"
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
