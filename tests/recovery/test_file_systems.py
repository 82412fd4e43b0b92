"""Directories as file servers, mounted buckets and people leave them."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from recovery.checkpoint.commit import (
    CheckpointFacts,
    commit_checkpoint,
    find_newest,
    list_checkpoints,
)
from recovery.checkpoint.journal import Journal, entry_name, read_ancestry
from recovery.checkpoint.lease import DriverLease
from recovery.checkpoint.read import verify
from recovery.checkpoint.retention import apply_retention
from recovery.checkpoint.write import step_prefix
from recovery.state.ancestry import Descent
from recovery.storage.errors import ObjectMissing, StorageUnsupported
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import (
    full_state,
    make_checkpoint,
    state_specs,
    two_worker_layout,
    write_all,
)


def stale(path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next `times` looks at `path` fail as NFS does after its file was replaced."""
    left = [times]
    open_, stat = Path.open, Path.stat

    def look(real: Any) -> Any:
        def looked(self: Path, *args: Any, **given: Any) -> Any:
            if self == path and left[0]:
                left[0] -= 1
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(self, *args, **given)

        return looked

    monkeypatch.setattr(Path, "open", look(open_))
    monkeypatch.setattr(Path, "stat", look(stat))


def test_a_stale_file_is_looked_at_once_more(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.put("driver/a", b"1")
    path = Path(directory.uri, "driver", "a")
    for look in (
        lambda: directory.get("driver/a"),
        lambda: directory.size("driver/a"),
        lambda: directory.get_into("driver/a", 0, memoryview(bytearray(1))),
    ):
        stale(path, 1, monkeypatch)
        look()
    stale(path, 9, monkeypatch)
    assert directory.size("driver/a") is None
    with pytest.raises(ObjectMissing):
        directory.get("driver/a")
    assert list(directory.list("driver/")) == []


def test_a_stale_lease_does_not_end_another_drivers_start(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: the job is refused since a lease went while it was looked at."""
    other = DriverLease(directory, lease_s=0.5)
    other.renew()
    stale(Path(directory.uri, other.name), 3, monkeypatch)
    DriverLease(directory, lease_s=0.5).take()


def test_a_mounted_bucket_without_renames_is_named_as_s3(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageUnsupported, match="s3://bucket/prefix"):
        directory.put("a", b"1")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageUnsupported, match="cannot rename"):
        directory.put("a", b"1", if_none_match=True)


def test_a_step_behind_a_link_is_a_checkpoint(directory: Storage, tmp_path: Path) -> None:
    """A step was moved to another disk. A link to a directory above leads into no circle."""
    for step in (1, 2, 3):
        make_checkpoint(directory, step)
    step = Path(directory.uri, step_prefix(2))
    step.rename(tmp_path / "archive")
    step.symlink_to(tmp_path / "archive")
    Path(directory.uri, "step-00000009").symlink_to(directory.uri)
    Path(directory.uri, "loop").symlink_to(directory.uri)
    assert [info.step for info in list_checkpoints(directory)] == [1, 2, 3]
    assert verify(directory, 2).ok
    names = [info.name for info in directory.list()]
    assert names == sorted(set(names))
    assert not [name for name in names if name.startswith(("loop", "step-00000009"))]


def test_the_remedy_of_a_lost_entry_is_true(directory: Storage, tmp_path: Path) -> None:
    """An empty entry, after a full disk, stops removal: what is said starts it again."""
    layout = two_worker_layout(state_specs())
    for generation, steps in ((1, (10,)), (2, (20,)), (3, (30, 40))):
        journal = Journal(directory, f"driver-{generation}")
        parent = generation - 1 or None
        first_step = 10 * (generation - 1)
        entry = Descent(
            generation=generation,
            parent=parent,
            first_step=first_step,
            driver=f"driver-{generation}",
        )
        journal.claim(entry)
        for step in steps:
            receipts = write_all(directory, step, layout, full_state(layout.tensors))
            facts = CheckpointFacts({}, {}, generation=generation)
            commit_checkpoint(
                directory, step, layout, receipts, facts, ancestry=read_ancestry(directory)
            )
    directory.put(entry_name(2), b"")
    assert "up to 2" in apply_retention(directory, keep=1).unknown
    for name in (entry_name(1), entry_name(2), step_prefix(10), step_prefix(20)):
        Path(directory.uri, name).rename(tmp_path / name.replace("/", "-"))
    assert apply_retention(directory, keep=1).removed_steps == (30,)
    assert find_newest(directory).unknown == ""
