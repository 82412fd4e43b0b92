"""The wall clock is set while a job runs: nobody is taken for dead, and no duration changes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.waits import HANG_S

pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]

STEP_THE_CLOCK = """
import sys, time
true_time = time.time
ahead = [0.0]
time.time = lambda: true_time() + ahead[0]  # before anything binds it

from types import SimpleNamespace
from unittest.mock import Mock
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.reports.newest_reports import LatestReport
from autohet.driver.ray.workers import WorkerSettings
from autohet.driver.ray.workforce import RayWorkforce
from autohet.runtime.job.elastic import ElasticSection

ray_cluster.head_address = lambda: "127.0.0.1"
job = SimpleNamespace(elastic=ElasticSection())
observer = RayWorkforce(job, "run", Mock(), None, WorkerSettings(1)).observer
now = observer.clock()
said = SimpleNamespace(process_id=1)
answers = {"heard": LatestReport(now, value=said, heard_at=now), "starts": LatestReport(now)}
observer.worker_reports.answers = answers
for step_s in (3600.0, -3600.0):
    ahead[0] = step_s
    observer.find_losses(observer.clock())
    print(sorted(observer.losses))
observer.find_losses(observer.clock() + 3600.0)
print(sorted(observer.losses))
"""


def test_a_step_of_the_wall_clock_kills_nobody() -> None:
    """In a process of its own, whose wall clock jumps between a worker's answer and the look for
    the silent ones.
    """
    program = [sys.executable, "-c", STEP_THE_CLOCK]
    done = subprocess.run(program, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=HANG_S)
    assert done.stdout.decode().splitlines()[-3:] == ["[]", "[]", "['heard', 'starts']"]


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
