"""A driver that is killed while its nodes live, on real Ray: started again, it goes on from their host memory."""

from __future__ import annotations

import json
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


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["kind"] == kind]


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
    command = [Path(sys.executable).parent / "autohet", "train", "--job", job, "--address", address, "--events", events]
    with open(events.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


def test_a_driver_started_again_goes_on_from_its_nodes_memory(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"training": {"steps": STEPS}, "checkpoint": {"every_steps": 25}}
    job_path, _ = write_documents(tmp_path, {}, **sections, emulation={"block_forward_s": 0.01})
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with nodes_without_names(2) as cluster:
        with driver(job_path, cluster.address, first) as process:
            until(lambda: len(events_of(first, "step")) >= 34 or process.poll() is not None, "34 steps", 120)
            assert process.poll() is None, first.with_suffix(".log").read_text()[-2000:]
        done = events_of(first, "step")[-1]["step"]
        assert events_of(first, "checkpoint")[-1]["step"] < done - 1, "host memory is newer than any checkpoint"
        add_node(cluster)  # nodes are numbered in the order of their ids: the others may have other names from now on
        with driver(job_path, cluster.address, second) as process:
            assert process.wait(150) == 0, second.with_suffix(".log").read_text()[-2000:]
    restore = events_of(second, "restore")[0]
    assert restore["bytes_by_tier"]["s3"] == 0
    steps = events_of(second, "step")
    assert done - 1 <= steps[0]["step"] <= done + 2
    losses = {event["step"]: event["loss"] for event in (*events_of(first, "step"), *steps)}
    told = [losses[step] for step in sorted(losses) if step >= steps[0]["step"]]
    job = make_job(tmp_path, **sections)
    assert largest_relative_difference(told, job, steps[0]["step"]) < 1e-3
