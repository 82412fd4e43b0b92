"""The driver's side of durable storage: what earlier runs left goes when a job starts, and every
commit is told.
"""

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from autohet.control.ledger.ledger import Ledger
from autohet.control.values.effects import Round
from autohet.control.values.observation import Observation
from autohet.driver.checkpoints import durable
from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.driver.checkpoints.spending import Spending, read_spending, store_spending
from autohet.driver.job.run_storage import CheckpointScalars
from autohet.runtime.messages import EVALUATIONS
from recovery.checkpoint.commit import commit_checkpoint, list_checkpoints, open_checkpoint
from recovery.checkpoint.epoch import claim_epoch
from recovery.checkpoint.journal import read_ancestry
from recovery.checkpoint.read import verify
from recovery.state.ancestry import Descent
from recovery.storage.errors import StorageThrottled
from recovery.storage.open import open_storage
from tests.harness.checkpoint_cases import (
    full_state,
    make_checkpoint,
    state_specs,
    two_worker_layout,
    write_all,
)
from tests.harness.fake_job import fake_job
from tests.harness.faulty_storage import FaultyStorage, raises
from tests.harness.s3_server import s3_server


def make_old(root, step):
    """Make everything of a step look a day old."""
    for path in Path(root, f"step-{step:08d}").iterdir():
        stamp = path.stat().st_mtime - 86400
        os.utime(path, (stamp, stamp))


def test_a_job_clears_up_when_it_starts_and_once(tmp_path):
    directory, layout = open_storage(str(tmp_path)), two_worker_layout(state_specs())
    for step in (1, 2):
        write_all(directory, step, layout, full_state(layout.tensors))
    make_old(tmp_path, 1)
    durable = Durable(directory, RunFacts("job", {}, {}), Retention(2))
    assert durable.load_newest().step is None
    until = time.monotonic() + 20
    while any(True for _ in directory.list("step-00000001/")):
        assert time.monotonic() < until
        time.sleep(0.01)
    make_old(tmp_path, 2)
    durable.load_newest()
    durable.close()
    assert any(True for _ in directory.list("step-00000002/")), "another's upload, begun meanwhile"


def test_the_best_checkpoints_stay_by_the_losses_that_are_known(tmp_path):
    """A step without a loss is never among the best; nor is one without a checkpoint."""
    directory, layout = open_storage(str(tmp_path)), two_worker_layout(state_specs())
    durable = Durable(directory, RunFacts("job", {}, {}), Retention(1, 2))
    losses = {2: 1.0, 4: 2.0, 8: 3.0, 16: 2.5, 20: 2.7}
    for step in (4, 8, 12, 16, 20, 24):
        durable.cleaner.losses = {each: loss for each, loss in losses.items() if each < step}
        receipts = write_all(directory, step, layout, full_state(layout.tensors))
        durable.commit(step, 1, layout, receipts)
    durable.close()
    storage = open_storage(str(tmp_path))
    assert [info.step for info in list_checkpoints(storage)] == [4, 16, 24]


def test_a_driver_that_is_replaced_while_it_commits_removes_nothing(tmp_path, monkeypatch):
    """It stands still before it applies its retention: the next one keeps other steps."""
    directory, layout = open_storage(str(tmp_path)), two_worker_layout(state_specs())
    old = Durable(directory, RunFacts("job", {}, {}), Retention(1), lease_s=60.0)
    old.take_lease()

    def commit_and_stand_still(*arguments, **named):
        manifest = commit_checkpoint(*arguments, **named)
        if manifest.step == 12:
            claim_epoch(directory, "next")
        return manifest

    monkeypatch.setattr(durable, "commit_checkpoint", commit_and_stand_still)
    for step in (4, 8, 12):
        receipts = write_all(directory, step, layout, full_state(layout.tensors))
        old.commit(step, 1, layout, receipts)
    old.work_pool.submit(store_spending, directory, Spending(0.0, 0.0), old.epoch).result()
    assert [info.step for info in list_checkpoints(directory)] == [8, 12]
    assert read_spending(directory) is None
    assert "next" in str(old.state().superseded)
    old.close()


def test_losses_lie_beside_the_checkpoints_and_a_driver_goes_on_with_them(tmp_path):
    make_checkpoint(open_storage(str(tmp_path)), 8)
    job = fake_job(
        checkpoint={"storage": str(tmp_path), "keep_best": 1, "every_steps": 4},
        evaluation={"source": "x", "every_steps": 4},
    )

    def driver() -> tuple[Durable, SimpleNamespace]:
        durable = Durable(open_storage(str(tmp_path)), RunFacts("job", {}, {}), Retention(1, 1))
        memory = SimpleNamespace(generation=0, ledger=Ledger(job))
        CheckpointScalars(job, durable).go_on_from(durable.load_newest().manifest, memory)
        return durable, memory

    durable, memory = driver()
    assert memory.ledger.evaluation_log.losses == {}, "a checkpoint of an earlier release"
    memory.ledger.evaluation_log.use_rows("rows")
    facts = CheckpointScalars(job, durable)
    for step, loss in ((4, 2.0), (8, 1.5), (12, 9.0)):
        memory.ledger.evaluation_log.take(step, loss)
        facts.record(memory)
    assert durable.cleaner.losses == {4: 2.0, 8: 1.5, 12: 9.0}
    durable.close()

    durable, memory = driver()
    assert memory.ledger.evaluation_log.losses == {4: 2.0, 8: 1.5}, "until the step gone on from"
    assert memory.ledger.evaluation_log.use_rows("rows") is None
    durable.close()
    (tmp_path / EVALUATIONS).write_text('{"losses": [1]}')
    durable, memory = driver()
    assert memory.ledger.evaluation_log.losses == {}
    durable.close()


def test_checkpoints_committed_between_two_looks_are_all_told(tmp_path):
    directory, layout = open_storage(str(tmp_path)), two_worker_layout(state_specs())
    durable, decided = Durable(directory, RunFacts("job", {}, {}), Retention(5)), Round()
    ledger, controller = Ledger(fake_job()), SimpleNamespace(generation=1, members=())
    for step in (4, 8):
        durable.commit(
            step, 1, layout, write_all(directory, step, layout, full_state(layout.tensors))
        )
    durable.refresh()
    durable.close()  # all that was asked for is done
    for _ in range(2):
        decided.collect(
            ledger.record(Observation(10.0, {}, checkpoint=durable.state()), controller)
        )
    assert [each.fields["step"] for each in decided.events if each.kind == "checkpoint"] == [4, 8]
    assert ledger.checkpoints.step == 8


@pytest.fixture
def s3() -> Iterator[str]:
    with s3_server() as server:
        yield f"{server.create_bucket(uuid.uuid4().hex)}/job"


@pytest.mark.parametrize(
    ("storage_kind", "keep", "kept"),
    [("tmp_path", None, [2, 4, 6, 8, 10]), ("tmp_path", 2, [8, 10]), ("s3", 2, [8, 10])],
)
def test_all_checkpoints_are_kept_where_that_is_asked_for(
    storage_kind: str,
    keep: int | None,
    kept: list[int],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Generation 2 goes back to step 4, so its predecessor's steps 6 and 12 are of a history that
    was left.
    """
    place = str(request.getfixturevalue(storage_kind))
    storage, layout = open_storage(place), two_worker_layout(state_specs())
    durable = Durable(open_storage(place), RunFacts("job", {}, {}), Retention(keep))

    def commit(step: int, generation: int) -> None:
        durable.commit(
            step, generation, layout, write_all(storage, step, layout, full_state(layout.tensors))
        )

    driver, read = durable.lease.driver, Mock(wraps=open_checkpoint)
    monkeypatch.setattr("autohet.driver.checkpoints.cleaning.open_checkpoint", read)
    durable.claim(Descent(generation=1, parent=None, first_step=0, driver=driver))
    for step in (2, 4, 6, 12):
        commit(step, 1)
    durable.work_pool.submit(int).result(20)
    durable.claim(Descent(generation=2, parent=1, first_step=4, driver=driver))
    durable.claim_pool.submit(int).result(20)
    for step in (6, 8, 10):
        commit(step, 2)
    durable.close()
    assert (durable.state().error, durable.state().superseded) == (None, None)
    assert [info.step for info in list_checkpoints(storage)] == kept
    assert {info.name.split("/")[0] for info in storage.list("step-")} == {
        f"step-{step:08d}" for step in kept
    }
    assert all(verify(storage, step).ok for step in kept)
    assert set(read_ancestry(storage).entries) == ({1, 2} if keep is None else {2})
    assert read.called is (keep is not None), (
        "who keeps thousands does not read them all with each commit"
    )
    storage.close()


def test_whatever_fails_in_a_commit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the last checkpoint would wait for its whole deadline."""
    storage, layout = open_storage(str(tmp_path)), two_worker_layout(state_specs())
    durable = Durable(storage, RunFacts("job", {}, {}), Retention(2))
    receipts = write_all(storage, 4, layout, full_state(layout.tensors))
    monkeypatch.setattr(
        storage, "put", Mock(side_effect=AttributeError("nobody has thought of this"))
    )
    durable.commit(4, 1, layout, receipts)
    durable.close()
    state = durable.state()
    assert (state.error, state.error_step, state.error_generation) == (
        "nobody has thought of this",
        4,
        1,
    )


def test_a_generation_whose_claim_fails_in_any_way_is_known_to_be_unclaimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    durable = Durable(storage, RunFacts("job", {}, {}), Retention(2))
    monkeypatch.setattr(
        storage, "put", Mock(side_effect=AttributeError("nobody has thought of this"))
    )
    woken = threading.Event()
    durable.wake = woken.set
    durable.claim(Descent(generation=3, parent=None, first_step=0))
    assert woken.wait(20), "a driver waits for it"
    durable.close()
    assert (durable.state().claimed, durable.state().unclaimed) == (3, 3)


def ticks_until(durable: Durable, done: Callable[[], bool]) -> None:
    """Look at the state again and again, as a driver's ticks do."""
    until = time.monotonic() + 20
    while not done():
        assert time.monotonic() < until, durable.state()
        durable.state()
        time.sleep(0.01)


def test_a_commit_that_the_storage_refuses_for_a_while_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autohet.driver.checkpoints.durable.FIRST_RETRY_S", 0.01)
    layout = two_worker_layout(state_specs())
    storage = open_storage(str(tmp_path))
    receipts = write_all(storage, 4, layout, full_state(layout.tensors))
    faulty = FaultyStorage(storage)
    faulty.fault("put", raises(StorageThrottled("x", "SlowDown")), times=3, suffix="manifest.json")
    durable = Durable(faulty, RunFacts("job", {}, {}), Retention(2))
    durable.commit(4, 1, layout, receipts)
    ticks_until(durable, lambda: durable.state().error is not None)
    assert durable.state().is_retried
    assert (durable.state().error_step, durable.state().step) == (4, None)
    ticks_until(durable, lambda: durable.state().step == 4)
    assert (durable.state().error, durable.state().is_retried) == (None, False)
    durable.close()
    assert verify(storage, 4).ok


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_broken_newest_checkpoint_is_passed_over_for_an_intact_older_one(
    tmp_path: Path, how: str
) -> None:
    """Cut short, it is never tried; a flipped byte shows once a restore did not get a shard."""
    layout = two_worker_layout(state_specs())
    storage = open_storage(str(tmp_path))
    durable = Durable(storage, RunFacts("job", {}, {}), Retention(2))
    for step in (4, 8):
        durable.commit(
            step, 1, layout, write_all(storage, step, layout, full_state(layout.tensors))
        )
    durable.close()
    manifest = open_checkpoint(storage, 8)
    file = manifest.files[0]
    path = tmp_path / "step-00000008" / file.name
    data = bytearray(path.read_bytes())
    data[file.shards[0].offset] ^= 1
    path.write_bytes(data if how == "flipped" else data[:-200])
    again = Durable(storage, RunFacts("job", {}, {}), Retention(2))
    found = again.load_newest()
    if how == "flipped":
        assert found.step == 8
        other = file.shards[-1].shard
        again.refresh({(8, other)})  # a source may fail without being damaged
        ticks_until(again, again.fresh)
        assert again.state().step == 8
        again.refresh({(8, file.shards[0].shard)})
        ticks_until(again, again.fresh)
    assert again.state().step == 4
    assert again.state().manifest.step == 4
    (why,) = again.state().damaged
    assert "8" in why
    again.close()


def test_where_no_intact_checkpoint_is_left_no_job_starts_anew(tmp_path: Path) -> None:
    layout = two_worker_layout(state_specs())
    storage = open_storage(str(tmp_path))
    durable = Durable(storage, RunFacts("job", {}, {}), Retention(2))
    durable.commit(4, 1, layout, write_all(storage, 4, layout, full_state(layout.tensors)))
    durable.close()
    file = open_checkpoint(storage, 4).files[0]
    path = tmp_path / "step-00000004" / file.name
    data = bytearray(path.read_bytes())
    data[file.shards[0].offset] ^= 1
    path.write_bytes(data)
    again = Durable(storage, RunFacts("job", {}, {}), Retention(2))
    assert again.load_newest().step == 4
    again.refresh({(4, file.shards[0].shard)})
    ticks_until(again, again.fresh)
    assert "no intact checkpoint" in str(again.state().superseded)
    again.close()


def test_a_commit_on_an_empty_mount_point_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system is away while a checkpoint is to be committed: that fails and is tried
    again; once it is back, a generation that began meanwhile is of the present history.
    """
    monkeypatch.setattr("autohet.driver.checkpoints.durable.FIRST_RETRY_S", 0.01)
    root, away = tmp_path / "storage", tmp_path / "away"
    layout, storage = two_worker_layout(state_specs()), open_storage(str(root))
    durable = Durable(storage, RunFacts("job", {}, {}), Retention(2), lease_s=60.0)
    durable.take_lease()
    driver = durable.lease.driver
    durable.claim(Descent(generation=1, parent=None, first_step=0, driver=driver))
    durable.claim_pool.submit(int).result(20)
    root.rename(away)
    root.mkdir()
    durable.claim(Descent(generation=2, parent=1, first_step=4, driver=driver))
    durable.claim_pool.submit(int).result(20)
    assert durable.state().unclaimed == 2
    receipts = write_all(storage, 8, layout, full_state(layout.tensors))
    durable.commit(8, 2, layout, receipts)
    ticks_until(durable, lambda: durable.state().error is not None)
    assert "mounted" in str(durable.state().error)
    assert durable.state().step is None
    (root / "step-00000008").rename(tmp_path / "uploaded")
    shutil.rmtree(root)
    away.rename(root)
    (tmp_path / "uploaded").rename(root / "step-00000008")
    ticks_until(durable, lambda: durable.state().step == 8)
    durable.close()
    assert read_ancestry(storage).entries.keys() == {2}, "generation 1 has no checkpoint"
    assert verify(storage, 8).ok
