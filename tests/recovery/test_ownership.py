"""Only what is proven to be ours is ever removed, whatever other files are called and however old
they are.
"""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from recovery.checkpoint.journal import Journal
from recovery.checkpoint.lease import DriverLease
from recovery.checkpoint.ownership import TRAILER_BYTES, trailer
from recovery.checkpoint.retention import apply_retention, remove_orphans
from recovery.state.ancestry import Descent
from recovery.storage.directory import temporary_name
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import (
    commit,
    full_state,
    make_checkpoint,
    state_specs,
    two_worker_layout,
    write_all,
)

FOREIGN = (
    "step-00000001/notes.txt",
    "step-00000001/model-0123456789abcdef.distcp",
    "step-00000001/__0_0.distcp",
    "step-00000001/resumed-0123456789ab.lease",
    "step-00000001/reader-0123456789ab-1.lease",
    "step-00000001/.writing-notes",
    "step-00000001/.writing-0123456789abcdef0123456789abcdef",
    "step-00000007/.metadata",
    "step-00000007/model.distcp",
    "step-00000009/deeper/step-00000001/a.txt",
    "driver/notes.txt",
    "driver/host-1-01234567.lease",
    "driver/host-1-01234567.mark",
    "generations/00000001.txt",
)
"""Names that look like ours, or nearly."""


def put_foreign(storage: Storage) -> dict[str, bytes]:
    """Files of somebody else's, two days old."""
    contents = {name: f"of somebody else: {name}".encode() for name in FOREIGN}
    for name, content in contents.items():
        path = Path(storage.uri, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    make_old(storage)
    return contents


def make_old(storage: Storage) -> None:
    for path in Path(storage.uri).rglob("*"):
        stamp = path.stat().st_mtime - 2 * 86400
        os.utime(path, (stamp, stamp))


def assert_untouched(storage: Storage, contents: dict[str, bytes]) -> None:
    found = {
        name: Path(storage.uri, name).read_bytes()
        for name in contents
        if Path(storage.uri, name).exists()
    }
    assert found == contents


def test_a_start_removes_nothing_of_somebody_else(directory: Storage) -> None:
    layout = two_worker_layout(state_specs())
    write_all(directory, 1, layout, full_state(layout.tensors))  # an orphan of ours beside it
    contents = put_foreign(directory)
    lease = DriverLease(directory, 15.0)
    lease.take(pause=lambda seconds: None)
    removal = remove_orphans(directory)
    assert removal.removed_steps == (1,)
    assert removal.num_objects == 2
    assert_untouched(directory, contents)
    lease.release()
    assert_untouched(directory, contents)


def test_retention_removes_what_the_manifest_names_and_nothing_beside_it(
    directory: Storage,
) -> None:
    for step in (1, 2, 3):
        make_checkpoint(directory, step)
    contents = put_foreign(directory)
    assert apply_retention(directory, keep=1).removed_steps == (1, 2)
    assert_untouched(directory, contents)
    left = {info.name for info in directory.list("step-00000001/")}
    assert left <= contents.keys()


def test_another_job_s_checkpoints_neither_count_nor_go(directory: Storage) -> None:
    layout = two_worker_layout(state_specs())
    for step, job in ((1, "other"), (2, "mine"), (3, "other"), (4, "mine"), (5, "mine")):
        state = full_state(layout.tensors, step)
        commit(directory, step, layout, write_all(directory, step, layout, state), job)
    assert apply_retention(directory, keep=2, job="mine").removed_steps == (2,)
    assert apply_retention(directory, keep=2, job="other").removed_steps == ()


def test_a_copy_of_our_files_under_another_step_is_not_ours(directory: Storage) -> None:
    """Somebody copied a checkpoint into a directory of a like name, without its manifest."""
    make_checkpoint(directory, 1)
    copy = Path(directory.uri, "step-00000008")
    shutil.copytree(Path(directory.uri, "step-00000001"), copy)
    (copy / "manifest.json").unlink()
    (copy / ".metadata").unlink()
    there = sorted(path.name for path in copy.iterdir())
    make_old(directory)
    remove_orphans(directory)
    assert sorted(path.name for path in copy.iterdir()) == there


def test_a_data_file_says_whose_it_is(directory: Storage) -> None:
    manifest, _ = make_checkpoint(directory, 12)
    for file in manifest.files:
        data = directory.get(f"step-00000012/{file.name}")
        digest = file.name.rsplit("-", 1)[1].removesuffix(".distcp")
        assert data[-TRAILER_BYTES:] == trailer(12, digest)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"host": 1}'])
def test_a_lease_that_nothing_shows_to_be_one_stays_and_holds_nobody_up(
    directory: Storage, content: bytes
) -> None:
    name = "driver/host-1-01234567.lease"
    directory.put(name, content)
    make_old(directory)
    waits: list[float] = []
    DriverLease(directory, 15.0).take(pause=waits.append)
    assert waits == []
    assert directory.get(name) == content


def test_a_dead_driver_s_marker_goes_with_its_lease(directory: Storage) -> None:
    dead, living = DriverLease(directory, 15.0), DriverLease(directory, 15.0)
    dead.take()
    Journal(directory, dead.driver).mark()
    make_old(directory)
    living.take()
    assert [info.name for info in directory.list("driver/")] == [living.name]


def test_what_an_interrupted_put_left_goes_and_no_other_temporary_file(
    directory: Storage,
) -> None:
    contents = put_foreign(directory)
    journal = Journal(directory, "a")
    journal.claim(Descent(generation=1, parent=None, first_step=0, driver="a"))
    mine = Path(directory.uri, "step-00000001", temporary_name())
    mine.write_bytes(b"half of a file")
    make_old(directory)
    assert directory.abort_uploads("step-", 3600) == 1
    assert not mine.exists()
    assert_untouched(directory, contents)
    assert msgspec.json.decode(directory.get("generations/00000001.json"))["driver"] == "a"
