"""The wall clock is set while a job runs: nobody is taken for dead, and no duration changes."""

import ast
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.reports.newest_reports import LatestReport
from autohet.driver.ray.workers import WorkerSettings
from autohet.driver.ray.workforce import RayWorkforce
from autohet.runtime.job.elastic import ElasticSection

ROOT = Path(__file__).parents[2]


def test_a_step_of_the_wall_clock_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps between a worker's answer and the look for the silent ones. What binds
    the clock before this test is named by the next one.
    """
    monkeypatch.setattr(ray_cluster, "head_address", lambda: "127.0.0.1")
    job: Any = SimpleNamespace(elastic=ElasticSection())
    workforce = RayWorkforce(job, "run", Mock(), None, WorkerSettings(1))
    try:
        observer = workforce.observer
        now = observer.clock()
        said: Any = SimpleNamespace(process_id=1)
        observer.worker_reports.answers = {
            "heard": LatestReport(now, value=said, heard_at=now),
            "starts": LatestReport(now),
        }
        true_time = time.time
        for step_s in (3600.0, -3600.0):
            monkeypatch.setattr(time, "time", lambda step_s=step_s: true_time() + step_s)
            observer.find_losses(observer.clock())
            assert observer.losses == {}
        observer.find_losses(observer.clock() + 3600.0)
        assert sorted(observer.losses) == ["heard", "starts"]
    finally:
        workforce.close(at_once=True)


DATES = {
    "autohet/driver/events/event_log.py": "when an event happened, for its reader",
    "autohet/driver/ray/cluster.py": "Ray's deadlines of a drain are dates",
    "autohet/driver/ray/requests/drain.py": "Ray's deadlines of a drain are dates",
    "autohet/driver/sky/supervisor.py": "moments that a supervisor started again reads, as dates",
    "autohet/driver/sources/script_file.py": "a script may name the moment as a date",
    "autohet/driver/job/goals.py": "a deadline is a date, and a later driver reads what was spent",
    "autohet/driver/job/preparation.py": "a deadline is a date",
    "autohet/driver/job/status.py": "the age of what another process published, with a date",
    "autohet/runtime/process/google_metadata.py": "a notice says its moment as a date",
    "autohet/runtime/process/metadata_server.py": "clouds name the moment of an end as a date",
    "recovery/checkpoint/commit.py": "when a checkpoint was made, for its reader",
    "recovery/storage/conformance.py": "how far this clock is from the storage's",
    "recovery/storage/s3_errors.py": "how far this clock is from the store's, which refused it",
    "recovery/storage/s3.py": "the date of a server that sends none",
    "recovery/storage/directory.py": "the date of a file system where no file can be made",
}
"""Where the wall clock may be read, and why."""


def test_durations_are_measured_by_the_monotonic_clock() -> None:
    """Whoever reads the wall clock wants a date."""
    readers = set()
    for package in ("autohet/driver", "autohet/runtime", "recovery"):
        for path in (ROOT / package).rglob("*.py"):
            names = [
                ast.unparse(node)
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute)
            ]
            if "time.time" in names:
                readers.add(str(path.relative_to(ROOT)))
    assert readers == set(DATES)
