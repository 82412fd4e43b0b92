"""On real Ray: data whose preparation takes longer than a worker may take to start, by a builder
that is killed in the end.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autohet.driver.job import job_run
from autohet.driver.ray.workers import RayWorkers
from tests.harness.local_fleet import local_fleet, make_job, run_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
WORKER_START_S = 60.0
BUILDER = """
import sys, time
from autohet.runtime.data import prepare_dataset
from autohet.runtime.data.tokenization import ByteTokenizer
from autohet.runtime.job import DataSection
ByteTokenizer.encode = lambda self, texts: print("holds the lock", flush=True) or time.sleep(600)
prepare_dataset(DataSection(source=sys.argv[1], cache=sys.argv[2]), int(sys.argv[3]))
"""


def test_preparation_may_take_longer_than_a_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: workers prepare the data, are taken for dead after `worker_start_s`, and are started
    over and over.
    """
    started: list[str] = []
    start = RayWorkers.start_worker
    monkeypatch.setattr(
        RayWorkers,
        "start_worker",
        lambda self, w, seat: (started.append(w), start(self, w, seat))[1],
    )
    monkeypatch.setattr(
        job_run, "check_data", lambda *arguments, **keys: None
    )  # as for nodes on other machines
    data = {"cache": str(tmp_path / "cache")}
    job = make_job(
        tmp_path,
        training={"steps": 3, "warmup_steps": 0},
        data=data,
        elastic={"worker_start_timeout_s": WORKER_START_S},
    )
    assert job.data is not None
    arguments = [job.data.sources[0], data["cache"], str(job.training.sequence_length)]
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert builder.stdout is not None
    assert builder.stdout.readline() == "holds the lock\n"
    until = time.monotonic() + WORKER_START_S + 5.0
    killer = threading.Timer(until - time.monotonic(), builder.kill)
    killer.start()
    try:
        with local_fleet(big=1, small=1) as fleet:
            outcome, events = run_job(job, fleet, tmp_path)
    finally:
        builder.kill()
        killer.cancel()
        killer.join(5)
        builder.communicate()
    assert time.monotonic() > until
    assert outcome.ok
    assert sorted(started) == ["big-0/0", "small-0/0"]
    assert not [event for event in events if event["kind"] == "death"]
    assert outcome.summary["steps"] == 3


def test_two_gigabytes_are_prepared_once_by_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tenth of the time for a worker's start that it takes by default.

    Wrong: what one node has prepared is prepared again.
    """
    started: list[str] = []
    start = RayWorkers.start_worker
    monkeypatch.setattr(
        RayWorkers,
        "start_worker",
        lambda self, w, seat: (started.append(w), start(self, w, seat))[1],
    )
    block = "".join(
        f"line {i}: the quick brown fox jumps over {i * i % 97} lazy dogs\n" for i in range(20_000)
    )
    with open(tmp_path / "text.txt", "w") as text:
        for _ in range(-(-(2 << 30) // len(block))):
            text.write(block)
    data = {"cache": str(tmp_path / "cache")}
    job = make_job(
        tmp_path,
        training={"steps": 3, "warmup_steps": 0},
        data=data,
        elastic={"worker_start_timeout_s": 20.0},
    )
    with local_fleet(big=1, small=1) as fleet:
        outcome, events = run_job(job, fleet, tmp_path)
    assert outcome.ok
    assert sorted(started) == ["big-0/0", "small-0/0"]
    assert not [event for event in events if event["kind"] == "death"]
    assert outcome.summary["steps"] == 3
    prepared = sum(
        path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()
    )
    assert prepared < 1.5 * 2 * (2 << 30), "two bytes a token, once"
