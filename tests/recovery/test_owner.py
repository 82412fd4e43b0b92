"""Snapshot directories go with the process that they belong to, and never before."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from recovery.local.owner import NOTE, ancestor_named, claim_directory, remove_ownerless
from recovery.local.snapshot import SnapshotWriter
from recovery.process_identity import ProcessIdentity, boot_id, process_start
from tests.harness.state_cases import placed, tensors_of


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for a node's raylet."""
    running = subprocess.Popen(["sleep", "600"])
    yield running
    running.kill()
    running.wait(20)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(20)


def test_a_directory_goes_once_its_owner_is_dead(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    dead, living = tmp_path / "run" / "node-1", tmp_path / "run" / "node-2"
    claim_directory(dead, process.pid)
    claim_directory(living, os.getpid())
    (dead / "a.g1.0.snapshot").write_bytes(bytes(4096))
    assert remove_ownerless(tmp_path) == []
    end(process)
    assert remove_ownerless(tmp_path) == [dead]
    assert not dead.exists()
    assert (living / NOTE).exists()


def test_a_process_id_that_was_given_again_is_another_owner(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "node"
    claim_directory(directory, os.getpid())
    owner = ProcessIdentity(boot=boot_id(), process_id=os.getpid(), started="1")
    (directory / NOTE).write_bytes(msgspec.json.encode(owner))
    assert remove_ownerless(tmp_path) == [directory]
    assert not directory.parent.exists()


@pytest.mark.parametrize("note", [None, b"", b"{", b"\xff", b'{"boot": "x"}'])
def test_a_directory_whose_owner_is_not_known_stays(tmp_path: Path, note: bytes | None) -> None:
    directory = tmp_path / "run" / "node"
    directory.mkdir(parents=True)
    if note is not None:
        (directory / NOTE).write_bytes(note)
    assert remove_ownerless(tmp_path) == []
    assert directory.exists()


def test_an_owner_of_another_system_may_live(tmp_path: Path) -> None:
    """Another machine's, on a disk that both see, or another container's."""
    directory = tmp_path / "run" / "node"
    claim_directory(directory, os.getpid())
    owner = ProcessIdentity(boot="another", process_id=os.getpid(), started="1")
    (directory / NOTE).write_bytes(msgspec.json.encode(owner))
    assert remove_ownerless(tmp_path) == []


def test_what_a_worker_still_writes_stays(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    directory = tmp_path / "run" / "node"
    claim_directory(directory, process.pid)
    layout = placed(tensors_of(2), 2, [[(2, ["n0/0"])]]).layout
    writer = SnapshotWriter(directory, "n0/0", layout, 1)
    end(process)
    assert remove_ownerless(tmp_path) == []
    writer.close(20)
    assert remove_ownerless(tmp_path) == [directory]


def test_the_nearest_parent_of_a_name_is_found() -> None:
    name = Path("/proc/self/comm").read_text().strip()
    script = f"import os, sys; sys.path.insert(0, {os.getcwd()!r}); "
    script += "from recovery.local.owner import ancestor_named; "
    script += f"print(ancestor_named({name!r}), ancestor_named('no such program'))"
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert said.stdout.split() == [str(os.getpid()), "None"]
    assert ancestor_named("no such program") is None
    assert process_start(os.getpid())
