"""What the driver itself costs while a job trains: processor seconds of its process, all threads,
over 64 workers on 8 nodes. And how soon it knows of a process or node that is struck then.

    python -m scripts.benchmarks.step.driver_load [--seconds 30] [--step-s 1.0 ...] [--json FILE]

Real: the Ray cluster (all nodes on this machine), agents, controller, observer, event log.
EMULATED: the workers, actors that hold no tensor and whose reports change as those of a worker do
that commits a step every `--step-s` seconds (0: they train and say nothing new).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from autohet.control.job_state import Training
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.events.event_log import EventLog
from autohet.driver.job.job_run import JobRun, Machines
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray import workers
from autohet.runtime.job import Job
from autohet.runtime.messages import (
    GenerationOrder,
    Phase,
    RestoreRecord,
    StateTransfer,
    StepRecord,
    WorkerPlace,
    WorkerReport,
)
from autohet.runtime.process.report_channel import ReportAddress, ReportSender
from planner.inputs.cluster import cluster_from_document
from scripts.benchmarks.provenance import provenance
from tests.harness.host_memory import memory_directory, owned_memory
from tests.harness.local_fleet import cluster_document, job_document, node_type

NODES, GPUS = 8, 8
START_S, STEADY_S = 300.0, 5.0
LOOK_S = 0.1
"""Oftener is of no use to what is measured, and 64 workers that look have only this machine."""
APPLY_S = 0.1
"""Between a step's vote and its end."""
VOTE = "a vote"


class IdleWorker:
    """Stands for `autohet.runtime.worker.Worker`: trains nothing, and reports a step whenever one
    is due, all at the same moment.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self._report = WorkerReport(place.worker, os.getpid(), 0, Phase.IDLE, 0, None)
        self.set_pace(0.0)

    def set_pace(self, step_s: float) -> None:
        self._step_s, self._due = (
            step_s,
            math.ceil(time.monotonic() / step_s) * step_s if step_s else math.inf,
        )

    def begin(self, order: GenerationOrder) -> None:
        self._report = replace(
            self._report,
            generation=order.generation,
            live_generation=order.generation,
            phase=Phase.TRAINING,
            restore=RestoreRecord({}, 0.0, 0.0),
        )

    def report(self) -> WorkerReport:
        """A step's vote is known a moment before the step is committed."""
        now, step, steps, copies = time.monotonic(), self._report.step, [], []
        if now >= self._due - APPLY_S and (self._report.vote or (-1,))[0] < step:
            self._report = replace(self._report, vote=(step, VOTE))
        if now >= self._due:
            steps.append(
                StepRecord(
                    step, 1.0, 1.0, 64, self._step_s, self._report.generation, now, {"compute": 0.5}
                )
            )
            copies.append(
                StateTransfer(
                    "peer", self._report.worker, self._report.generation, step, 1 << 20, 0.1
                )
            )
            self._due += self._step_s
            self._report = replace(
                self._report, step=step + 1, snapshot_step=step + 1, replicated_step=step + 1
            )
        return replace(self._report, steps=tuple(steps), transfers=tuple(copies))


@ray.remote(num_cpus=0, max_concurrency=6)  # type: ignore[call-overload]
class IdleWorkerActor:
    """Stands for `WorkerActor`."""

    def __init__(
        self,
        place: WorkerPlace,
        job: Job,
        num_threads: int,
        environment: Any,
        record: Any,
        driver: ReportAddress,
    ) -> None:
        self._worker = IdleWorker(place)
        self._reports = ReportSender(
            driver, self._worker.report, lambda before, report: report.is_news_after(before), LOOK_S
        )

    def until_end(self) -> None:
        self._reports.wait()

    def set_pace(self, step_s: float) -> None:
        self._worker.set_pace(step_s)

    def command(self, _: int, method: str, *arguments: Any) -> None:
        getattr(self, method)(*arguments)

    def begin(self, order: GenerationOrder) -> None:
        self._worker.begin(order)

    def close(self) -> None:
        """Nothing was started."""


def main() -> None:
    options = _options()
    workers.WorkerActor = IdleWorkerActor  # type: ignore[assignment,misc]
    ray_cluster.quieten()
    with tempfile.TemporaryDirectory(prefix="autohet-load-") as name, owned_memory():
        fleet, events = EmulatedFleet(fleet_document()), EventLog(Path(name) / "events.jsonl")
        try:
            ray.init(address=fleet.start(), log_to_driver=False, logging_level=logging.ERROR)
            alone = percent_of_a_core(lambda: time.sleep(0.2), options.seconds / 3)
            run = JobRun(
                job(Path(name)), Machines(cluster_from_document(fleet.document), fleet), events
            )
            cases, detection_s = measure_all(run, options)
        finally:
            events.close()
            fleet.close()
    document = {
        "what": (
            f"the driver's process over {NODES * GPUS} workers on {NODES} nodes, in percent of a"
            " core"
        ),
        **provenance(),
        "connected to Ray, and nothing else": alone,
        "cases": cases,
        "detection_s": {
            "what": "from the strike to the driver's knowledge, all others training, one each",
            **detection_s,
        },
    }
    if options.json:
        document["before"] = (
            json.loads(options.json.read_text())["before"] if options.json.exists() else None
        )
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.0, 5.0, 1.0])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure_all(
    run: JobRun, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """One run of the driver until all train, and `seconds` of it at each pace; then seconds to
    detect what is struck.
    """
    try:
        run.start()
        await_training(run)
        return [measure(run, step_s, options.seconds) for step_s in options.step_s], detect_all(run)
    finally:
        run.close()


def detect_all(run: JobRun) -> dict[str, float]:
    """Nothing is decided meanwhile: the driver only watches."""
    fleet, reports = run.fleet, run.workforce.observe().reports
    assert fleet is not None
    processes = {worker: report.process_id for worker, report in reports.items()}
    strikes: dict[str, tuple[str, Callable[[], None]]] = {
        "process killed": ("eight-0/0", lambda: os.kill(processes["eight-0/0"], signal.SIGKILL)),
        "process frozen": ("eight-1/0", lambda: fleet.freeze(processes["eight-1/0"])),
        "node killed": ("eight-2/0", lambda: fleet.kill("eight-2")),
    }
    found = {name: detect(run, worker, strike) for name, (worker, strike) in strikes.items()}
    print(json.dumps(found), flush=True)
    os.kill(processes["eight-1/0"], signal.SIGKILL)
    return found


def detect(run: JobRun, worker: str, strike: Callable[[], None]) -> float:
    """Seconds. Afterwards the lost are forgotten, and the driver is as calm as before."""
    force, striking, began = run.workforce, threading.Thread(target=strike), time.monotonic()
    striking.start()
    while worker not in (losses := force.observe().losses):
        assert time.monotonic() < began + START_S
        force.wait()
    seconds = round(time.monotonic() - began, 2)
    striking.join()
    force.workers.dismiss(list(losses))
    force.observer.losses.clear()
    return seconds


def measure(run: JobRun, step_s: float, seconds: float) -> dict[str, Any]:
    ray.get(
        [handle.set_pace.remote(step_s) for handle in run.workforce.observer.workers.values()],
        timeout=60,
    )
    settled = time.monotonic() + STEADY_S
    while time.monotonic() < settled:
        run.tick()
    ticks, steps = [0], run.controller.memory.ledger.committed_steps

    def tick() -> None:
        run.tick()
        ticks[0] += 1

    print("MEASURES", flush=True)
    percent = percent_of_a_core(tick, seconds)
    found = {
        "step_s": step_s or None,
        "percent": percent,
        "rounds_per_s": round(ticks[0] / seconds, 1),
        "steps": run.controller.memory.ledger.committed_steps - steps,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(found), flush=True)
    return found


def await_training(run: JobRun) -> None:
    deadline = time.monotonic() + START_S
    while not isinstance(run.controller.state, Training):
        seen = run.tick()
        assert time.monotonic() < deadline, (run.controller.state, len(seen.reports))
        assert run.controller.ended is None, run.controller.ended


def percent_of_a_core(work: Callable[[], object], seconds: float) -> dict[str, float]:
    """This process's, while `work` is done over and over, by name of thread, with the sum; what is
    below 0.01 is left out.
    """
    began, before = time.monotonic(), _cpu_by_thread()
    while time.monotonic() < began + seconds:
        work()
    passed = time.monotonic() - began
    parts = {
        name: 100 * (cpu - before.get(name, 0.0)) / passed for name, cpu in _cpu_by_thread().items()
    }
    named = {name: round(percent, 2) for name, percent in sorted(parts.items()) if percent >= 0.01}
    return {"all": round(sum(parts.values()), 2), **named}


def _cpu_by_thread() -> dict[str, float]:
    """Seconds of all threads of a name, Python's or else the kernel's (proc(5):

    `schedstat` counts nanoseconds).
    """
    found: dict[str, float] = {}
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            found[name] = (
                found.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
            )
    return found


def fleet_document() -> dict[str, Any]:
    document = cluster_document()
    document["available_node_types"] = {
        "head": document["available_node_types"]["head"],
        "eight": {**node_type("A100-40", GPUS, count=NODES), "max_workers": NODES},
    }
    return document


def job(directory: Path) -> Job:
    """Eight pipelines of eight stages, a node each, by a given plan: the search is not what is
    measured.
    """
    document = job_document(directory)
    document["model"]["config"]["num_hidden_layers"] = GPUS
    pipelines = [
        {
            "num_microbatches": 8,
            "stages": [
                {"first_layer": stage, "num_layers": 1, "workers": [f"eight-{node}/{stage}"]}
                for stage in range(GPUS)
            ],
        }
        for node in range(NODES)
    ]
    plan = {
        "version": 1,
        "model": "tiny",
        "global_batch_sequences": 8 * NODES,
        "microbatch_sequences": 1,
        "sequence_length": 16,
        "pipelines": pipelines,
    }
    (directory / "plan.json").write_text(json.dumps(plan))
    document["training"] |= {"steps": 1_000_000, "global_batch_sequences": 8 * NODES}
    document["checkpoint"] |= {
        "every_steps": 1_000_000,
        "memory_directory": str(memory_directory(directory)),
    }
    document["elastic"] |= {
        "min_workers": NODES * GPUS,
        "step_timeout_s": 60,
        "heartbeat_timeout_s": None,
        "worker_start_timeout_s": START_S,
        "wait_for_fleet_s": START_S,
        "notice_sources": ["ray", "aws", "gpu"],
    }
    document["parallelism"]["plan"] = str(directory / "plan.json")
    document["emulation"]["relative_speed_by_gpu_type"] = {"A100-40": 1.0}
    return Job.from_document(document)


if __name__ == "__main__":
    main()
