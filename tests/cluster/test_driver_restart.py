"""A driver that is killed while its workers live: they train on, and the next driver adopts them;
without a next one, a stop ends them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

from autohet.driver.loop.replay import replay_run
from recovery.checkpoint.receipts import read_uploads
from recovery.storage.open import open_storage
from tests.harness.local_fleet import (
    free_port,
    largest_relative_difference,
    make_job,
    node_type,
    write_documents,
)
from tests.harness.waits import wait_until
from tests.harness.warm_ray import warm_ray_workers

pytestmark = pytest.mark.cluster
STEPS = 60
EVERY = 12
AGENTS_SECRET = '"token": "'


def all_of(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in all_of(path) if event["kind"] == kind]


def add_node(cluster: Cluster) -> None:
    cluster.add_node(
        num_cpus=1, num_gpus=1, labels=node_type("A10G")["labels"], object_store_memory=100 << 20
    )


@contextmanager
def nodes_without_names(
    count: int, dashboard_port: int | None = None, **head: Any
) -> Iterator[Cluster]:
    """Ray nodes as an autoscaler starts them: with facts for the planner, and no name of their
    own.
    """
    dashboard: dict[str, Any] = {"include_dashboard": dashboard_port is not None}
    if dashboard_port is not None:
        dashboard |= {"dashboard_host": "127.0.0.1", "dashboard_port": dashboard_port}
    with warm_ray_workers():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **dashboard, **head})
        try:
            for _ in range(count):
                add_node(cluster)
            yield cluster
        finally:
            cluster.shutdown()


def driver_of(events: Path) -> int:
    """The process id of the driver: the one child of the process that was submitted, which does
    nothing but watch over it.
    """
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            if b"python" in words[0] and str(events).encode() in words:
                parents[int(place.name)] = int(
                    (place / "stat").read_text().rpartition(")")[2].split()[1]
                )
        except OSError:
            continue
    (submitted,) = parents.keys() - {
        process for process, parent in parents.items() if parent in parents
    }
    (driver,) = (process for process, parent in parents.items() if parent == submitted)
    return driver


def workers_here() -> set[int]:
    """Process ids of the workers on this machine."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (place / "cmdline").read_bytes().startswith(b"ray::WorkerActor"):
                found.add(int(place.name))
    return found


def test_workers_train_on_without_a_driver_and_the_next_one_adopts_them(
    tmp_path: Path,
) -> None:
    """Nobody does anything, and nothing was asked for: the job that was submitted once ends with
    every step trained once, by the same processes.
    """
    sections: dict[str, Any] = {
        "training": {"steps": STEPS},
        "checkpoint": {"every_steps": EVERY, "keep": "all"},
    }
    recorded = {"elastic": {"record_observations": True}, "emulation": {"block_forward_s": 0.006}}
    job_path, _ = write_documents(tmp_path, {}, **sections, **recorded)
    events = tmp_path / "events.jsonl"
    port = free_port()
    with nodes_without_names(2, port) as cluster:
        client = JobSubmissionClient(f"http://127.0.0.1:{port}")
        autohet = Path(sys.executable).parent / "autohet"
        submitted = client.submit_job(
            entrypoint=f"{autohet} train --job {job_path} --events {events}"
        )
        over = lambda: client.get_job_status(submitted).is_terminal()  # noqa: E731

        def is_between_checkpoints() -> bool:
            num_steps = len(events_of(events, "step"))
            return over() or (num_steps > EVERY and 3 <= num_steps % EVERY <= 6)

        wait_until(is_between_checkpoints, "a checkpoint and three steps")
        assert not over(), client.get_job_logs(submitted)[-2000:]
        before = workers_here()
        os.kill(driver_of(events), signal.SIGKILL)
        # Nodes are numbered in the order of their ids: the others may have other names from now on.
        add_node(cluster)

        def is_adopted() -> bool:
            return over() or any("adopted" in event for event in events_of(events, "decision"))

        wait_until(is_adopted, "a driver in charge")
        assert workers_here() >= before, "no process was started again"
        wait_until(over, "the end")
        logs = client.get_job_logs(submitted)
        assert client.get_job_status(submitted) is JobStatus.SUCCEEDED, logs[-2000:]
        shown = subprocess.run(
            [autohet, "status", "--address", cluster.address, "--json"],
            capture_output=True,
            check=True,
        )
        (status,) = json.loads(shown.stdout)["jobs"].values()
        assert (status["liveness"], status["step"], status["steps"]) == ("ended", STEPS, STEPS)
    assert "The driver was killed by SIGKILL; it is started again" in logs
    assert "RAY_JOB_STOP_WAIT_TIME_S" in logs, (
        "a submission that leaves no time for a checkpoint is told so"
    )
    lines = all_of(events)
    began = [index for index, event in enumerate(lines) if event["kind"] == "started"]
    assert [lines[index]["restart"] for index in began] == [False, True]
    assert "goes on only once it is submitted again" not in logs
    replayed = replay_run(tmp_path / "observations.jsonl")
    assert (replayed.difference, replayed.drivers) == (None, 2), "both drivers, decided anew"
    assert replayed.decisions > len(
        [event for event in lines[began[1] :] if event["kind"] == "step"]
    )
    assert AGENTS_SECRET not in (tmp_path / "observations.jsonl").read_text()
    first = lines[: began[1]]
    second = lines[began[1] :]
    done = [event["step"] for event in first if event["kind"] == "step"][-1]
    checkpoints = [event["step"] for event in first if event["kind"] == "checkpoint"]
    assert checkpoints[-1] < done - 1, "host memory is newer than any checkpoint"
    adopted = next(i for i, event in enumerate(second) if "adopted" in event)
    assert not {"plan", "restore"} & {event["kind"] for event in second[:adopted]}
    steps = [event["step"] for event in lines if event["kind"] == "step"]
    assert steps == list(range(STEPS)), "each has one event, in order"
    told = [event["loss"] for event in lines if event["kind"] == "step"]
    job = make_job(tmp_path, **sections)
    assert largest_relative_difference(told, job, 0) < 1e-3
    assert_report_is_of_both_drivers(tmp_path, lines)


def write_long_job(directory: Path) -> Path:
    """A job that ends, and stores a checkpoint, long after its test."""
    job_path, _ = write_documents(
        directory,
        {},
        training={"steps": 5000},
        checkpoint={"every_steps": 2000},
        emulation={"block_forward_s": 0.006},
    )
    return job_path


def test_a_stop_ends_what_has_no_driver(tmp_path: Path) -> None:
    """Its newest step is stored whole, and no process of the job is left."""
    job_path = write_long_job(tmp_path)
    events = tmp_path / "events.jsonl"
    autohet = str(Path(sys.executable).parent / "autohet")
    with nodes_without_names(2) as cluster:
        at = ["--address", cluster.address]
        driver = subprocess.Popen(
            [autohet, "train", *at, "--job", str(job_path), "--events", str(events)]
        )
        try:
            wait_until(
                lambda: driver.poll() is not None or len(events_of(events, "step")) > 2, "steps"
            )
            assert driver.poll() is None
        finally:
            driver.kill()
            driver.wait()
        assert workers_here()
        told = events_of(events, "step")[-1]["step"]
        command = [autohet, "stop", *at, "--json"]
        shown = subprocess.run(command, capture_output=True, check=False)
        assert shown.returncode == 0, shown.stderr[-2000:]
        document = json.loads(shown.stdout)
        assert (document["driven"], document["num_left"]) == (False, 0)
        wait_until(lambda: not workers_here(), "the end of the workers")
    storage = open_storage(make_job(tmp_path).checkpoint_storage)
    (upload,) = read_uploads(storage)
    assert upload.is_complete
    assert upload.step > told


def assert_report_is_of_both_drivers(directory: Path, events: list[dict[str, Any]]) -> None:
    """Page and timeline have every step, and every byte of every checkpoint that still lies there;
    the storage has one copy of it all.
    """
    assert f"<b>{STEPS}</b>steps" in (directory / "report.html").read_text()
    spans = [
        span
        for span in json.loads((directory / "timeline.json").read_text())["traceEvents"]
        if span["ph"] == "X"
    ]
    length_us = (events[-1]["time"] - events[0]["time"]) * 1e6
    assert all(
        span["dur"] >= 0 <= span["ts"] <= span["ts"] + span["dur"] <= length_us + 1
        for span in spans
    )
    assert {f"step {number}" for number in range(STEPS)} <= {span["name"] for span in spans}
    uploaded: Counter[str] = Counter()
    for span in spans:
        uploaded[span["name"]] += (
            span["args"].get("bytes", 0) if span["name"].startswith("upload: ") else 0
        )
    store = Path(make_job(directory).checkpoint_storage)
    manifests = [json.loads(path.read_text()) for path in store.glob("step-*/manifest.json")]
    assert {manifest["step"] for manifest in manifests} >= {EVERY, STEPS}, "of each driver's time"
    for manifest in manifests:
        assert uploaded[f"upload: step {manifest['step']}"] == sum(
            file["num_bytes"] for file in manifest["files"]
        )
    stored = [path.read_text() for path in store.glob("runs/*/events.jsonl")]
    assert "".join(json.dumps(event) + "\n" for event in events) in stored


def test_a_head_whose_store_survives_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GCS is killed with the driver, and comes back on its files: the workers have trained on,
    and the next driver adopts them.
    """
    (tmp_path / "gcs").mkdir()
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path / "gcs"))
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    job_path = write_long_job(tmp_path)
    events = tmp_path / "events.jsonl"
    autohet = str(Path(sys.executable).parent / "autohet")
    with nodes_without_names(2, gcs_server_port=free_port()) as cluster:
        arguments = [autohet, "train", "--address", cluster.address, "--job", str(job_path)]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen([*arguments, "--events", str(events)], start_new_session=True)

        driver = start()
        try:
            trains = lambda: len(events_of(events, "step")) > 2  # noqa: E731
            wait_until(lambda: driver.poll() is not None or trains(), "steps")
            assert driver.poll() is None
            before = workers_here()
            cluster.head_node.kill_gcs_server()
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            last = events_of(events, "step")[-1]["step"]
            time.sleep(2.0)
            cluster.head_node.start_gcs_server()
            driver = start()

            def is_adopted() -> bool:
                return any("adopted" in event for event in events_of(events, "decision"))

            wait_until(lambda: driver.poll() is not None or is_adopted(), "a driver in charge")
            assert driver.poll() is None
            assert workers_here() == before, "no process was started again"
            wait_until(lambda: events_of(events, "step")[-1]["step"] > last + 5, "more steps")
            driver.terminate()
            driver.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
        wait_until(lambda: not workers_here(), "the end of the workers")
    assert {event["generation"] for event in events_of(events, "step")} == {1}
    losses = {event["step"]: event["loss"] for event in events_of(events, "step")}
    steps = sorted(losses)
    assert steps == list(range(len(steps)))
    job = make_job(tmp_path, training={"steps": 5000})
    assert largest_relative_difference([losses[step] for step in steps], job) < 1e-3
    assert not events_of(events, "restore")[1:], "nothing was restored again"
