"""Durable storage and disks that fail:

S3 through a proxy that misbehaves, damaged copies on every tier, full disks.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene
from tests.harness.chaos.places import flip_bit
from tests.harness.exact_job import CHAIN, EVERY, LONG, STEPS, differing_shards, exact_job
from tests.harness.fault_points import FaultPoint
from tests.harness.host_memory import memory_directory
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference, in_generation, trains_at
from tests.harness.misbehaving_proxy import MisbehavingProxy, proxy_before
from tests.harness.mounts import mounted
from tests.harness.s3_server import s3_server
from tests.harness.struck_run import Result, StruckRun, losses_by_step

pytestmark = pytest.mark.faults
RARE = {"every_steps": STEPS}
"""What these tests read from S3 is the checkpoint of a stop; others cost requests alone."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[MisbehavingProxy, str]]:
    """S3 behind the proxy, and the endpoint without it.

    This process's environment leads through the proxy.
    """
    with s3_server() as running, proxy_before(running.endpoint) as proxy:
        running.create_bucket("runs")
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        yield proxy, running.endpoint


@pytest.fixture
def proxy(server: tuple[MisbehavingProxy, str]) -> Iterator[MisbehavingProxy]:
    server[0].mode = "good"
    server[0].damages = 0
    server[0].refused = 0
    server[0].data_reads.clear()
    yield server[0]
    server[0].mode = "good"


def aws() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def storage_of(directory: Path) -> str:
    return f"s3://runs/{directory.name}"


def start_run(
    scene: Scene,
    directory: Path,
    memory: Path,
    *,
    nodes: dict[str, int] | None = None,
    plan: Any = None,
    hold: int | None = None,
    **sections: Any,
) -> StruckRun:
    job = exact_job(directory, scene.shared, memory, plan, **sections)
    run = StruckRun(job, directory, nodes=nodes, hold=hold)
    run.fleet.environment.update(aws())
    return run


def check(scene: Scene, storage: str, events: list[dict[str, Any]], result: Result) -> None:
    assert result.ok, result.reason
    assert losses_by_step(events) == list(scene.reference.losses)
    assert differing_shards(storage, scene.reference) == []


def becomes(proxy: MisbehavingProxy, mode: str) -> Callable[[StruckRun, Observation], None]:
    return lambda run, seen: setattr(proxy, "mode", mode)


def test_storage_that_is_gone_for_a_while_and_then_misbehaves_costs_no_step(
    proxy: MisbehavingProxy, long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Checkpoints fail, training and a recovery go on; once it answers, some requests at least, so
    are the checkpoints, and another death loses nothing, either. No byte of state is read from S3.
    """

    def answers_some(run: StruckRun, seen: Observation) -> None:
        assert proxy.refused > 0
        proxy.refused = 0
        proxy.mode = "errors"

    events = Interference()
    events.when(trains_at(3), becomes(proxy, "unreachable"))
    events.when(trains_at(6), lambda run, seen: run.harm("kill", "a"))
    events.when(in_generation(2), lambda run, seen: None)
    events.when(trains_at(10), answers_some)
    events.when(trains_at(13), lambda run, seen: run.harm("kill", "b/0"))
    events.when(in_generation(3), lambda run, seen: None)
    uri = storage_of(tmp_path)
    checkpoint = {"storage": uri, "every_steps": 8}
    with nothing_left(memory):
        result = start_run(long_scene, tmp_path, memory, checkpoint=checkpoint, training=LONG).run(
            events
        )
        assert result.ok, result.reason
    assert not events.events
    assert proxy.refused > 0
    assert result.summary["steps_lost"] == 0
    assert proxy.data_reads == []
    proxy.mode = "good"
    check(long_scene, uri, result.events, result)


def first_life(
    scene: Scene, directory: Path, memory: Path, uri: str, stop_at: int, **given: Any
) -> Result:
    """A run that is stopped, with a committed checkpoint, after some steps."""
    events = Interference().when(trains_at(stop_at), lambda run, seen: run.stop())
    given["checkpoint"] = RARE | {"storage": uri}
    result = start_run(scene, directory, memory, hold=stop_at + 1, **given).run(events)
    assert result.reason == "stopped by the test", result.reason
    return result


@dataclass(frozen=True)
class StoppedRun:
    """A run that was stopped; then all of its nodes went, with their memories and disks."""

    result: Result
    storage: str
    endpoint: str

    def copy_storage(self, directory: Path) -> str:
        """Copy what is left of the run into a test's own storage; return its URI."""
        bucket, _, prefix = self.storage.removeprefix("s3://").partition("/")
        uri = storage_of(directory)
        client = boto3.client("s3", endpoint_url=self.endpoint)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for found in page["Contents"]:
                source = {"Bucket": bucket, "Key": found["Key"]}
                key = found["Key"].replace(prefix, directory.name, 1)
                client.copy_object(Bucket=bucket, Key=key, CopySource=source)
        client.close()
        return uri


@pytest.fixture(scope="module")
def stopped(
    server: tuple[MisbehavingProxy, str], scene: Scene, tmp_path_factory: pytest.TempPathFactory
) -> StoppedRun:
    directory = tmp_path_factory.mktemp("stopped")
    memory = memory_directory(directory)
    uri = storage_of(directory)
    result = first_life(scene, directory, memory, uri, 9)
    shutil.rmtree(memory)
    shutil.rmtree(directory / "disk")
    return StoppedRun(result, uri, server[1])


@pytest.mark.slow
def test_another_fleet_reads_s3_that_misbehaves(
    proxy: MisbehavingProxy, stopped: StoppedRun, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """All nodes are gone with their memories and disks; every second request of the new fleet is
    refused, and the first body that it reads is damaged.
    """
    uri = stopped.copy_storage(tmp_path)
    before = stopped.result
    proxy.mode = "throttled"
    proxy.damages = 1
    with nothing_left(memory):
        result = start_run(scene, tmp_path, memory, checkpoint=RARE | {"storage": uri}).run()
        assert result.ok, result.reason
    assert proxy.data_reads
    assert proxy.refused > 0
    assert proxy.damages == 0
    proxy.mode = "good"
    assert result.summary["first_step"] == before.summary["steps"]
    check(scene, uri, before.events + result.events, result)


def test_another_fleet_loses_a_worker_while_it_reads(
    proxy: MisbehavingProxy, stopped: StoppedRun, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Worker b/0 dies before its part of the restore."""
    uri = stopped.copy_storage(tmp_path)
    before = stopped.result
    generation = before.summary["generations"] + 1
    events = Interference().when(in_generation(generation + 1), lambda run, seen: None)
    with nothing_left(memory):
        run = start_run(scene, tmp_path, memory, checkpoint=RARE | {"storage": uri})
        run.fleet.points = (FaultPoint("restore", "b/0", generation=generation),)
        run.fleet.act = lambda arrived: run.fleet.kill_worker("b/0")
        result = run.run(events)
        assert result.ok, result.reason
    assert not events.events, result.reason
    assert proxy.data_reads
    started_again = {name for name, count in result.starts.items() if count > 1}
    assert started_again == {"worker-b/0"}, "all others keep their processes"
    assert result.summary["first_step"] == before.summary["steps"], (
        "from the same checkpoint, and no step is drawn anew"
    )
    check(scene, uri, before.events + result.events, result)


@pytest.mark.slow
def test_another_fleet_that_reads_a_silent_storage_changes_once_more(
    proxy: MisbehavingProxy,
    stopped: StoppedRun,
    scene: Scene,
    tmp_path: Path,
    memory: Path,
) -> None:
    """Every worker waits for S3, which answers half of what is asked, and d/0 dies: the others come
    out of it at once and keep their processes.
    """
    uri = stopped.copy_storage(tmp_path)
    before = stopped.result
    generation = before.summary["generations"] + 1
    waiting: dict[str, int] = {}

    def reads(run: StruckRun, seen: Observation) -> bool:
        """From the first orders on S3 is silent; true once requests of four workers or more
        wait.
        """
        if run.controller.memory.generation == generation:
            proxy.mode = "half"
        return proxy.silent >= 4

    def strike(run: StruckRun, seen: Observation) -> None:
        waiting.update({worker: report.process_id for worker, report in seen.reports.items()})
        run.fleet.kill_worker("d/0")

    def kept(run: StruckRun, seen: Observation) -> None:
        proxy.mode = "good"
        assert len(waiting) == 5
        assert {
            w: r.process_id for w, r in seen.reports.items() if w != "d/0"
        }.items() <= waiting.items()

    events = Interference()
    events.when(reads, strike)
    events.when(in_generation(generation + 1), kept)
    with nothing_left(memory):
        run = start_run(scene, tmp_path, memory, checkpoint=RARE | {"storage": uri})
        result = run.run(events)
        assert result.ok, result.reason
    assert not events.events, result.reason
    death, again = (
        next(
            event["time"]
            for event in result.events
            if event["kind"] == kind and event["generation"] == number
        )
        for kind, number in (("death", generation), ("plan", generation + 1))
    )
    assert again - death < run.job.elastic.timeouts().transfer_s / 2, "no read's own deadline"
    assert all(count == 1 for name, count in result.starts.items() if name != "worker-d/0"), (
        result.starts
    )
    check(scene, uri, before.events + result.events, result)


def settled(listing: Callable[[], list[Path]], still_s: float = 0.3) -> list[Path]:
    """What a frozen sender had on its way has come, and what it replaces is gone."""
    found = listing()
    since = time.monotonic()
    while time.monotonic() - since < still_s:
        time.sleep(0.02)
        now = listing()
        if now != found:
            found = now
            since = time.monotonic()
    return found


def modified(file: Path) -> int:
    """In nanoseconds; of a file that went while it was looked at, 0."""
    with suppress(FileNotFoundError):
        return file.stat().st_mtime_ns
    return 0


def damage(files: list[Path]) -> None:
    """Flip one bit of each payload."""
    assert files
    for path in files:
        flip_bit(path, path.stat().st_size - 2000)


def test_a_damaged_snapshot_in_host_memory(scene: Scene, tmp_path: Path, memory: Path) -> None:
    """A worker dies that alone held its layers; of its two snapshots on its node, the newest is
    damaged. What is used is whole.
    """
    events = Interference()

    def strike(run: StruckRun, seen: Observation) -> None:
        run.fleet.freeze_worker("b/0")
        files = sorted((memory / "run" / "b").glob("b%2F0.g1.*.snapshot"), key=modified)
        damage(files[-1:])
        run.harm("kill", "b/0")

    events.when(trains_at(6), strike)
    events.when(in_generation(2), lambda run, seen: None)
    with nothing_left(memory):
        run = start_run(scene, tmp_path, memory, nodes={"b": 1, "c": 1}, plan=CHAIN, hold=8)
        result = run.run(events)
        assert result.ok, result.reason
    assert not events.events, result.reason
    check(scene, str(tmp_path / "checkpoints"), result.events, result)
    assert result.summary["steps_lost"] <= EVERY


@pytest.mark.parametrize("which", [pytest.param("the newest", marks=pytest.mark.slow), "all"])
def test_a_damaged_copy_at_a_peer(
    which: str, long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """A node dies that alone held its layers; of the copies that its peers have, the newest or all
    are damaged. What is used is whole: an older round's, or the newest checkpoint's shards of that
    node.
    """
    events = Interference()
    every = 2 * EVERY

    def copies() -> list[Path]:
        found = [
            path
            for node in ("c", "e")
            for path in (memory / "run" / node).glob("b%2F0.*pushed*.snapshot")
        ]
        return sorted(found, key=modified)

    def stands_with_copies(run: StruckRun, seen: Observation) -> bool:
        """Node b stands, and peers have copies of its state; not so right after a checkpoint, which
        makes older copies needless.
        """
        if not (trains_at(every + 1)(run, seen) and copies()):
            return False
        processes = run.fleet.processes_of("b")
        run.fleet.freeze_node("b")
        if settled(copies):
            return True
        run.fleet.thaw_node("b", processes)
        return False

    def strike(run: StruckRun, seen: Observation) -> None:
        damage(copies() if which == "all" else copies()[-1:])
        run.fleet.kill_node("b")

    events.when(stands_with_copies, strike)
    events.when(in_generation(2), lambda run, seen: None)
    with nothing_left(memory):
        run = start_run(
            long_scene,
            tmp_path,
            memory,
            nodes={"b": 1, "c": 1, "e": 1},
            plan=CHAIN,
            checkpoint={"every_steps": every},
            training=LONG,
        )
        result = run.run(events)
        assert result.ok, result.reason
    assert not events.events, result.reason
    check(long_scene, str(tmp_path / "checkpoints"), result.events, result)
    changes = result.summary["reconfigurations"]
    assert changes[0]["step"] >= every, "not further back than to the newest checkpoint"
    if which == "all":
        assert sum(change["bytes_by_tier"]["s3"] for change in changes) > 0, (
            "nothing else holds them"
        )


@pytest.mark.slow
def test_a_damaged_copy_on_a_disk(
    proxy: MisbehavingProxy, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """The hosts were started again: their memory is empty, and one disk's copies are damaged. S3
    gives what that disk held.
    """
    uri = storage_of(tmp_path)
    given = {"nodes": {"b": 1, "c": 1}, "plan": CHAIN}
    before = first_life(scene, tmp_path, memory, uri, 9, **given)
    shutil.rmtree(memory)
    damage(sorted((tmp_path / "disk" / "run" / "b").rglob("*.snapshot")))
    proxy.data_reads.clear()
    with nothing_left(memory):
        result = start_run(
            scene, tmp_path, memory, checkpoint=RARE | {"storage": uri}, **given
        ).run()
        assert result.ok, result.reason
    assert proxy.data_reads
    restored = next(event["bytes_by_tier"] for event in result.events if event["kind"] == "restore")
    assert restored["disk"] > 0, restored
    check(scene, uri, before.events + result.events, result)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, far less than the state; where one may not mount, there is no such
    test.
    """
    path = tmp_path / "small"
    with mounted(path, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        yield path


@pytest.mark.parametrize(
    "which", [pytest.param("local_directory", marks=pytest.mark.slow), "memory_directory"]
)
def test_a_full_disk_or_memory_of_a_node_stops_nothing(
    which: str, small_disk: Path, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    events = Interference()
    events.when(trains_at(6), lambda run, seen: run.harm("kill", "a"))
    events.when(in_generation(2), lambda run, seen: None)
    checkpoint = {which: str(small_disk)}
    result = start_run(scene, tmp_path, memory, hold=8, checkpoint=checkpoint).run(events)
    assert not events.events, result.reason
    assert result.summary["steps_lost"] == 0
    check(scene, str(tmp_path / "checkpoints"), result.events, result)


def test_full_durable_storage_is_said_at_the_end(
    small_disk: Path, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """All steps are trained; none is durable, and the outcome says why."""
    run = start_run(
        scene,
        tmp_path,
        memory,
        checkpoint={"storage": str(small_disk)},
        elastic={"checkpoint_timeout_s": 10},
    )
    result = run.run()
    run.forget()
    assert not result.ok
    assert "no space left" in result.reason
    assert losses_by_step(result.events) == list(scene.reference.losses)


def test_an_absence_of_the_storage_refuses_no_later_checkpoint(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """An empty directory lies at the storage's place while a generation begins; then it is back."""
    uri = tmp_path / "checkpoints"
    away = tmp_path / "away"

    def leave(run: StruckRun, seen: Observation) -> None:
        uri.rename(away)
        uri.mkdir()
        run.harm("kill", "a")

    def come_back(run: StruckRun, seen: Observation) -> None:
        uri.rename(tmp_path / "beneath")
        away.rename(uri)

    events = Interference()
    events.when(trains_at(6), leave)
    events.when(
        lambda run, seen: in_generation(2)(run, seen) and trains_at(9)(run, seen), come_back
    )
    with nothing_left(memory):
        result = start_run(
            long_scene,
            tmp_path,
            memory,
            checkpoint={"storage": str(uri), "every_steps": 5},
            training=LONG,
        ).run(events)
        assert result.ok, result.reason
    assert not events.events, result.reason
    assert result.summary["steps_lost"] == 0
    committed = [e for e in result.events if e["kind"] == "checkpoint" and e["generation"] > 1]
    assert committed, "checkpoints of the generation that began meanwhile count"
    check(long_scene, str(uri), result.events, result)
