"""Every cell of the fault matrix: bit-equal weights, no step lost while a holder lives, nothing
read from storage, nothing left.
"""

import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from autohet.control import replanning
from autohet.driver.loop.replay import replay_run
from recovery.checkpoint.commit import newest_checkpoint
from recovery.checkpoint.receipts import read_uploads
from recovery.storage.open import open_storage
from tests.faults.conftest import Scene, check_outcome
from tests.faults.fault_matrix import COVERING, MATRIX
from tests.harness.driver_life import DriverLife
from tests.harness.exact_job import (
    MODEL,
    STEPS,
    differing_shards,
    exact_job,
    train_alone,
)
from tests.harness.history import history_of
from tests.harness.leaks import nothing_left
from tests.harness.living import is_alive
from tests.harness.served_objects import BACK_END
from tests.harness.struck_run import VICTIMS, Result, Strike, StruckRun

pytestmark = pytest.mark.faults
DEFERRED = frozenset({"rebuild-worker-kill"})
GATED = frozenset({"gradient_sync-worker-kill"})
LARGE: Mapping[str, Mapping[str, Any]] = {
    "model": {"config": {**MODEL, "history_size": 1_400_000}},
}
"""34 MB of state: a copy, an update and a transfer take a while, and break off in their middle."""
LARGE_CELLS = (
    "apply-worker-kill",
    "mid_update-node-kill",
    "snapshot-node-kill",
    "snapshot-driver-kill",
    "upload-pipeline-kill",
    "restore-node-freeze",
    "rebuild-worker-freeze",
)
NCCL_CELLS = (
    "gradient_sync-worker-kill",
    "apply-worker-kill",
    "restore-node-kill",
    "backward-worker-freeze",
    "forward-node-notice",
)
ON_GPU: Mapping[str, Mapping[str, Any]] = {
    "training": {"device": "cuda"},
}
"""Contexts and communicators take seconds to make, and processes that share a card hold up each
other's."""
SEEN_FROZEN = {
    "worker": "is stopped, as its node's agent sees",
    "node": "answers, its agent included",
    "pipeline": "answers, its agent included",
}
"""Reasons of deaths by freezes: found before the heartbeat's time-out."""
HEARTBEAT_S = 4.0
FREEZE_S = HEARTBEAT_S + 1.0


def cells(in_ci: Collection[str]) -> list[Any]:
    return [
        pytest.param(strike, id=name, marks=() if name in in_ci else pytest.mark.slow)
        for name, strike in MATRIX.items()
    ]


def train_short(scene: Scene, directory: Path, sections: Mapping[str, Mapping[str, Any]]) -> Scene:
    """What an undisturbed run of a cell's job gives."""
    return Scene(scene.shared, train_alone(directory, scene.shared, **sections))


@pytest.mark.parametrize("strike", cells(COVERING))
def test_cell(strike: Strike, scene: Scene, tmp_path: Path, memory: Path) -> None:
    run_cell = _driver_cell if strike.scope == "driver" else _fleet_cell
    run_cell(strike, scene, tmp_path, memory)


@pytest.mark.parametrize(
    "strike", [cell for cell in cells(DEFERRED) if cell.values[0].scope != "driver"]
)
def test_cell_on_groups_with_cuda_semantics(
    strike: Strike, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    _fleet_cell(strike, scene, tmp_path, memory, {BACK_END: "deferred"})


@pytest.mark.parametrize(
    "strike", [cell for cell in cells(GATED) if cell.values[0].scope != "driver"]
)
def test_cell_of_gated_steps(strike: Strike, scene: Scene, tmp_path: Path, memory: Path) -> None:
    with patch.object(replanning, "GATED_STEP_S", 0.0):
        _fleet_cell(strike, scene, tmp_path, memory)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NCCL_CELLS)
def test_cell_over_nccl_on_one_gpu(
    name: str, gpu_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Five workers share one card: two pipelines of unequal depth beside one of TP 2."""
    _fleet_cell(MATRIX[name], gpu_scene, tmp_path, memory, {BACK_END: "one GPU"}, ON_GPU)


@pytest.fixture(scope="module")
def gpu_scene(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """The undisturbed run is on the GPU, too: its update rounds otherwise than the CPU's."""
    return train_short(scene, tmp_path_factory.mktemp("alone"), ON_GPU)


@pytest.fixture(scope="module")
def large_scene(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return train_short(scene, tmp_path_factory.mktemp("alone"), LARGE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name == "restore-node-freeze" else pytest.mark.slow,
        )
        for name in LARGE_CELLS
    ],
)
def test_cell_with_a_state_of_tens_of_megabytes(
    name: str, large_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    strike = MATRIX[name]
    (_driver_cell if strike.scope == "driver" else _fleet_cell)(
        strike, large_scene, tmp_path, memory, sections=LARGE
    )


def _fleet_cell(
    strike: Strike,
    scene: Scene,
    tmp_path: Path,
    memory: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    job = exact_job(tmp_path, scene.shared, memory, **sections)
    with nothing_left(memory):
        run = StruckRun(job, tmp_path, strike, records=strike.mode == "notice")
        run.fleet.environment.update(environment)
        result = run.run()
        assert not [pid for pid in run.fleet.process_ids if is_alive(pid)]
        assert result.ok, result.reason
    assert result.struck_at_step is not None, f"the run never came to {strike.point}"
    assert result.complaints == []
    deaths = [event["reason"] for event in result.events if event["kind"] == "death"]
    assert strike.mode != "freeze" or SEEN_FROZEN[strike.scope] in deaths[0], deaths
    if strike.mode == "notice":  # what the driver saw decides the same again
        assert replay_run(run.observations, paced=False).difference is None
    check_outcome(job.checkpoint_storage, scene.reference, result.events)
    check_survivors(strike, result)
    changes = result.summary["reconfigurations"]
    assert changes or result.struck_at_step >= STEPS - 1, "nothing was done about it"
    assert result.summary["steps_lost"] == 0, changes
    assert sum(change["bytes_by_tier"]["s3"] for change in changes) == 0, changes


def _driver_cell(
    strike: Strike,
    scene: Scene,
    tmp_path: Path,
    memory: Path,
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    given = {**sections, "elastic": {"heartbeat_timeout_s": HEARTBEAT_S}}
    job = exact_job(tmp_path, scene.shared, memory, **given)
    lives: list[DriverLife] = []
    with nothing_left(memory):
        try:
            lives.append(DriverLife(job, tmp_path / "first", strike))
            _one_or_two_lives(strike, job, lives, tmp_path)
        finally:
            for life in lives:
                life.close()
        last = lives[-1].result
        assert last["ok"], last["reason"]
    assert not any(life.result["complaints"] for life in lives if life.result_is_there)
    told = {e["step"]: e["loss"] for life in lives for e in life.events if e["kind"] == "step"}
    assert told == {step: scene.reference.losses[step] for step in told}
    # What a driver had not heard of when it was killed, nobody tells of: steps of its last
    # generation that its nodes keep.
    begun = [event["step"] for event in lives[-1].events if event["kind"] == "restore"]
    heard = max((e["step"] + 1 for e in lives[0].events if e["kind"] == "step"), default=0)
    untold = sorted(set(range(STEPS)) - set(told))
    assert untold == (list(range(heard, begun[0])) if strike.mode == "kill" and begun else [])
    steps = [event for life in lives for event in life.events if event["kind"] == "step"]
    last_of_first = max(
        (event["generation"] for event in lives[0].events if event["kind"] == "plan"), default=1
    )
    steps = [{"kind": "step", "step": step, "generation": last_of_first} for step in untold] + steps
    assert differing_shards(str(tmp_path / "checkpoints"), scene.reference, history_of(steps)) == []
    restores = [event for event in lives[-1].events if event["kind"] == "restore"]
    assert sum(event["bytes_by_tier"]["s3"] for event in restores) == 0, restores
    assert last["summary"]["steps_lost"] == 0


def _one_or_two_lives(strike: Strike, job: Any, lives: list[DriverLife], tmp_path: Path) -> None:
    first = lives[0]
    if strike.mode == "freeze":
        first.wait_frozen()
        time.sleep(FREEZE_S)
        first.thaw()
        assert first.wait() == 0
        deaths = [event for event in first.events if event["kind"] == "death"]
        assert not deaths, "a driver that slept takes its workers for dead"
        return
    assert first.wait() == (-signal.SIGKILL if strike.mode == "kill" else 0)
    committed = max(
        (event["step"] + 1 for event in first.events if event["kind"] == "step"), default=0
    )
    durable = newest_durable(job.checkpoint_storage)
    lives.append(DriverLife(job, tmp_path / "second", None))
    assert lives[1].wait() == 0
    begun = next(event["step"] for event in lives[1].events if event["kind"] == "started")
    assert begun == durable
    assert strike.point != "manifest" or begun == strike.step
    restored = [event["step"] for event in lives[1].events if event["kind"] == "restore"]
    if strike.mode == "notice":
        assert first.result["reason"] == "stopped by SIGTERM"
        assert begun == committed
    # What the nodes keep in host memory is gone on from: of what the driver saw at most one step is
    # not whole there.
    assert not restored or restored[0] >= committed - 1, (restored, committed)


def newest_durable(uri: str) -> int:
    """The newest step in a storage that is committed, or that the next driver commits since all
    its receipts are stored: workers that outlive their driver for a moment may write the last one.
    0 where there is none.
    """
    storage = open_storage(uri)
    try:
        newest = newest_checkpoint(storage)
        steps = [upload.step for upload in read_uploads(storage) if upload.is_complete]
        return max(steps, default=0) if newest is None else max([newest.step, *steps])
    finally:
        storage.close()


def check_survivors(strike: Strike, result: Result) -> None:
    """Whoever was not struck kept its process through all of it."""
    struck = {victim.split("/")[0] for victim in VICTIMS[strike.scope]} | {
        (strike.before or " ").split(" ")[1]
    }
    again = [name for name, starts in result.starts.items() if starts > 1]
    assert {name.split("-")[1].split("/")[0] for name in again} <= struck, again
    assert not [
        e for e in result.events if e["kind"] == "death" and "did not stop in time" in e["reason"]
    ]
