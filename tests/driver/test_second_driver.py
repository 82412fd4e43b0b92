"""A driver that is refused since another is alive touches nothing of that one's run; one that was
started again has patience with what may pass.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autohet.driver.job import patience, preparation, run, supervise
from autohet.driver.job.job_run import Machines
from autohet.driver.job.patience import with_patience
from autohet.driver.job.run import train, train_on
from autohet.driver.job.run_storage import make_durable
from autohet.driver.ray.requests.scaling import FleetRequest
from autohet.runtime.job import Job
from planner.errors import ConfigError
from recovery.storage.errors import StorageError, StorageFailing, StorageThrottled
from tests.harness.local_fleet import cluster_document, write_documents
from tests.harness.mounts import mounted


def show(*_: Any) -> None:
    """Nobody looks."""


ENTRIES: dict[str, Callable[[Job, Path], Any]] = {
    "train": lambda job, events: train(
        job,
        cluster_path=str(events.parent.parent / "cluster.yaml"),
        address=None,
        events_path=events,
        show=show,
    ),
    "train_on": lambda job, events: train_on(job, Machines(), events, show),
}


def shown(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of each file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("enter", ENTRIES)
def test_a_refused_second_driver_touches_nothing_of_the_first_one_s_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enter: str
) -> None:
    sections = {"elastic": {"record_observations": True}}
    path, _ = write_documents(tmp_path, cluster_document(big=1), **sections)
    job = Job.from_yaml(path)
    directory = tmp_path / "run"
    directory.mkdir()
    events = directory / "events.jsonl"
    begun = '{"time": 1.0, "generation": 0, "kind": "started", "job": "x", "step": 0}\n'
    events.write_text(begun + '{"time": 2.0, "ge')  # the first is in the middle of a line
    (directory / "report.html").write_text("the first one's")
    asked: list[str] = []
    monkeypatch.setattr(FleetRequest, "ask", lambda request: asked.append("ask"))
    monkeypatch.setattr(FleetRequest, "withdraw", lambda request: asked.append("withdraw"))
    monkeypatch.setattr(run, "connection", lambda *_: asked.append("connected"))
    first = make_durable(job)
    first.take_lease()
    try:
        before = shown(directory)
        with pytest.raises(ConfigError, match=first.lease.driver):
            ENTRIES[enter](job, events)
        assert shown(directory) == before
        assert not asked
    finally:
        first.close()


def test_in_a_restart_a_check_waits_until_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.01)
    answers = iter([ConfigError("read-only"), StorageError("file:///x", "read-only"), None])

    def check() -> int:
        answer = next(answers)
        if answer is not None:
            raise answer
        return 7

    with pytest.raises(ConfigError):
        with_patience(check, 60.0)
    monkeypatch.setattr(supervise, "restart_count", 1)
    assert with_patience(check, 60.0) == 7


def test_in_a_restart_a_check_that_never_passes_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.01)
    monkeypatch.setattr(supervise, "restart_count", 1)
    tries: list[int] = []

    def check() -> None:
        tries.append(1)
        raise ConfigError("no such bucket")

    with pytest.raises(ConfigError, match="no such bucket"):
        with_patience(check, 0.1)
    assert len(tries) > 1


def test_the_storage_of_a_restart_may_be_read_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_prepare` and the lease, on a real directory that takes no write at first."""
    path, cluster = write_documents(tmp_path, cluster_document(big=1))
    job = Job.from_yaml(path)
    storage = Path(job.checkpoint_storage)
    storage.parent.mkdir(parents=True, exist_ok=True)
    storage.write_text("a file in the directory's place takes no write, not even root's")
    monkeypatch.setattr(supervise, "restart_count", 1)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.unlink(storage)

    monkeypatch.setattr(patience.time, "sleep", sleep)
    prepared = with_patience(lambda: preparation.prepare(job, str(cluster), None, None), 60.0)
    assert prepared.found is None
    assert len(waits) == 3


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ({"kind": "checkpoint", "step": 15}, "has committed step 15 there, and no checkpoint"),
        ({"kind": "step", "step": 3}, "has run 4 steps with this storage, which is empty"),
    ],
)
def test_a_restart_does_not_begin_anew_in_an_empty_storage(
    last: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system of the storage is not mounted; an empty directory lies at its place."""
    path, cluster = write_documents(tmp_path, cluster_document(big=1))
    job = Job.from_yaml(path)
    storage = Path(job.checkpoint_storage)
    storage.mkdir(parents=True)
    events = tmp_path / "events.jsonl"
    told = [{"kind": "started", "step": 0}, last]
    lines = [json.dumps({"time": 0.0, "generation": 1, **line}) for line in told]
    events.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(patience, "RETRY_S", 0.01)

    def prepare() -> None:
        preparation.prepare(job, str(cluster), None, events)

    prepare()  # the job is started anew, by its user
    monkeypatch.setattr(supervise, "restart_count", 1)
    before = shown(storage)
    with pytest.raises(ConfigError, match=why):
        with_patience(prepare, 0.1)
    assert shown(storage) == before, "nothing is written below the mount"


class Clock:
    """A clock that sleeping moves on; `at(seconds, action)` has one thing happen then."""

    def __init__(self) -> None:
        self.now = 0.0
        self._actions: list[tuple[float, Callable[[], object]]] = []

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        self._actions.append((seconds, action))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self._actions and self._actions[0][0] <= self.now:
            self._actions.pop(0)[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(patience, "time", made)
    return made


def test_a_file_system_that_is_read_only_for_20_s_is_waited_for_in_a_restart_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    path, cluster = write_documents(tmp_path, cluster_document(big=1))
    job = Job.from_yaml(path)
    storage = Path(job.checkpoint_storage)
    storage.parent.mkdir(parents=True, exist_ok=True)

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(storage)], check=True)

    def prepare() -> preparation.PreparedJob:
        return preparation.prepare(job, str(cluster), None, None)

    with mounted(storage, "-t", "tmpfs", "tmpfs"):
        remount("ro")
        clock.at(20.0, lambda: remount("rw"))
        with pytest.raises(ConfigError, match="read-only"):
            with_patience(prepare, 60.0)
        assert clock.now == 0.0
        monkeypatch.setattr(supervise, "restart_count", 1)
        assert with_patience(prepare, 60.0).found is None
    assert 20.0 <= clock.now < 30.0


@pytest.mark.parametrize("kind", [StorageThrottled, StorageFailing])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_storage_that_asks_for_patience_gets_it_at_a_first_start(
    clock: Clock, kind: type[StorageError], wrapped: bool
) -> None:
    def check() -> int:
        if clock.now >= 180.0:
            return 7
        error = kind("s3://bucket", "SlowDown")
        if wrapped:
            raise ConfigError(str(error)) from error
        raise error

    assert with_patience(check, 600.0) == 7
    with pytest.raises((ConfigError, StorageError)):
        with_patience(_always(kind), 60.0)
    assert clock.now < 250.0


def _always(kind: type[StorageError]) -> Callable[[], None]:
    def check() -> None:
        raise kind("s3://bucket", "SlowDown")

    return check
