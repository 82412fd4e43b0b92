"""Snapshot directories beside a hostile user of the machine: nothing of ours is read or changed,
nothing of theirs is believed, nothing hangs. Needs root, to become another user.
"""

import os
import shutil
import struct
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from autohet.runtime.job.checkpoint import CheckpointSection
from recovery.errors import SnapshotError
from recovery.local.agent_store import AgentStore, read_copies_limit, write_copies_limit
from recovery.local.memory_budget import capacity_of
from recovery.local.private_files import make_private_directory
from recovery.local.snapshot_file import SnapshotFile, SnapshotFileWriter, has_writer
from recovery.local.snapshot_format import HEADER_OFFSET, MAGIC, PREFIX, FileMap
from recovery.state.layout import ShardId, TensorSpec

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
OTHER = 12345
SPECS = {"w": TensorSpec("w", (64,), "float32", None, (0, 1))}
SHARDS = [ShardId("w", 0)]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory as /tmp is: everybody may make files in it, and only remove their own."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chmod(path, 0o1777)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def as_other_user(action: Callable[[], None]) -> None:
    """Run `action` in a child process of another user; AssertionError where it raises."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            action()
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc(file=sys.__stderr__)
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def write_snapshot(path: Path, value: int = 1) -> None:
    writer = SnapshotFileWriter(path, FileMap.of("n/0", SPECS, SHARDS))
    extent = writer.map.extents[SHARDS[0]]
    writer.buffer[extent.offset : extent.offset + extent.num_bytes] = bytes([value]) * 256
    writer.begin()
    writer.commit(4, 1)
    writer.close()


def refuses(action: Callable[[], object], *kinds: type[Exception]) -> None:
    with pytest.raises(kinds or (PermissionError,)):
        action()


@as_root
def test_another_user_reads_nothing(shared: Path) -> None:
    directory = shared / "autohet-0" / "run" / "node"
    write_snapshot(directory / "a.snapshot")
    write_copies_limit(directory, 5)

    def spy() -> None:
        for path in (shared / "autohet-0", directory, directory / "a.snapshot"):
            refuses(lambda path=path: os.listdir(path), PermissionError, NotADirectoryError)
            refuses(lambda path=path: path.read_bytes(), PermissionError, IsADirectoryError)

    as_other_user(spy)
    for path in (shared / "autohet-0", directory.parent, directory):
        assert path.stat().st_mode & 0o777 == 0o700
    for path in directory.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


@as_root
@pytest.mark.parametrize("made", ["directory", "link", "file", "deep"])
def test_what_another_user_made_first_is_refused_with_a_remedy(shared: Path, made: str) -> None:
    root = shared / "autohet-0"
    target = shared / "target"

    def squat() -> None:
        if made == "directory":
            root.mkdir(mode=0o777)
        elif made == "deep":
            (root / "run" / "node").mkdir(parents=True)
            os.chmod(root, 0o777)
        elif made == "link":
            target.mkdir(mode=0o777)
            root.symlink_to(target)
        else:
            root.write_bytes(b"")

    as_other_user(squat)
    for path in (root, root / "run" / "node"):
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            make_private_directory(path)
        with pytest.raises(OSError, match="belongs to user 12345"):
            capacity_of(path)
        with pytest.raises(SnapshotError, match="belongs to user 12345"):
            write_snapshot(path / "a.snapshot")


def test_a_link_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(NotADirectoryError):
        make_private_directory(tmp_path / "link")


def test_a_directory_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    make_private_directory(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


@as_root
def test_a_second_user_of_the_machine_works(shared: Path) -> None:
    write_snapshot(shared / "autohet-0" / "a.snapshot")

    def work() -> None:
        path = shared / f"autohet-{os.getuid()}" / "a.snapshot"
        write_snapshot(path)
        store = AgentStore(path.parent, path.parent / "disk", "n")
        assert [holding.source.step for holding in store.inventory()] == [4]
        store.close()

    as_other_user(work)


def test_the_default_directories_are_this_users() -> None:
    for path in (CheckpointSection().memory_directory, CheckpointSection().local_directory):
        assert path.endswith(f"/autohet-{os.getuid()}")


def test_a_temporary_name_that_is_a_link_leaves_its_target(tmp_path: Path) -> None:
    """Another user had a file of root's overwritten by such a link."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    directory = tmp_path / "d"
    directory.mkdir()
    for name in ("a.snapshot", "copies.limit"):
        (directory / f".{name}.{os.getpid()}.tmp").symlink_to(victim)
        (directory / name).symlink_to(victim)
    write_snapshot(directory / "a.snapshot")
    write_copies_limit(directory, 7)
    assert victim.read_bytes() == b"precious"
    assert read_copies_limit(directory, 0) == 7
    with SnapshotFile(directory / "a.snapshot") as file:
        assert file.commit.step == 4


def plant_pipe(path: Path) -> None:
    os.mkfifo(path)


def plant_link(path: Path) -> None:
    path.symlink_to(path.parent / "good.snapshot")


def plant_directory(path: Path) -> None:
    path.mkdir()


def plant_claim_of_gigabytes(path: Path) -> None:
    """A prefix whose header is 1.5 GB long, in a sparse file that is long enough."""
    length = 1_500_000_000
    places = (HEADER_OFFSET + length, HEADER_OFFSET + length, 2 * length)
    prefix = PREFIX.pack(MAGIC, HEADER_OFFSET, length, 0, 0, *places, 0)[:-4]
    path.write_bytes(prefix + struct.pack("<I", zlib.crc32(prefix)))
    os.truncate(path, 2 * length + 4096)


def plant_header(document: object) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        header = msgspec.msgpack.encode(document)
        places = (HEADER_OFFSET + 4096, HEADER_OFFSET + 8192, HEADER_OFFSET + 8193)
        crc = zlib.crc32(header)
        prefix = PREFIX.pack(MAGIC, HEADER_OFFSET, len(header), crc, 0, *places, 0)[:-4]
        whole = prefix + struct.pack("<I", zlib.crc32(prefix))
        path.write_bytes(whole.ljust(HEADER_OFFSET, b"\0") + header.ljust(8193, b"\0"))

    return plant


SPEC = {"name": "w", "shape": [4], "dtype": "float32", "split_dim": None, "cuts": [0, 1]}
PLANTED: dict[str, Callable[[Path], None]] = {
    "pipe": plant_pipe,
    "link": plant_link,
    "directory": plant_directory,
    "gigabytes": plant_claim_of_gigabytes,
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(os.urandom(20_000)),
    "no-keys": plant_header({}),
    "a-list": plant_header([1, 2]),
    "a-number": plant_header(7),
    "odd-specs": plant_header({"worker": "n/0", "tensors": [3], "shards": []}),
    "odd-shards": plant_header({"worker": "n/0", "tensors": [], "shards": [5]}),
    "unknown-tensor": plant_header({"worker": "n/0", "tensors": [], "shards": [["x", 0]]}),
    "far-unit": plant_header({"worker": "n/0", "tensors": [SPEC], "shards": [["w", 1 << 60]]}),
    "odd-dtype": plant_header(
        {"worker": "n/0", "tensors": [{**SPEC, "dtype": "x"}], "shards": [["w", 0]]}
    ),
    "huge-shape": plant_header(
        {"worker": "n/0", "tensors": [{**SPEC, "shape": [1 << 62] * 9}], "shards": [["w", 0]]}
    ),
    "odd-cuts": plant_header(
        {"worker": "n/0", "tensors": [{**SPEC, "cuts": ["a"]}], "shards": [["w", 0]]}
    ),
}


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_file_is_skipped_and_named(tmp_path: Path, name: str) -> None:
    write_snapshot(tmp_path / "good.snapshot")
    planted = tmp_path / "a.pushed1.snapshot"
    PLANTED[name](planted)
    with pytest.raises(SnapshotError):
        SnapshotFile(planted)
    store = AgentStore(tmp_path, tmp_path / "disk", "n")
    assert [holding.source.name for holding in store.inventory()] == ["n/0"]
    assert len(store.problems) == 1
    assert planted.name in store.problems[0]
    assert not has_writer(planted)
    store.close()


@as_root
def test_a_whole_snapshot_of_another_user_is_not_believed(shared: Path) -> None:
    directory = shared / "d"
    write_snapshot(directory / "ours.snapshot")
    os.chmod(directory, 0o1777)
    as_other_user(lambda: write_snapshot_into(directory / "theirs.snapshot"))
    os.chmod(directory, 0o700)
    store = AgentStore(directory, directory / "disk", "n")
    assert len(store.inventory()) == 1
    assert "belongs to user 12345" in store.problems[0]
    store.close()


def write_snapshot_into(path: Path) -> None:
    """As `write_snapshot`, from a directory of one's own."""
    own = Path(tempfile.mkdtemp(dir="/tmp"))
    write_snapshot(own / "d" / path.name)
    shutil.copy(own / "d" / path.name, path)
    shutil.rmtree(own)


def test_pipes_in_the_place_of_notes_hold_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "copies.limit")
    assert read_copies_limit(tmp_path, 3) == 3
