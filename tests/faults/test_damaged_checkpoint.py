"""A newest checkpoint whose data is damaged: the job goes on from an older, intact one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from autohet.control.values.observation import Observation
from recovery.checkpoint.commit import list_checkpoints, open_checkpoint
from recovery.storage.open import open_storage
from tests.faults.conftest import Scene
from tests.harness.chaos.places import flip_bit
from tests.harness.exact_job import CHAIN, LONG, differing_shards, exact_job
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference, in_generation, trains_at
from tests.harness.struck_run import Result, StruckRun, losses_by_step

pytestmark = pytest.mark.faults
MAX_GENERATIONS = 3
"""One that finds the damage, one that goes on from the older checkpoint, one to spare."""


def damage_newest(uri: Path) -> tuple[int, int]:
    """Flip a bit of each shard of the newest checkpoint; return its step and that of the checkpoint
    before.
    """
    storage = open_storage(str(uri))
    try:
        before, newest = (info.step for info in list_checkpoints(storage)[-2:])
        places = open_checkpoint(storage, newest).locations.values()
    finally:
        storage.close()
    directory = uri / f"step-{newest:08d}"
    for file, stored in places:
        flip_bit(directory / file, stored.offset)
    return newest, before


def check_end(scene: Scene, uri: Path, events: list[dict[str, Any]], result: Result) -> None:
    assert result.ok, result.reason
    assert losses_by_step(events) == list(scene.reference.losses)
    assert differing_shards(str(uri), scene.reference) == []


def test_a_new_fleet_goes_on_from_an_older_intact_checkpoint(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    uri = tmp_path / "checkpoints"
    job = exact_job(tmp_path, scene.shared, memory)
    events = Interference().when(trains_at(10), lambda run, seen: run.stop())
    first = StruckRun(job, tmp_path, hold=11).run(events)
    shutil.rmtree(memory)
    shutil.rmtree(tmp_path / "disk")
    newest, older = damage_newest(uri)
    with nothing_left(memory):
        result = StruckRun(job, tmp_path).run()
    check_end(scene, uri, first.events + result.events, result)
    restores = [event["step"] for event in result.events if event["kind"] == "restore"]
    assert restores == [older], f"step {newest} is damaged"
    begun = [event for event in result.events if event["kind"] == "plan"]
    assert len(begun) <= MAX_GENERATIONS, [event["reason"] for event in begun]


@pytest.mark.slow
def test_a_survivor_goes_on_from_an_older_intact_checkpoint(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """The only holder of two layers dies after the newest checkpoint was damaged."""
    uri = tmp_path / "checkpoints"
    job = exact_job(
        tmp_path,
        long_scene.shared,
        memory,
        CHAIN,
        training=LONG,
        checkpoint={"every_steps": 4, "replicate_every_steps": 0},
    )
    found: list[int] = []

    def two_are_committed(run: StruckRun, seen: Observation) -> bool:
        return (
            trains_at(9)(run, seen)
            and seen.checkpoint.step is not None
            and (len(list(uri.glob("step-*/manifest.json"))) >= 2)
        )

    def strike(run: StruckRun, seen: Observation) -> None:
        found.extend(damage_newest(uri))
        run.harm("kill", "b")

    events = Interference().when(two_are_committed, strike).when(in_generation(2), lambda *_: None)
    with nothing_left(memory):
        run = StruckRun(job, tmp_path, nodes={"b": 1, "c": 1, "e": 1})
        result = run.run(events)
    check_end(long_scene, uri, result.events, result)
    restores = [event["step"] for event in result.events if event["kind"] == "restore"]
    assert restores[1:] == [found[1]], (restores, found)
