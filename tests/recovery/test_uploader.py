"""Uploads beside training: copied and written in the uploader's thread, bounded, and never of a
state that has moved on.
"""

import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recovery.checkpoint import upload as checkpoint_upload
from recovery.checkpoint.commit import CheckpointPart
from recovery.checkpoint.errors import UploadFailed
from recovery.checkpoint.read import read_shards
from recovery.checkpoint.upload import Uploader, UploaderBusy
from recovery.checkpoint.write import write_shards
from recovery.errors import ShardCorrupt
from recovery.local.snapshot import SnapshotWriter
from recovery.state.borrowed import BorrowedState
from recovery.state.layout import Layout, TensorSpec, assign_writers
from recovery.storage.errors import StorageFull, StorageThrottled, StorageTimeout
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import (
    commit,
    full_state,
    local_state,
    state_specs,
    two_worker_layout,
)
from tests.harness.faulty_storage import FaultyStorage, raises


def test_uploader_copies_then_writes_in_the_background_and_says_how_far(storage: Storage) -> None:
    layout = two_worker_layout(state_specs())
    full = full_state(layout.tensors)
    seen: list[tuple[int, int, int]] = []
    with Uploader(storage, progress=lambda *told: seen.append(told)) as uploader:
        receipts = []
        for worker, ids in assign_writers(layout).items():
            state = local_state(layout, worker, full)
            uploader.submit(6, worker, state, layout, ids)
            uploader.wait_copied(30)
            for tensor in state.values():
                tensor.fill_(float("nan"))  # training goes on
            receipts.append(uploader.wait(30))
            assert uploader.poll() == receipts[-1]
    manifest = commit(storage, 6, layout, pickle.loads(pickle.dumps(receipts)))
    for shard, unit in read_shards(storage, manifest):
        assert torch.equal(
            unit, full[shard.tensor][manifest.specs[shard.tensor].unit_slices(shard.unit)]
        )
    assert seen[-1][0] == 6
    assert seen[-1][1] == seen[-1][2] > 0


def test_uploader_is_bounded_reports_failure_and_works_again(directory: Storage) -> None:
    layout = two_worker_layout(state_specs())
    state, ids = (
        local_state(layout, "a/0", full_state(layout.tensors)),
        assign_writers(layout)["a/0"],
    )
    faulty, started, release = FaultyStorage(directory), threading.Event(), threading.Event()

    def blocks(name: str, call: Any) -> None:
        started.set()
        assert release.wait(30)
        raise StorageFull(name, "no space left")

    faulty.fault("put", blocks)
    uploader = Uploader(faulty)
    uploader.submit(1, "a/0", state, layout, ids)
    assert started.wait(30)
    assert uploader.poll() is None
    with pytest.raises(UploaderBusy, match="step 1 is still"):
        uploader.submit(2, "a/0", state, layout, ids)
    with pytest.raises(StorageTimeout, match="step 1 is not uploaded"):
        uploader.wait(0.01)
    release.set()
    with pytest.raises(StorageFull):
        uploader.wait(30)
    uploader.submit(2, "a/0", state, layout, ids)
    assert uploader.wait(30).step == 2
    uploader.close()
    uploader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint-upload"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies of an upload are held up until it is set."""
    found, copy = threading.Event(), checkpoint_upload.host_copy

    def held(view: torch.Tensor) -> torch.Tensor:
        assert threading.current_thread().name == "checkpoint-upload"
        assert found.wait(30)
        return copy(view)

    monkeypatch.setattr(checkpoint_upload, "host_copy", held)
    yield found
    found.set()


def test_uploader_copies_in_its_own_thread_and_then_lets_go(
    directory: Storage, gate: threading.Event
) -> None:
    """The training thread is back before the first byte is copied; when all is copied, nothing
    keeps its tensors.
    """
    layout = two_worker_layout(state_specs())
    state, ids = (
        local_state(layout, "a/0", full_state(layout.tensors)),
        assign_writers(layout)["a/0"],
    )
    watched = [weakref.ref(tensor) for tensor in state.values()]
    faulty, writing, release = FaultyStorage(directory), threading.Event(), threading.Event()
    faulty.fault("put", lambda name, call: writing.set() or (release.wait(30) and call()))
    with Uploader(faulty) as uploader:
        uploader.wait_copied(0)
        uploader.submit(3, "a/0", state, layout, ids)
        with pytest.raises(StorageTimeout, match="step 3 is not copied"):
            uploader.wait_copied(0.01)
        gate.set()
        uploader.wait_copied(30)
        assert writing.wait(30)
        del state
        assert not [tensor for tensor in watched if tensor() is not None]
        release.set()
        assert uploader.wait(30).shards == ids


def test_state_that_changes_while_it_is_copied_is_not_uploaded(
    directory: Storage, gate: threading.Event
) -> None:
    layout = two_worker_layout(state_specs())
    state, ids = (
        local_state(layout, "a/0", full_state(layout.tensors)),
        assign_writers(layout)["a/0"],
    )
    with Uploader(directory) as uploader:
        uploader.submit(3, "a/0", state, layout, ids)
        next(iter(state.values())).add_(1.0)
        gate.set()
        with pytest.raises(UploadFailed, match="changed while it was being copied"):
            uploader.wait(30)
        uploader.submit(4, "a/0", state, layout, ids)
        assert uploader.wait(30).step == 4
    assert not [item.name for item in directory.list() if item.name.startswith("step-00000003")]


def test_a_leased_snapshot_is_uploaded_and_what_has_rotted_in_it_is_not(
    directory: Storage, tmp_path: Path
) -> None:
    layout = layout_of_one()
    state = {name: torch.arange(64.0) for name in layout.tensors}
    writer = SnapshotWriter(tmp_path / "memory", "n0/0", layout, 1)
    with Uploader(directory) as uploader:
        for step in (1, 2):
            writer.start(step, state)
            lease = writer.lease(step)
            writer.wait(20)
            if step == 2:
                next(iter(lease.shards().values())).view(-1)[3] = -1.0
            uploader.submit(step, "n0/0", lease, layout, layout.shards)
            uploader.wait_copied(0)
            if step == 1:
                assert uploader.wait(20).shards == layout.shards
            else:
                with pytest.raises(ShardCorrupt, match="changed in host memory"):
                    uploader.wait(20)
    writer.close(20)


def layout_of_one() -> Layout:
    spec = TensorSpec("param/w", (64,), "float32")
    return Layout({spec.name: spec}, {"n0/0": frozenset(spec.shards)})


def test_what_is_submitted_as_the_uploader_closes_is_written(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the end of its thread's work it would stay for ever, busy and with its lease."""
    layout = two_worker_layout(state_specs())
    state, ids = (
        local_state(layout, "a/0", full_state(layout.tensors)),
        assign_writers(layout)["a/0"],
    )
    uploader, closings = Uploader(directory), list[threading.Thread]()

    class Borrowed(BorrowedState):
        def __init__(self, tensors: Any) -> None:
            closings.append(threading.Thread(target=uploader.close, args=(20,)))
            closings[0].start()
            closings[0].join(0.2)
            super().__init__(tensors)

    monkeypatch.setattr(checkpoint_upload, "BorrowedState", Borrowed)
    uploader.submit(6, "a/0", state, layout, ids)
    assert uploader.wait(20).step == 6
    closings[0].join(20)
    assert not closings[0].is_alive()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_upload, "FIRST_PAUSE_S", 0.01)


def test_a_storage_that_fails_for_a_while_is_tried_again_and_said_at_once(
    directory: Storage, short_pauses: None
) -> None:
    layout = two_worker_layout(state_specs())
    state = local_state(layout, "a/0", full_state(layout.tensors))
    ids = assign_writers(layout)["a/0"]
    faulty = FaultyStorage(directory)
    faulty.fault("put", raises(StorageThrottled("x", "SlowDown")), times=3)
    said: list[tuple[int, str]] = []
    with Uploader(faulty, patience_s=60, on_failure=lambda *told: said.append(told)) as uploader:
        uploader.submit(5, "a/0", state, layout, ids)
        uploader.wait_copied(30)
        for tensor in state.values():
            tensor.fill_(float("nan"))  # training goes on: the copy is what is written again
        receipt = uploader.wait(30)
    assert [step for step, _ in said] == [5, 5, 5]
    assert all("SlowDown" in reason for _, reason in said)
    assert receipt.shards == ids
    good = {stored.shard: stored.checksum for file in receipt.files for stored in file.shards}
    again = write_shards(
        CheckpointPart(directory, 6, "a/0"),
        local_state(layout, "a/0", full_state(layout.tensors)),
        layout,
        ids,
    )
    assert good == {each.shard: each.checksum for file in again.files for each in file.shards}


def test_an_upload_that_is_given_up_is_tried_no_more(directory: Storage) -> None:
    layout = two_worker_layout(state_specs())
    state = local_state(layout, "a/0", full_state(layout.tensors))
    ids = assign_writers(layout)["a/0"]
    faulty, failed = FaultyStorage(directory), threading.Event()
    faulty.fault("put", raises(StorageFull("x", "no space left")), times=99)
    with Uploader(faulty, patience_s=600, on_failure=lambda *_: failed.set()) as uploader:
        uploader.submit(5, "a/0", state, layout, ids)
        assert failed.wait(30)
        uploader.abandon()
        with pytest.raises(StorageFull):
            uploader.wait(30)
        faulty.faults.clear()
        uploader.submit(6, "a/0", state, layout, ids)
        assert uploader.wait(30).step == 6


def test_parts_that_went_into_an_empty_directory_are_written_again(
    tmp_path: Path, short_pauses: None
) -> None:
    """The file system is away when the upload begins, and back after its second try."""
    place, away = tmp_path / "storage", tmp_path / "away"
    proof = "generations/00000001.json"
    layout = two_worker_layout(state_specs())
    state = local_state(layout, "a/0", full_state(layout.tensors))
    ids = assign_writers(layout)["a/0"]
    storage = open_storage(str(place))
    storage.put(proof, b"{}")
    place.rename(away)
    said: list[str] = []

    def note(step: int, reason: str) -> None:
        said.append(reason)
        if len(said) == 2:
            place.rename(tmp_path / "wrong")
            away.rename(place)

    with Uploader(storage, patience_s=60, on_failure=note) as uploader:
        uploader.submit(5, "a/0", state, layout, ids, proof)
        receipt = uploader.wait(30)
    assert len(said) == 2
    assert all("check that the file system is mounted" in reason for reason in said)
    for file in receipt.files:
        assert (place / "step-00000005" / file.name).stat().st_size == file.num_bytes


def test_parts_that_are_lost_while_others_are_written_are_written_again(
    directory: Storage, short_pauses: None
) -> None:
    """Without proof: the first of two files has gone when the second is written."""
    layout = two_worker_layout(state_specs())
    state = local_state(layout, "a/0", full_state(layout.tensors))
    ids = assign_writers(layout)["a/0"]
    faulty = FaultyStorage(directory)

    def loses_the_first(name: str, call: Callable[[], Any]) -> Any:
        call()
        faulty.inner.delete([first for method, first in faulty.calls if method == "put"][:1])

    faulty.fault("put", loses_the_first, at=2)
    with Uploader(faulty, max_file_bytes=1, patience_s=60) as uploader:
        uploader.submit(5, "a/0", state, layout, ids)
        receipt = uploader.wait(30)
    assert len(receipt.files) > 1
    sizes = {info.name: info.size for info in directory.list("step-00000005/")}
    assert all(sizes["step-00000005/" + file.name] == file.num_bytes for file in receipt.files)
