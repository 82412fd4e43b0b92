"""Copies of checkpoints to another storage: whole, checked, with their history, or not at all."""

from pathlib import Path

import pytest

from recovery.checkpoint.commit import find_newest, list_checkpoints
from recovery.checkpoint.copy import copy_checkpoint
from recovery.checkpoint.errors import CheckpointConflict, CheckpointCorrupt
from recovery.checkpoint.journal import encode_entry, entry_name, read_ancestry
from recovery.checkpoint.lease import DriverLease
from recovery.checkpoint.read import verify
from recovery.state.ancestry import Descent
from recovery.storage.errors import StorageThrottled
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import (
    commit,
    full_state,
    make_checkpoint,
    state_specs,
    two_worker_layout,
    write_all,
)
from tests.harness.faulty_storage import FaultyStorage, raises


@pytest.fixture
def source(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "source"))
    make_checkpoint(storage, 10)
    make_checkpoint(storage, 20, seed=1)
    storage.put(entry_name(2), encode_entry(Descent(generation=2, parent=None, first_step=0)))
    return storage


@pytest.fixture
def target(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "target"))


def test_a_copy_is_the_newest_checkpoint_and_its_history(source: Storage, target: Storage) -> None:
    copied = copy_checkpoint(source, target)
    assert copied.step == 20
    assert verify(target, 20).ok
    assert [info.step for info in list_checkpoints(target)] == [20]
    assert read_ancestry(target) == read_ancestry(source)
    assert find_newest(target, whole=True).manifest == find_newest(source).manifest


def test_a_generation_of_the_target_alone_is_forgotten(source: Storage, target: Storage) -> None:
    """Wrong: a region's generation that never committed hides the checkpoint that comes later."""
    target.put(entry_name(3), encode_entry(Descent(generation=3, parent=2, first_step=5)))
    copy_checkpoint(source, target)
    assert read_ancestry(target).newest == 2
    assert find_newest(target).info is not None


def put_entries(storage: Storage, driver: str, *generations: int) -> None:
    for number in generations:
        entry = Descent(
            generation=number, parent=number - 1 or None, first_step=10 * number, driver=driver
        )
        storage.put(entry_name(number), encode_entry(entry))


@pytest.mark.parametrize(
    ("held", "copied", "entries"),
    [(30, 20, (2,)), (10, 20, (2,)), (20, 20, (2,)), (30, 20, (2, 3))],
    ids=["newer", "older", "the same", "a later generation"],
)
def test_a_target_that_went_on_by_itself_is_refused_with_both_steps(
    source: Storage, target: Storage, held: int, copied: int, entries: tuple[int, ...]
) -> None:
    """Wrong: the next driver resumes from the target's own step, or reads one of both histories."""
    put_entries(source, "here", 2)
    put_entries(target, "there", *entries)
    make_checkpoint(target, held, seed=9)
    before = {info.name: target.get(info.name) for info in target.list()}
    with pytest.raises(CheckpointConflict, match=f"step {held} .* step {copied} "):
        copy_checkpoint(source, target, copied)
    assert {info.name: target.get(info.name) for info in target.list()} == before


def test_an_older_step_is_not_copied_below_a_newer_one(source: Storage, target: Storage) -> None:
    """Wrong: `--step 10` succeeds, and the next driver resumes from 20."""
    copy_checkpoint(source, target)
    with pytest.raises(CheckpointConflict, match=r"step 20 .* step 10 "):
        copy_checkpoint(source, target, 10)
    copy_checkpoint(source, target, 20)


def test_an_abandoned_step_of_the_target_is_no_hindrance(source: Storage, target: Storage) -> None:
    put_entries(source, "here", 2, 3)
    put_entries(target, "here", 2)
    make_checkpoint(target, 40, seed=9)
    assert find_newest(target).manifest is not None
    copy_checkpoint(source, target, 20)
    newest = find_newest(target)
    assert newest.info is not None
    assert (newest.info.step, newest.unknown) == (20, "")


def test_a_target_with_a_living_driver_is_refused(source: Storage, target: Storage) -> None:
    lease = DriverLease(target)
    lease.renew()
    with pytest.raises(CheckpointConflict, match="a driver uses"):
        copy_checkpoint(source, target)
    assert list_checkpoints(target) == []
    lease.release()
    copy_checkpoint(source, target)


def test_objects_beside_a_checkpoint_come_along(source: Storage, target: Storage) -> None:
    source.put("model/abc/tokenizer.json", b"{}")
    copy_checkpoint(source, target, beside=lambda manifest: ("model/abc/",))
    assert target.get("model/abc/tokenizer.json") == b"{}"


def test_damaged_bytes_are_not_copied(source: Storage, target: Storage, tmp_path: Path) -> None:
    manifest = find_newest(source).manifest
    assert manifest is not None
    name, stored = next(iter(manifest.locations.values()))
    path = tmp_path / "source" / f"step-{manifest.step:08d}" / name
    data = bytearray(path.read_bytes())
    data[stored.offset] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="checksum"):
        copy_checkpoint(source, target)
    assert list_checkpoints(target) == []


def test_a_copy_that_breaks_off_is_no_checkpoint_and_goes_on(
    source: Storage, target: Storage
) -> None:
    failing = FaultyStorage(target)
    failing.fault("put", raises(StorageThrottled(target.uri, "busy")), at=2)
    with pytest.raises(StorageThrottled):
        copy_checkpoint(source, failing)
    assert list_checkpoints(target) == []
    sent = {info.name: info.modified_s for info in target.list("step-")}
    assert len(sent) == 1
    copy_checkpoint(source, target)
    assert verify(target).ok
    again = {info.name: info.modified_s for info in target.list("step-")}
    assert sent.items() <= again.items()


def test_a_storage_of_another_job_is_refused(source: Storage, target: Storage) -> None:
    layout = two_worker_layout(state_specs())
    commit(target, 30, layout, write_all(target, 30, layout, full_state(layout.tensors)), "other")
    with pytest.raises(CheckpointConflict, match="job 'other'"):
        copy_checkpoint(source, target)
