"""Real Ray clusters of emulated nodes on this machine, tiny jobs on them, and runs that a test can
interfere with.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import yaml

from autohet.control.job_state import Training
from autohet.control.values.observation import Observation
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.events.event_log import EventLog
from autohet.driver.job.job_run import JobRun, Machines, Outcome
from autohet.driver.loop.run_directories import node_directories
from autohet.driver.ray.cluster import NAME_LABEL
from autohet.emulate.demo import reference_losses
from autohet.runtime.job import Job
from planner.inputs.cluster import Cluster, cluster_from_document
from tests.harness.host_memory import memory_directory
from tests.harness.waits import HANG_S, PATIENT_ELASTIC, wait_until
from tests.harness.warm_ray import warm_ray_workers

TEXT = "".join(
    f"line {i}: the quick brown fox jumps over {i * i % 97} lazy dogs, {i * 7919 % 1009} times\n"
    for i in range(900)
)


def node_type(gpu_type: str, num_gpus: int = 1, *, count: int = 0) -> dict[str, Any]:
    """One entry of `available_node_types`: a node that poses as having GPUs of a type."""
    labels = {
        "autohet.io/gpu-type": gpu_type,
        "autohet.io/gpu-memory-gib": "16",
        "autohet.io/intra-node-gbps": "256",
        "autohet.io/inter-node-gbps": "25",
        "autohet.io/usd-per-hour": "1",
        "autohet.io/spot": "true",
        "autohet.io/zone": "local",
    }
    resources = {"CPU": num_gpus, "GPU": num_gpus}
    return {
        "resources": resources,
        "labels": labels,
        "node_config": {},
        "min_workers": count,
        "max_workers": 4,
    }


def cluster_document(**counts: int) -> dict[str, Any]:
    """An emulated cluster of up to four kinds of node:

    `big` and `small` with one GPU, `pair` with two.
    """
    return {
        "cluster_name": "tests",
        "max_workers": 8,
        "provider": {"type": "fake_multinode"},
        "available_node_types": {
            "head": {
                "resources": {"CPU": 4, "GPU": 0},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 0,
            },
            "big": node_type("A100-40", count=counts.get("big", 0)),
            "small": node_type("A10G", count=counts.get("small", 0)),
            "pair": node_type("L40S", 2, count=counts.get("pair", 0)),
        },
        "head_node_type": "head",
    }


def job_document(directory: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A job of a few thousand parameters; `sections` are merged into the document's own."""
    text = directory / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 32,
    }
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"config": model},
        "training": {
            "global_batch_sequences": 8,
            "sequence_length": 16,
            "steps": 40,
            "precision": "fp32",
            "seed": 3,
            "learning_rate": 3e-3,
            "warmup_steps": 5,
            "device": "cpu",
        },
        "data": {"source": str(text), "tokenizer": "bytes", "cache": str(directory / "cache")},
        "checkpoint": {
            "storage": str(directory / "checkpoints"),
            "every_steps": 15,
            "memory_directory": str(memory_directory(directory)),
            "local_directory": str(directory / "disk"),
        },
        "elastic": {
            **PATIENT_ELASTIC,
            "min_workers": 1,
            "heartbeat_timeout_s": 10,
            "debounce_s": 0.5,
            "wait_for_fleet_s": HANG_S,
            "slow_ratio": 0,
        },
        "parallelism": {
            "microbatch_sequences": 1,
            "min_pipelines": 2,
            "max_tp_degree": 1,
            "memory_reserve_bytes": 0,
        },
        "emulation": {
            "relative_speed_by_gpu_type": {"A100-40": 2.0, "L40S": 1.5, "A10G": 1.0},
            "block_forward_s": 0.002,
        },
    }
    for name, values in sections.items():
        document[name] = {**document[name], **values}
    return document


def free_port() -> int:
    """A port that no connection of another process is given before it is used: below those that
    Linux hands out, above Ray's workers'.
    """
    while True:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(listener.getsockname()[1])


def make_job(directory: Path, **sections: Mapping[str, Any]) -> Job:
    return Job.from_document(job_document(directory, **sections))


def write_documents(
    directory: Path, cluster: Mapping[str, Any], **sections: Mapping[str, Any]
) -> tuple[Path, Path]:
    """The job and the cluster as files, for the command line."""
    job_path = directory / "job.yaml"
    cluster_path = directory / "cluster.yaml"
    job_path.write_text(yaml.safe_dump(job_document(directory, **sections)))
    cluster_path.write_text(yaml.safe_dump(dict(cluster)))
    return job_path, cluster_path


@contextmanager
def local_fleet(head: Mapping[str, Any] | None = None, **counts: int) -> Iterator[EmulatedFleet]:
    """A Ray cluster with these nodes, and this process connected to it; `head`: arguments of the
    head node.
    """
    from autohet.driver.ray import cluster as ray_cluster

    ray_cluster.quieten()
    fleet = EmulatedFleet(cluster_document(**counts), head_arguments=head or {})
    with warm_ray_workers():
        try:
            ray.init(address=fleet.start(), log_to_driver=False, logging_level="ERROR")
            yield fleet
        finally:
            fleet.close()


def adjust(fleet: EmulatedFleet, **counts: int) -> None:
    """Bring a fleet that an earlier test left to these numbers of nodes."""
    fleet.nodes = {
        name: node for name, node in fleet.nodes.items() if node.ray_node.any_processes_alive()
    }
    for kind in ("big", "small", "pair"):
        there = sorted(name for name, node in fleet.nodes.items() if node.node_type == kind)
        for name in there[counts.get(kind, 0) :]:
            fleet.kill(name)
        for _ in range(counts.get(kind, 0) - len(there)):
            fleet.add(kind)
    wanted = sum(counts.values())
    wait_until(
        lambda: sum(n["Alive"] and n["Resources"].get("GPU", 0) > 0 for n in ray.nodes()) == wanted,
        "the fleet",
    )


def node_ids(name: str) -> dict[str, bool]:
    """Ray's ids of the nodes with this name, and whether each is alive."""
    return {n["NodeID"]: n["Alive"] for n in ray.nodes() if n["Labels"].get(NAME_LABEL) == name}


Condition = Callable[[JobRun, Observation], bool]


@dataclass
class Interference:
    """Events of a test, in order: each is (when, what), both given the run and what it saw last."""

    events: list[tuple[Condition, Callable[[JobRun, Observation], None]]] = field(
        default_factory=list
    )

    def when(
        self, condition: Condition, act: Callable[[JobRun, Observation], None]
    ) -> Interference:
        self.events.append((condition, act))
        return self

    def __call__(self, run: JobRun, seen: Observation) -> None:
        if self.events and self.events[0][0](run, seen):
            self.events.pop(0)[1](run, seen)


def cluster_of(fleet: EmulatedFleet) -> Cluster:
    return cluster_from_document(fleet.document)


def run_job(
    job: Job,
    fleet: EmulatedFleet,
    directory: Path,
    interfere: Interference | None = None,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Run a job to its end on a fleet; returns the outcome and the events."""
    fleet.directories = lambda name: node_directories(job, name)
    return run_on(job, cluster_of(fleet), fleet, directory, interfere)


def run_on(
    job: Job,
    cluster: Cluster,
    fleet: EmulatedFleet | None,
    directory: Path,
    interfere: Interference | None = None,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Run a job to its end on the Ray cluster that this process is connected to."""
    path = directory / f"events-{time.monotonic_ns()}.jsonl"
    events = EventLog(path)
    run = JobRun(job, Machines(cluster, fleet), events)
    deadline = time.monotonic() + HANG_S
    try:
        run.start()
        while run.controller.ended is None:
            seen = run.tick()
            if interfere is not None:
                interfere(run, seen)
            assert time.monotonic() < deadline, (run.controller.state, path.read_text()[-3000:])
        outcome = run.outcome()
    finally:
        run.close()
        events.close()
    assert interfere is None or not interfere.events, (
        f"{len(interfere.events)} events did not happen: {outcome.reason}"
    )
    return outcome, [json.loads(line) for line in path.read_text().splitlines()]


def largest_relative_difference(losses: list[float], job: Job, first_step: int = 0) -> float:
    """Of the losses from `first_step` on, to those of the same job in one undisturbed process."""
    wanted = reference_losses(job, first_step + len(losses))[first_step:]
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


def trains_at(step: int, workers: int | None = None) -> Condition:
    """True once `step` steps are committed while training (on so many workers)."""

    def condition(run: JobRun, seen: Observation) -> bool:
        there = (
            isinstance(run.controller.state, Training)
            and run.controller.memory.ledger.committed_steps >= step
        )
        return there and (workers is None or len(run.controller.memory.members) == workers)

    return condition


def trains_a_while(workers: int | None = None) -> Condition:
    """True once the present generation (of so many workers) has committed five steps."""

    def condition(run: JobRun, seen: Observation) -> bool:
        there = (
            isinstance(run.controller.state, Training)
            and len(run.controller.memory.ledger.step_seconds[run.controller.memory.generation])
            >= 5
        )
        return there and (workers is None or len(run.controller.memory.members) == workers)

    return condition


def in_generation(number: int) -> Condition:
    return lambda run, seen: run.controller.memory.generation >= number


def stop(run: JobRun, seen: Observation) -> None:
    """Ask for a stop with a committed checkpoint, as a signal does."""
    run.workforce.observer.stop_reason = "the test"
