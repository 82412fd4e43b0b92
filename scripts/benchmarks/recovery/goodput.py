"""Goodput of runs whose fleet changes all the time, on processes of this machine.

    python -m scripts.benchmarks.recovery.goodput [--minutes 15] [--cases short paced] [--json FILE]

short: the demonstration's job and fleet; each minute a node gets a notice of 20 s or is killed, in
turns, and another of its type joins half a minute later. paced: steps of 30 s of three pipelines of
one worker; one is killed every ten minutes at a random moment, and another node joins a minute
later. Goodput is the run's own: the usual time of the steps that count over the time that passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from autohet.driver.loop.emulated_paces import paces_of
from autohet.driver.ray.cluster_file import read_document
from autohet.runtime.job import Job
from planner.inputs.cluster import cluster_from_document
from planner.inputs.fleet import NodeType
from scripts.benchmarks.provenance import provenance
from scripts.benchmarks.recovery.death_to_step import paced_plan
from tests.harness.exact_job import exact_job, node_type
from tests.harness.host_memory import memory_directory, owned_memory
from tests.harness.struck_run import StruckRun

STEPS = 100_000
NOTICE_S = 20.0
ROW_S = 10.0
"""Seconds of a row's passes in paced steps, which have three rows a pipeline."""


class ChangingFleet:
    """Strikes a run and replaces what it loses; called after each tick.

    every_s, joins_after_s: seconds between strikes, and from one to the node in its place.
    """

    def __init__(
        self, every_s: float, joins_after_s: float, minutes: float, modes: tuple[str, ...]
    ) -> None:
        self.strikes: list[str] = []
        self.loads: list[float] = []
        self._every_s = every_s
        self._joins_after_s = joins_after_s
        self._minutes = minutes
        self._modes = modes
        self._draw = random.Random(7)
        self._began_at: float | None = None
        self._next_at = 0.0
        self._joining: list[tuple[float, str, NodeType]] = []

    def __call__(self, run: StruckRun, seen: Any) -> None:
        now = time.monotonic()
        if self._began_at is None:
            if run.controller.memory.ledger.committed_steps < 1:
                return
            self._began_at = now
            self._next_at = now + self._every_s * self._draw.uniform(0.5, 1.0)
        for entry in [each for each in self._joining if each[0] <= now]:
            self._joining.remove(entry)
            _, kind, node = entry
            run.fleet.add(f"{kind}-{len(self.strikes)}n", node)
        if now - self._began_at >= 60 * self._minutes:
            run.fleet.stop_reason = "the benchmark"
        elif now >= self._next_at:
            self._next_at += self._every_s
            self._strike(run, now)

    def _strike(self, run: StruckRun, now: float) -> None:
        mode = self._modes[len(self.strikes) % len(self._modes)]
        used = sorted({worker.split("/")[0] for worker in run.controller.memory.members})
        names = [name for name in used if run.fleet.is_up(name) and name not in run.fleet.notices]
        name = self._draw.choice(names)
        kind = run.fleet._seats[name].view.node.node_type
        self.strikes.append(f"{mode} {name}")
        self.loads.append(round(os.getloadavg()[0], 1))
        print(time.strftime("%X"), mode, name, "load", self.loads[-1], flush=True)
        if mode == "notice":
            run.fleet.warn(name, NOTICE_S)
        else:
            run.fleet.kill_node(name)
        self._joining.append((now + self._joins_after_s, name.split("-")[0], kind))


@contextmanager
def directory_of_a_run() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="autohet-goodput-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(job: Job, directory: Path, nodes: dict[str, NodeType], changes: ChangingFleet) -> Any:
    """Return the figures of one run, on nodes of these types by name."""
    run = StruckRun(job, directory, nodes={})
    run.orders._pace = paces_of
    for name, kind in nodes.items():
        run.fleet.add(name, kind)
    with owned_memory():
        result = run.run(changes, timeout_s=2 * 3600.0)
    told = result.summary["reconfigurations"]
    by_cause: dict[str, list[float]] = {}
    for change in told:
        by_cause.setdefault(change["cause"], []).append(change["seconds"]["stalled"])
    return {
        "goodput": result.summary["goodput"],
        "steps": result.summary["steps"],
        "steps_lost": result.summary["steps_lost"],
        "seconds": round(result.seconds, 1),
        "strikes": changes.strikes,
        "stalled_s": {cause: [round(each, 2) for each in all_] for cause, all_ in by_cause.items()},
        "redone_s": round(sum(change["seconds"]["redone"] for change in told), 2),
        "load": changes.loads,
    }


def short(minutes: float) -> Any:
    with directory_of_a_run() as directory:
        job = Job.from_yaml("cluster_configs/jobs/demo.yaml")
        checkpoint = replace(
            job.checkpoint,
            storage=str(directory / "checkpoints"),
            memory_directory=str(memory_directory(directory)),
            local_directory=str(directory / "disk"),
        )
        training = replace(job.training, steps=STEPS, decay_steps=100)
        elastic = replace(job.elastic, script=())
        job = replace(job, checkpoint=checkpoint, training=training, elastic=elastic)
        document = read_document("cluster_configs/local-emulated.yaml")
        nodes = {}
        for kind in cluster_from_document(document).node_types:
            for number in range(document["available_node_types"][kind.name]["min_workers"]):
                nodes[f"{kind.name}-{number}"] = kind
        return measure(job, directory, nodes, ChangingFleet(60, 30, minutes, ("notice", "kill")))


def paced(minutes: float) -> Any:
    with directory_of_a_run() as directory:
        job = exact_job(
            directory,
            directory,
            memory_directory(directory),
            paced_plan(),
            training={"steps": STEPS, "decay_steps": 100},
            elastic={"step_timeout_s": 300},
            emulation={"block_forward_s": ROW_S / 12},
        )
        nodes = {name: node_type(1) for name in ("n0", "n1", "n2")}
        return measure(job, directory, nodes, ChangingFleet(600, 60, minutes, ("kill",)))


CASES = {"short": short, "paced": paced}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"what": __doc__.splitlines()[0], **provenance()}
    document |= {"minutes": options.minutes, "cases": {}}
    for name in options.cases:
        document["cases"][name] = CASES[name](options.minutes)
        print(name, json.dumps(document["cases"][name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
