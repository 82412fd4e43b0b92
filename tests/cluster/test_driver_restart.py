"""A driver that is killed while its nodes live, on real Ray: it is started again, and goes on from their host memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.harness.local_fleet import largest_relative_difference, make_job, node_type, until, write_documents

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
STEPS = 60


def all_of(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in all_of(path) if event["kind"] == kind]


def add_node(cluster: Cluster) -> None:
    cluster.add_node(num_cpus=1, num_gpus=1, labels=node_type("A10G")["labels"], object_store_memory=100 << 20)


@contextmanager
def nodes_without_names(count: int) -> Iterator[Cluster]:
    """Ray nodes as an autoscaler starts them: with facts for the planner, and no name of their own."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        for _ in range(count):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def driver(job: Path, address: str, events: Path) -> Iterator[subprocess.Popen[bytes]]:
    autohet = Path(sys.executable).parent / "autohet"
    command = [autohet, "train", "--job", job, "--address", address, "--events", events, "--restarts", "3"]
    with open(events.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


def child_of(process_id: int) -> int:
    """The driver: the one process that the command has started and watches over."""
    (child,) = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    return int(child)


def test_a_driver_that_is_killed_is_started_again_and_goes_on_from_its_nodes_memory(tmp_path: Path) -> None:
    """Nobody does anything: the command that was given once ends with every step trained."""
    sections: dict[str, Any] = {"training": {"steps": STEPS}, "checkpoint": {"every_steps": 25}}
    job_path, _ = write_documents(tmp_path, {}, **sections, emulation={"block_forward_s": 0.01})
    events = tmp_path / "events.jsonl"
    with nodes_without_names(2) as cluster, driver(job_path, cluster.address, events) as process:
        until(lambda: len(events_of(events, "step")) >= 34 or process.poll() is not None, "34 steps", 120)
        assert process.poll() is None, events.with_suffix(".log").read_text()[-2000:]
        os.kill(child_of(process.pid), signal.SIGKILL)
        add_node(cluster)  # nodes are numbered in the order of their ids: the others may have other names from now on
        assert process.wait(150) == 0, events.with_suffix(".log").read_text()[-2000:]
    lines = all_of(events)
    began = [index for index, event in enumerate(lines) if event["kind"] == "started"]
    assert len(began) == 2
    first, second = lines[: began[1]], lines[began[1] :]
    done = [event["step"] for event in first if event["kind"] == "step"][-1]
    checkpoints = [event["step"] for event in first if event["kind"] == "checkpoint"]
    assert checkpoints[-1] < done - 1, "host memory is newer than any checkpoint"
    restore = next(event for event in second if event["kind"] == "restore")
    assert restore["bytes_by_tier"]["s3"] == 0
    steps = [event for event in second if event["kind"] == "step"]
    assert done - 1 <= steps[0]["step"] <= done + 2
    losses = {event["step"]: event["loss"] for event in lines if event["kind"] == "step"}
    told = [losses[step] for step in sorted(losses) if step >= steps[0]["step"]]
    job = make_job(tmp_path, **sections)
    assert largest_relative_difference(told, job, steps[0]["step"]) < 1e-3
