"""Snapshots in host memory: what a reader finds, also after a crash, damage, and a change made too
early.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recovery.errors import ShardCorrupt, ShardUnavailable, SnapshotError, SnapshotUncommitted
from recovery.local import snapshot, snapshot_buffer
from recovery.local.snapshot import SnapshotOptions, SnapshotWriter, file_name, remove_older
from recovery.local.snapshot_buffer import SnapshotBuffer
from recovery.local.snapshot_file import SnapshotFile, SnapshotFileWriter
from recovery.local.snapshot_files import SnapshotFiles
from recovery.local.snapshot_format import FileMap
from recovery.state.borrowed import BorrowedState
from recovery.state.checksum import checksum
from recovery.state.holdings import Source
from recovery.state.layout import ShardId, TensorSpec
from recovery.state.slices import shard_views
from recovery.storage.tensor_payload import tensor_bytes
from tests.harness.host_memory import memory_directory
from tests.harness.state_cases import placed, state_of, tensors_of, unit

WORKER = "node/0"
CASE = placed(tensors_of(2), 2, [[(2, [WORKER, "node/1"])]])
SHARDS = CASE.layout.shards_by_worker[WORKER]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SnapshotWriter]:
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 3)
    yield writer
    writer.close(20)


def take(writer: SnapshotWriter, step: int) -> None:
    writer.start(step, state_of(CASE.layout, WORKER, step))
    writer.wait(20)


def committed(directory: Path) -> dict[int, SnapshotFile]:
    files = {}
    for path in directory.glob("*.snapshot"):
        try:
            file = SnapshotFile(path)
        except SnapshotUncommitted:
            continue
        files[file.commit.step] = file
    return files


def same_as(file: SnapshotFile, step: int) -> bool:
    return all(
        bytes(file.read(shard))
        == unit(CASE.layout.tensors[shard.tensor], shard, step).contiguous().numpy().tobytes()
        for shard in SHARDS
    )


def test_the_two_newest_steps_are_there(writer: SnapshotWriter, tmp_path: Path) -> None:
    for step in range(1, 6):
        take(writer, step)
        files = committed(tmp_path)
        assert set(files) == {step, step - 1} - {0}
        for found, file in files.items():
            assert same_as(file, found)
            assert set(file.shards) == SHARDS
            holding = file.holding("memory", "node")
            assert holding.source == Source("memory", "node", WORKER, found, 3)
            assert holding.shards == SHARDS == set(holding.checksums)


def test_the_tensors_may_change_once_copied(writer: SnapshotWriter, tmp_path: Path) -> None:
    state = state_of(CASE.layout, WORKER, 1)
    writer.start(1, state)
    writer.wait_copied(20)
    for tensor in state.values():
        tensor.zero_()
    writer.wait(20)
    assert same_as(committed(tmp_path)[1], 1)


class OnDevice(BorrowedState):
    """Host tensors that pose as a GPU's."""

    @property
    def on_device(self) -> bool:
        return True


def test_checksums_of_a_device_stand_for_the_bytes_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: checksums in another order than the file's, or of a strided view's memory."""
    monkeypatch.setattr(snapshot, "BorrowedState", OnDevice)
    monkeypatch.setattr(SnapshotBuffer, "_register", lambda buffer: None)
    monkeypatch.setattr(SnapshotFileWriter, "commit", None)  # the host is not asked for them
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 1)
    take(writer, 7)
    file = committed(tmp_path)[7]
    assert any(spec.split_dim == 1 for spec in file.map.tensors.values())
    for shard in file.shards:
        file.verify(shard, file.view(shard))
    writer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_state_is_in_its_snapshot_bit_for_bit(tmp_path: Path) -> None:
    state = state_of(CASE.layout, WORKER, 7)
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 1)
    writer.start(7, {name: tensor.to("cuda") for name, tensor in state.items()})
    writer.wait(60)
    file = committed(tmp_path)[7]
    views = shard_views(CASE.layout.tensors, CASE.layout.shards_by_worker[WORKER], state)
    for shard, view in views.items():
        assert bytes(file.read(shard)) == bytes(tensor_bytes(view.contiguous()))
    writer.close()


def test_a_change_during_the_copy_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer ran before `wait_copied`: the snapshot must not exist, and the one before
    must.
    """
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 3)
    take(writer, 1)
    state, changed, reached = state_of(CASE.layout, WORKER, 2), threading.Event(), threading.Event()
    copy_from = SnapshotBuffer.copy_from

    def slow(*arguments: object) -> None:
        copy_from(*arguments)  # type: ignore[arg-type]
        reached.set()
        assert changed.wait(20)

    monkeypatch.setattr(SnapshotBuffer, "copy_from", slow)
    writer.start(2, state)
    assert reached.wait(20)
    state["param/layers.1.norm"].add_(1)
    changed.set()
    with pytest.raises(
        SnapshotError, match="step 2 was not taken: the state was changed while it was being copied"
    ):
        writer.wait(20)
    assert set(committed(tmp_path)) == {1}
    monkeypatch.undo()
    take(writer, 2)
    assert set(committed(tmp_path)) == {1, 2}, "the writer goes on after an error"
    writer.close(20)


def test_a_state_that_does_not_fit_the_layout_is_an_error(
    writer: SnapshotWriter, tmp_path: Path
) -> None:
    state = state_of(CASE.layout, WORKER, 1)
    state["param/layers.0.rows"] = torch.zeros(8, 3)
    writer.start(1, state)
    with pytest.raises(
        SnapshotError, match=r"step 1 was not taken: param/layers\.0\.rows: units \(0, 1\)"
    ):
        writer.wait(20)
    assert committed(tmp_path) == {}


def test_a_reader_of_an_overwritten_step_is_told(writer: SnapshotWriter, tmp_path: Path) -> None:
    take(writer, 1)
    file = committed(tmp_path)[1]
    shard = min(SHARDS)
    take(writer, 2)
    take(writer, 3)
    with pytest.raises(ShardUnavailable, match="step 1 was overwritten meanwhile"):
        file.read(shard)
    assert file.current().commit.step == 3
    assert same_as(file.current(), 3)
    with pytest.raises(ShardUnavailable, match="not in this snapshot"):
        file.read(ShardId("param/other", 0))


def test_files_of_older_generations_go_after_two_commits(tmp_path: Path) -> None:
    old = SnapshotWriter(tmp_path, WORKER, CASE.layout, 3)
    take(old, 1)
    old.close(20)
    (tmp_path / file_name("node/01", 1, 0)).touch()
    new = SnapshotWriter(tmp_path, WORKER, CASE.layout, 4)
    take(new, 1)
    assert {path.name for path in tmp_path.iterdir()} >= {file_name(WORKER, 3, 0)}
    take(new, 2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {file_name(WORKER, 4, 0), file_name(WORKER, 4, 1), file_name("node/01", 1, 0)}
    new.close(20)


CRASH = """
import os, sys
import torch
from recovery.local.snapshot import SnapshotWriter
from recovery.local.snapshot_buffer import SnapshotBuffer
from tests.recovery.test_snapshot import CASE, WORKER
from tests.harness.state_cases import state_of
writer = SnapshotWriter(sys.argv[1], WORKER, CASE.layout, 3)
for step in (1, 2):
    writer.start(step, state_of(CASE.layout, WORKER, step))
    writer.wait()
copy_from = SnapshotBuffer.copy_from
def then_die(buffer, borrowed):
    copy_from(buffer, borrowed)
    os.kill(os.getpid(), 9)
SnapshotBuffer.copy_from = then_die
writer.start(3, state_of(CASE.layout, WORKER, 3))
writer.wait()
"""


def test_a_kill_in_the_middle_of_a_copy_leaves_the_step_before(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path)], env=environment, timeout=60, check=False
    )
    assert ended.returncode == -9
    files = committed(tmp_path)
    assert set(files) == {2}
    assert same_as(files[2], 2)


def test_a_disk_copy_is_on_the_device_before_it_is_committed_and_its_commit_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power between the two would have a commit record over bytes that
    were never written.
    """
    done: list[str] = []
    for name in ("begin", "sync", "commit_with"):
        real = getattr(SnapshotFileWriter, name)

        def noted(self: Any, *arguments: Any, name: str = name, real: Any = real) -> None:
            done.append(name)
            real(self, *arguments)

        monkeypatch.setattr(SnapshotFileWriter, name, noted)
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 1, SnapshotOptions(force_to_device=True))
    take(writer, 1)
    writer.close(20)
    assert done == ["begin", "sync", "commit_with", "sync"]


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "is no snapshot"),
        (30, "prefix is damaged"),
        (260, "commit record is damaged"),
        (4100, "header is damaged"),
    ],
)
def test_damage_before_the_payload_is_found_on_opening(
    writer: SnapshotWriter, tmp_path: Path, offset: int, message: str
) -> None:
    take(writer, 1)
    path = flip(tmp_path / file_name(WORKER, 3, 0), offset)
    with pytest.raises(SnapshotError, match=message):
        SnapshotFile(path)


def test_damage_of_the_checksums_and_of_a_shard(writer: SnapshotWriter, tmp_path: Path) -> None:
    take(writer, 1)
    path = tmp_path / file_name(WORKER, 3, 0)
    file = SnapshotFile(path)
    broken = sorted(SHARDS)[2]
    flip(path, file.map.extents[broken].offset + 1)
    for shard in SHARDS - {broken}:
        file.read(shard)
    with pytest.raises(ShardCorrupt, match="checksum differs"):
        file.read(broken)
    flip(path, file.map.checksums_offset)
    with pytest.raises(SnapshotError, match="table of checksums is damaged"):
        SnapshotFile(path)


def test_a_truncated_file_is_not_mapped(writer: SnapshotWriter, tmp_path: Path) -> None:
    take(writer, 1)
    content = (tmp_path / file_name(WORKER, 3, 0)).read_bytes()
    for length in (100, 4200, len(content) - 1):
        cut = tmp_path / "cut"
        cut.write_bytes(content[:length])
        with pytest.raises(SnapshotError, match="is truncated"):
            SnapshotFile(cut)


def test_no_room_is_an_error_before_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SnapshotError, match=r"cannot make a file of \d+ bytes.*No space left"):
        SnapshotWriter(tmp_path, WORKER, CASE.layout, 3)
    assert list(tmp_path.iterdir()) == [], "nothing half-made stays"


def flip(path: Path, offset: int) -> Path:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
    return path


def test_held_steps_stay_and_the_two_newest_too(writer: SnapshotWriter, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        writer.files.hold({1})
        take(writer, step)
    assert set(committed(tmp_path)) == {1, 2, 3}
    for step in (4, 5, 6, 7):
        writer.files.hold({1, 4})
        take(writer, step)
    assert set(committed(tmp_path)) == {1, 4, 6, 7}
    assert all(same_as(file, step) for step, file in committed(tmp_path).items())
    assert (writer.files.newest, writer.files.has(4), writer.files.has(5)) == (7, True, False)
    writer.files.hold({7})
    for step in (8, 9, 10):
        take(writer, step)
    assert {7, 9, 10} <= set(committed(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4, "no more files than two held steps need"


def test_without_room_for_another_file_held_steps_are_kept_and_new_ones_skipped(
    writer: SnapshotWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.files.hold({1, 2})
    take(writer, 1)
    take(writer, 2)

    def full(*_: object) -> None:
        raise SnapshotError("x", "no space left")

    monkeypatch.setattr(snapshot, "SnapshotFileWriter", full)
    take(writer, 3)
    assert set(committed(tmp_path)) == {1, 2}
    writer.files.hold({2})
    take(writer, 4)
    assert set(committed(tmp_path)) == {2, 4}


def test_older_layouts_stay_until_they_are_released(tmp_path: Path) -> None:
    old = SnapshotWriter(tmp_path, WORKER, CASE.layout, 3)
    for step in (1, 2):
        take(old, step)
    old.close(20)
    new = SnapshotWriter(tmp_path, WORKER, CASE.layout, 4, SnapshotOptions(keep_older=True))
    for step in (3, 4, 5):
        take(new, step)
    assert set(committed(tmp_path)) == {1, 2, 4, 5}
    remove_older(tmp_path, WORKER, 4, but_steps={2})
    assert set(committed(tmp_path)) == {2, 4, 5}
    new.release_older()
    take(new, 6)
    assert set(committed(tmp_path)) == {5, 6}
    new.close(20)


def test_no_step_is_left_out_while_files_are_made_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a shard has one holder all of a generation's first steps would be lost with it."""
    made, make = threading.Event(), SnapshotFiles.make

    def late(self: SnapshotFiles) -> None:
        assert made.wait(20)
        make(self)

    monkeypatch.setattr(SnapshotFiles, "make", late)
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 3, SnapshotOptions(in_background=True))
    writer.start(1, state_of(CASE.layout, WORKER, 1))
    with pytest.raises(SnapshotError, match="is still copying"):
        writer.wait_copied(0.05)  # the next update waits
    assert list(tmp_path.iterdir()) == []
    made.set()
    writer.wait(20)
    assert same_as(committed(tmp_path)[1], 1)
    writer.close(20)


def test_no_room_for_files_made_in_the_background_is_told_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallocate, calls = os.posix_fallocate, []

    def second_fails(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        fallocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", second_fails)
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 3, SnapshotOptions(in_background=True))
    with pytest.raises(SnapshotError, match=r"step 1 was not taken.*No space left"):
        take(writer, 1)
    writer.wait()
    writer.close(20)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def slow_files(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Set once room for a file is being claimed; set it to let that go on."""
    fallocate, begun, go_on = os.posix_fallocate, threading.Event(), threading.Event()

    def slow(*arguments: int) -> None:
        begun.set()
        assert go_on.wait(20)
        fallocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    return begun, go_on


def test_closing_does_not_wait_for_files_that_are_still_being_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_files: tuple[threading.Event, threading.Event],
) -> None:
    monkeypatch.setattr("recovery.local.snapshot_file.CLAIM_BYTES", 1024)
    begun, go_on = slow_files
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 3, SnapshotOptions(in_background=True))
    assert begun.wait(20)
    closing = threading.Thread(target=writer.close, args=(20,))
    closing.start()
    while not writer.closed:
        time.sleep(0.001)
    go_on.set()
    closing.join(20)
    assert list(tmp_path.iterdir()) == []


def test_what_was_started_is_finished_although_its_files_are_not_made_yet(
    tmp_path: Path, slow_files: tuple[threading.Event, threading.Event]
) -> None:
    """A durable step early in a generation, on a slow disk."""
    begun, go_on = slow_files
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 3, SnapshotOptions(in_background=True))
    writer.start(1, state_of(CASE.layout, WORKER, 1))
    assert begun.wait(20)
    writer.close(0.0)
    go_on.set()
    writer.thread.join(20)
    assert any(holds(path, 1) for path in tmp_path.iterdir())


def test_populating_maps_every_page_and_stops_when_told(tmp_path: Path) -> None:
    directory = memory_directory(Path("populate"))  # pages of a disk's file are mapped anyhow
    spec = TensorSpec("w", (1 << 20,), "float32")
    try:
        for cancelled, mapped_kb in ((lambda: True, 8), (lambda: False, 4096)):
            writer = SnapshotFileWriter(
                directory / "x.snapshot", FileMap.of(WORKER, {"w": spec}, spec.shards)
            )
            if writer.populate(cancelled) == cancelled():
                pytest.skip("this system cannot map pages beforehand")
            maps = Path("/proc/self/smaps").read_text().split(f"{directory}/")[1]
            rss = int(maps.split("Rss:")[1].split()[0])
            assert rss <= mapped_kb if cancelled() else rss >= mapped_kb
            writer.close()
    finally:
        shutil.rmtree(directory)


def test_memory_that_cannot_be_pinned_is_used_and_said_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal (locked memory is limited) is told once; what was not pinned is not unpinned."""
    calls: list[str] = []

    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:
            calls.append("register")
            return 2

        def cudaHostUnregister(self, *_: int) -> int:
            calls.append("unregister")
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(snapshot_buffer, "_clear_cuda_error", lambda: calls.append("clear"))
    monkeypatch.setattr(BorrowedState, "on_device", True)
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 1)
    for step in (1, 2, 3):
        writer.start(step, state_of(CASE.layout, WORKER, step))
        writer.wait(20)
    writer.close(20)
    assert writer.files.newest == 3
    assert calls == ["register", "clear"] * 2, "once a file"
    assert caplog.text.count("is not pinned (CUDA error 2)") == 2


def test_a_leased_step_stays_while_later_ones_are_taken_and_goes_with_its_release(
    tmp_path: Path,
) -> None:
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 1)
    writer.start(1, state_of(CASE.layout, WORKER, 1))
    lease = writer.lease(1)
    for step in range(2, 6):
        writer.start(step, state_of(CASE.layout, WORKER, step))
    writer.wait(20)
    for shard, tensor in lease.shards().items():
        assert torch.equal(tensor, unit(CASE.layout.tensors[shard.tensor], shard, 1))
        assert lease.checksums()[shard] == checksum(tensor_bytes(tensor))
    lease.release()
    lease.release()
    for step in range(6, 10):
        writer.start(step, state_of(CASE.layout, WORKER, step))
    writer.wait(20)
    assert not writer.files.has(1)
    writer.close(20)


def test_a_lease_outlives_its_writer(tmp_path: Path) -> None:
    """A generation ends while its checkpoint is still being written."""
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 1)
    writer.start(1, state_of(CASE.layout, WORKER, 1))
    lease = writer.lease(1)
    writer.close(20)
    assert all(
        torch.equal(tensor, unit(CASE.layout.tensors[shard.tensor], shard, 1))
        for shard, tensor in lease.shards().items()
    )
    lease.release()


def test_a_lease_that_ends_as_its_writer_closes_leaves_nothing_to_close_twice(
    tmp_path: Path,
) -> None:
    """An upload ends when the writer's thread has just ended and `close` has not gone on."""
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 1)
    writer.start(1, state_of(CASE.layout, WORKER, 1))
    lease, join = writer.lease(1), writer.thread.join

    def joined(timeout_s: float | None = None) -> None:
        join(timeout_s)
        lease.release()

    writer.thread.join = joined  # type: ignore[method-assign]
    writer.close(20)
    assert all(buffer.file.buffer.closed for buffer in writer.files.buffers)
    assert any(holds(path, 1) for path in tmp_path.iterdir())


def test_a_file_is_closed_by_its_thread_when_that_copies_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk hangs in the middle of a copy for longer than `close` waits: unmapped then, the
    process would die.
    """
    begun, go_on, copy_from = threading.Event(), threading.Event(), SnapshotBuffer.copy_from

    def hanging(buffer: SnapshotBuffer, borrowed: BorrowedState) -> None:
        begun.set()
        assert go_on.wait(20)
        copy_from(buffer, borrowed)

    monkeypatch.setattr(SnapshotBuffer, "copy_from", hanging)
    writer = SnapshotWriter(tmp_path, WORKER, CASE.layout, 1)
    writer.start(1, state_of(CASE.layout, WORKER, 1))
    assert begun.wait(20)
    writer.close(0.0)
    assert not any(buffer.file.buffer.closed for buffer in writer.files.buffers)
    go_on.set()
    writer.thread.join(20)
    assert all(buffer.file.buffer.closed for buffer in writer.files.buffers)
    assert any(holds(path, 1) for path in tmp_path.iterdir())


def test_whatever_fails_in_the_thread_is_told_and_its_lease_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SnapshotWriter(tmp_path / "memory", WORKER, CASE.layout, 1)
    disk = SnapshotWriter(tmp_path / "disk", WORKER, CASE.layout, 1)
    writer.start(1, state_of(CASE.layout, WORKER, 1))

    def broken(*_: object) -> None:
        raise AttributeError("nobody has thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotBuffer, "copy_file", broken)
        disk.start(1, writer.lease(1))
        with pytest.raises(SnapshotError, match="nobody has thought"):
            disk.wait(20)
    disk.start(1, writer.lease(1))
    disk.wait(20)
    for each in (writer, disk):
        each.close(20)
        assert all(buffer.file.buffer.closed for buffer in each.files.buffers)


def test_a_disk_copy_of_a_lease_is_the_same_snapshot(tmp_path: Path) -> None:
    """With the checksums of its birth: what rots in host memory meanwhile does not become good by
    being copied.
    """
    writer = SnapshotWriter(tmp_path / "memory", WORKER, CASE.layout, 1)
    disk = SnapshotWriter(
        tmp_path / "disk", WORKER, CASE.layout, 1, SnapshotOptions(force_to_device=True)
    )
    writer.start(3, state_of(CASE.layout, WORKER, 3))
    writer.wait(20)
    rotten = sorted(CASE.layout.shards_by_worker[WORKER])[0]
    path = next(path for path in (tmp_path / "memory").iterdir() if holds(path, 3))
    flip(path, SnapshotFile(path).map.extents[rotten].offset)
    disk.start(3, writer.lease(3))
    disk.wait(20)
    with SnapshotFile(
        next(path for path in (tmp_path / "disk").iterdir() if holds(path, 3))
    ) as copy:
        with pytest.raises(ShardCorrupt):
            copy.read(rotten)
        for shard in set(copy.shards) - {rotten}:
            copy.read(shard)
    for each in (writer, disk):
        each.close(20)


def holds(path: Path, step: int) -> bool:
    try:
        with SnapshotFile(path) as file:
            return file.commit.step == step
    except SnapshotError:
        return False
