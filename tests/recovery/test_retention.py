"""Retention leaves what is new or being read; clean-up removes only what was never committed and is
old.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.checkpoint import retention
from recovery.checkpoint.commit import (
    CheckpointFacts,
    commit_checkpoint,
    find_newest,
    list_checkpoints,
    open_checkpoint,
)
from recovery.checkpoint.errors import CheckpointMissing, ManifestInvalid
from recovery.checkpoint.journal import Journal, read_ancestry
from recovery.checkpoint.manifest import MANIFEST_NAME
from recovery.checkpoint.read import verify
from recovery.checkpoint.retention import apply_retention, reading_checkpoint, remove_orphans
from recovery.checkpoint.write import step_prefix
from recovery.state.ancestry import Descent
from recovery.storage.errors import StoragePermissionDenied, StorageUnreachable
from recovery.storage.own_names import is_own_name, own_name
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import (
    full_state,
    make_checkpoint,
    state_specs,
    two_worker_layout,
    write_all,
)
from tests.harness.faulty_storage import FaultyStorage, raises


def _steps(storage: Storage) -> list[int]:
    return [info.step for info in list_checkpoints(storage)]


def _age(storage: Storage, step: int) -> None:
    """Make everything of a step look a day old."""
    for path in Path(storage.uri, f"step-{step:08d}").iterdir():
        stamp = path.stat().st_mtime - 86400
        os.utime(path, (stamp, stamp))


def test_the_newest_stay_and_the_old_leave_nothing(storage: Storage) -> None:
    for step in (1, 2, 3, 4):
        make_checkpoint(storage, step)
    removal = apply_retention(storage, keep=2)
    assert removal.removed_steps == (1, 2)
    assert _steps(storage) == [3, 4]
    assert {info.name.split("/")[0] for info in storage.list("step-")} == {
        "step-00000003",
        "step-00000004",
    }
    assert apply_retention(storage, keep=2).removed_steps == ()
    assert verify(storage, 3).ok
    with pytest.raises(ValueError, match="keep is 0"):
        apply_retention(storage, keep=0)


def test_the_best_stay_beside_the_newest(directory: Storage) -> None:
    for step in (1, 2, 3, 4, 5):
        make_checkpoint(directory, step)
    assert apply_retention(directory, keep=2, best={2, 5}).removed_steps == (1, 3)
    assert _steps(directory) == [2, 4, 5]
    assert apply_retention(directory, keep=2).removed_steps == (2,)


def test_a_checkpoint_being_read_stays_until_the_reader_is_done(storage: Storage) -> None:
    for step in (1, 2, 3):
        make_checkpoint(storage, step)
    with reading_checkpoint(storage, 1) as manifest:
        removal = apply_retention(storage, keep=1, reading=[2])
        assert removal.removed_steps == ()
        assert [step for step, _ in removal.kept] == [1, 2]
        assert manifest.step == 1
        assert verify(storage, 1).ok
    assert apply_retention(storage, keep=1).removed_steps == (1, 2)


def test_who_comes_to_read_what_is_being_removed_keeps_its_data(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        make_checkpoint(directory, step)
    there = {info.name for info in directory.list(step_prefix(1))} - {
        step_prefix(1) + MANIFEST_NAME
    }
    delete = directory.delete

    def deleting(names: list[str]) -> None:
        delete(names)
        if names == [step_prefix(1) + MANIFEST_NAME]:
            directory.put(f"{step_prefix(1)}reader-0123456789ab-3600.lease", b"")

    monkeypatch.setattr(directory, "delete", deleting)
    removal = apply_retention(directory, keep=1)
    assert (removal.removed_steps, [step for step, _ in removal.kept]) == ((1,), [1])
    assert there <= {info.name for info in directory.list(step_prefix(1))}


def test_the_lease_of_a_dead_reader_ends(directory: Storage) -> None:
    for step in (1, 2):
        make_checkpoint(directory, step)
    with reading_checkpoint(directory, 1, lease_s=60):
        _age(directory, 1)
        assert apply_retention(directory, keep=1).removed_steps == (1,)
    with pytest.raises(CheckpointMissing), reading_checkpoint(directory, 1):
        pass


def test_a_lease_is_renewed_while_it_is_used(directory: Storage) -> None:
    """Made to look a day old, it is young again without the reader's doing anything; and it goes
    with the reader.
    """
    threads = set(threading.enumerate())
    for step in (1, 2):
        make_checkpoint(directory, step)

    def leases() -> list[float]:
        return [info.modified_s for info in directory.list("step-00000001/reader-")]

    with reading_checkpoint(directory, 1, lease_s=1.0):
        (given,) = leases()
        _age(directory, 1)
        until = time.monotonic() + 20
        while not leases() or leases()[0] < given:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert apply_retention(directory, keep=1).removed_steps == ()
    assert leases() == []
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "lease"]


def test_an_upload_that_goes_on_from_an_old_one_is_no_orphan(directory: Storage) -> None:
    """Another job's start cleans up while this one finds its files of yesterday there and does not
    send them again.
    """
    layout = two_worker_layout(state_specs())
    state = full_state(layout.tensors)
    write_all(directory, 1, layout, state)
    _age(directory, 1)
    receipts = write_all(directory, 1, layout, state)
    assert all(receipt.bytes_sent == 0 for receipt in receipts)
    assert remove_orphans(directory).removed_steps == ()
    _age(directory, 1)
    assert remove_orphans(directory).removed_steps == (1,)


def test_a_storage_that_may_only_be_read_gives_no_lease_but_reads(
    directory: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(directory, 1)
    faulty = FaultyStorage(directory)
    faulty.fault("put", raises(StoragePermissionDenied("x", "read only")), times=99)
    with reading_checkpoint(faulty) as manifest:
        assert manifest.step == 1
    assert "without a lease" in caplog.text


def test_an_interrupted_removal_is_no_checkpoint_and_is_finished_later(directory: Storage) -> None:
    for step in (1, 2):
        make_checkpoint(directory, step)
    faulty = FaultyStorage(directory)
    faulty.fault("delete", raises(StorageUnreachable("x", "crashed")), at=2)
    with pytest.raises(StorageUnreachable):
        apply_retention(faulty, keep=1)
    assert _steps(directory) == [2]
    assert any(True for _ in directory.list("step-00000001/"))
    _age(directory, 1)
    assert remove_orphans(directory).removed_steps == (1,)
    assert not any(True for _ in directory.list("step-00000001/"))


def test_orphans_go_by_age_and_never_what_is_being_written_or_committed(directory: Storage) -> None:
    layout = two_worker_layout(state_specs())
    for step in (1, 2, 3):
        write_all(directory, step, layout, full_state(layout.tensors))
    make_checkpoint(directory, 4)
    for step in (1, 2, 4):
        _age(directory, step)
    removal = remove_orphans(directory, writing=[2])
    assert removal.removed_steps == (1,)  # 2 is being written, 3 is young, 4 is committed
    assert verify(directory, 4).ok
    assert {info.name.split("/")[0][-1] for info in directory.list()} == {"2", "3", "4"}


def test_strays_beside_a_committed_checkpoint_go_when_old(directory: Storage) -> None:
    manifest, _ = make_checkpoint(directory, 4)
    layout = two_worker_layout(manifest.specs)
    write_all(directory, 4, layout, full_state(manifest.specs, seed=1))  # a slow writer of before
    assert remove_orphans(directory).num_objects == 0
    _age(directory, 4)
    assert remove_orphans(directory).num_objects == 2
    assert verify(directory, 4).ok


def test_unfinished_multipart_uploads_are_aborted(s3_uri: str) -> None:
    from recovery.storage.open import open_storage

    storage = open_storage(s3_uri)
    client, bucket = storage.client, s3_uri.split("/")[2]  # type: ignore[attr-defined]
    name = own_name("a_0", "0123456789abcdef", ".distcp")
    foreign = ["a.distcp", "model-0123456789abcdef.distcp", "a_0-01234567-0123456789abcdef.distcp"]
    for key in [f"jobs/one/step-00000001/{each}" for each in [name, *foreign]]:
        client.create_multipart_upload(Bucket=bucket, Key=key)
    client.create_multipart_upload(Bucket=bucket, Key=f"other/step-00000001/{name}")
    assert (
        storage.abort_uploads("step-", older_than_s=1e10) == 0
    )  # the server dates all of them 2010
    assert storage.abort_uploads("step-", older_than_s=3600) == 1
    left = {each["Key"] for each in client.list_multipart_uploads(Bucket=bucket)["Uploads"]}
    assert left == {f"jobs/one/step-00000001/{each}" for each in foreign} | {
        f"other/step-00000001/{name}"
    }


def test_names_of_data_files_prove_that_they_are_ours(storage: Storage) -> None:
    """An upload of a writer that was killed is known by its name alone."""
    manifest, _ = make_checkpoint(storage, 4)
    assert manifest.files
    assert all(is_own_name(f"step-00000004/{file.name}") for file in manifest.files)


def test_a_checkpoint_that_comes_while_steps_are_listed_stays(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver's, say, between one look and the next: it must not look like one of a history
    that was left.
    """
    make_checkpoint(directory, 1)
    looked = retention.list_checkpoints

    def listed(storage: Storage) -> object:
        found = looked(storage)
        if not list(storage.list(step_prefix(2))):
            make_checkpoint(storage, 2)
        return found

    monkeypatch.setattr(retention, "list_checkpoints", listed)
    assert apply_retention(directory, keep=1).removed_steps == ()
    assert _steps(directory) == [1, 2]


def test_verify_beside_retention_reports_no_damage(directory: Storage) -> None:
    """The checkpoint that is being verified stays; one that has gone is missing, not damaged."""
    for step in (1, 2):
        make_checkpoint(directory, step)
    removed: list[tuple[int, ...]] = []

    def retain(done: int, total: int) -> None:
        removed.append(apply_retention(directory, keep=1).removed_steps)

    assert verify(directory, 1, progress=retain).ok
    assert set(removed) == {()}
    assert apply_retention(directory, keep=1).removed_steps == (1,)
    with pytest.raises(CheckpointMissing):
        verify(directory, 1)


def test_verify_without_a_lease_tells_removal_from_damage(directory: Storage) -> None:
    """On a storage that may only be read, retention removes what is being verified."""
    for step in (1, 2):
        make_checkpoint(directory, step)
    read_only = FaultyStorage(directory)
    read_only.fault("put", raises(StoragePermissionDenied("x", "read only")), times=99)

    def retain(name: str, call: Callable[[], object]) -> object:
        apply_retention(directory, keep=1)
        return call()

    read_only.fault("get_into", retain)
    with pytest.raises(CheckpointMissing):
        verify(read_only, 1)


@pytest.mark.parametrize("how", ["cut", "missing", "longer"])
def test_a_file_of_another_size_is_damage(directory: Storage, how: str) -> None:
    manifest, _ = make_checkpoint(directory, 1)
    path = Path(directory.uri, "step-00000001", manifest.files[0].name)
    data = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(data[:-1] if how == "cut" else data + b"\0")
    assert any(path.name in problem for problem in verify(directory, 1).problems)


@pytest.mark.parametrize("object_name", [MANIFEST_NAME, "data"])
def test_of_a_broken_newest_checkpoint_an_intact_older_one_is_found_and_said(
    directory: Storage, object_name: str
) -> None:
    make_checkpoint(directory, 1)
    manifest, _ = make_checkpoint(directory, 2)
    name = manifest.files[0].name if object_name == "data" else object_name
    path = Path(directory.uri, "step-00000002", name)
    path.write_bytes(path.read_bytes()[:-100])
    found = find_newest(directory, whole=True)
    assert found.info is not None
    assert found.info.step == 1
    assert "step-00000002" in str(found.damaged[0]) or "step 2" in str(found.damaged[0])
    if object_name == MANIFEST_NAME:
        with pytest.raises(ManifestInvalid):
            open_checkpoint(directory)
        assert apply_retention(directory, keep=1).unknown


def test_a_step_whose_manifest_is_damaged_can_be_committed_again(directory: Storage) -> None:
    make_checkpoint(directory, 2)
    path = Path(directory.uri, "step-00000002", MANIFEST_NAME)
    damaged = path.read_bytes()[:-100]
    path.write_bytes(damaged)
    make_checkpoint(directory, 2, seed=1)
    assert verify(directory, 2).ok
    (kept,) = path.parent.glob(f"{MANIFEST_NAME}.damaged-*")
    assert kept.read_bytes() == damaged


def _commit_as(storage: Storage, generation: int, steps: tuple[int, ...]) -> None:
    layout = two_worker_layout(state_specs())
    for step in steps:
        receipts = write_all(storage, step, layout, full_state(layout.tensors))
        facts = CheckpointFacts({}, {}, generation=generation)
        commit_checkpoint(storage, step, layout, receipts, facts, ancestry=read_ancestry(storage))


def _two_generations(storage: Storage, first_step: int, steps: tuple[int, ...]) -> None:
    """Generation 1 committed 10, 20 and 30; generation 2 went back to `first_step`."""
    journal = Journal(storage, "driver")
    journal.claim(Descent(generation=1, parent=None, first_step=0, driver="driver"))
    _commit_as(storage, 1, (10, 20, 30))
    parent = 1 if first_step else None
    journal.claim(Descent(generation=2, parent=parent, first_step=first_step, driver="driver"))
    _commit_as(storage, 2, steps)


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [25]), (2, [15, 25]), (3, [10, 15, 25]), (None, [10, 15, 25])]
)
def test_abandoned_checkpoints_are_not_counted(
    directory: Storage, keep: int | None, left: list[int]
) -> None:
    """Wrong: step 20 lies below the newest step, and is kept instead of step 15."""
    _two_generations(directory, 10, (15, 25))
    apply_retention(directory, keep=keep)
    assert _steps(directory) == left


def test_an_abandoned_checkpoint_is_gone_on_from_with_a_word_and_not_removed(
    directory: Storage,
) -> None:
    """Generation 2 began anew at step 0 and has committed nothing yet."""
    _two_generations(directory, 0, ())
    newest = find_newest(directory)
    assert newest.info is not None
    assert newest.info.step == 30
    assert "no checkpoint is of generation 2" in newest.unknown
    removal = apply_retention(directory, keep=1)
    assert (removal.removed_steps, removal.unknown) == ((), newest.unknown)
    _commit_as(directory, 2, (5,))
    assert find_newest(directory).unknown == ""
    assert apply_retention(directory, keep=1).removed_steps == (10, 20, 30)
