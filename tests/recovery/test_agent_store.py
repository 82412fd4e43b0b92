"""A node's store over its directories: what it finds, spills, takes in, removes, and survives."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recovery.errors import ShardCorrupt, ShardUnavailable, SnapshotError
from recovery.local import agent_store
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotOptions, SnapshotWriter, file_name
from recovery.local.snapshot_file import SnapshotFile
from recovery.local.snapshot_format import FileMap
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from tests.harness.state_cases import placed, state_of, tensors_of, unit

CASE = placed(tensors_of(2), 2, [[(1, ["n0/0"]), (1, ["n0/1"])]])
SPECS = CASE.layout.tensors


def snapshots(directory: Path, worker: str, *steps: int, generation: int = 1) -> None:
    writer = SnapshotWriter(directory, worker, CASE.layout, generation)
    for step in steps:
        writer.start(step, state_of(CASE.layout, worker, step))
        writer.wait(20)
    writer.close(20)


@pytest.fixture
def store(tmp_path: Path) -> AgentStore:
    return AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")


def source(worker: str, step: int, kind: str = "memory", generation: int = 1) -> Source:
    return Source(kind, "n0", worker, step, generation)


def content(shard: ShardId, step: int) -> bytes:
    return unit(SPECS[shard.tensor], shard, step).contiguous().numpy().tobytes()


def test_empty_or_absent_directories_hold_nothing(store: AgentStore) -> None:
    assert store.inventory() == []
    with pytest.raises(ShardUnavailable, match="no such snapshot"):
        store.read(source("n0/0", 1), ShardId("param/layers.0.norm", 0))


def test_inventory_and_reads_of_all_workers_and_steps(store: AgentStore, tmp_path: Path) -> None:
    snapshots(tmp_path / "memory", "n0/0", 4, 5)
    snapshots(tmp_path / "memory", "n0/1", 5)
    snapshots(tmp_path / "disk", "n0/0", 2)
    found = {holding.source: holding.shards for holding in store.inventory()}
    shards = CASE.layout.shards_by_worker
    expected = {source("n0/0", 4), source("n0/0", 5), source("n0/1", 5), source("n0/0", 2, "disk")}
    assert set(found) == expected
    assert store.problems == ()
    for place in expected:
        assert found[place] == shards[place.name]
        assert all(
            bytes(store.read(place, shard)) == content(shard, place.step) for shard in found[place]
        )


def test_it_follows_files_as_they_change(store: AgentStore, tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path / "memory", "n0/0", CASE.layout, 1)
    shard = min(CASE.layout.shards_by_worker["n0/0"])
    for step in range(1, 5):
        writer.start(step, state_of(CASE.layout, "n0/0", step))
        writer.wait(20)
        assert bytes(store.read(source("n0/0", step), shard)) == content(shard, step)
    with pytest.raises(ShardUnavailable):
        store.read(source("n0/0", 1), shard)
    writer.close(20)
    snapshots(tmp_path / "memory", "n0/0", 9, generation=2)
    assert bytes(store.read(source("n0/0", 9, generation=2), shard)) == content(shard, 9)


def test_removed_files_are_unmapped(store: AgentStore, tmp_path: Path) -> None:
    snapshots(tmp_path / "memory", "n0/0", 1)
    store.read(source("n0/0", 1), min(CASE.layout.shards_by_worker["n0/0"]))
    assert mappings(tmp_path) == 1
    shutil.rmtree(tmp_path / "memory")
    assert store.inventory() == []
    assert mappings(tmp_path) == 0, "a removed file's memory is free"


def mappings(directory: Path) -> int:
    return sum(str(directory) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_damaged_files_are_skipped_and_reported(store: AgentStore, tmp_path: Path) -> None:
    snapshots(tmp_path / "memory", "n0/0", 1, 2)
    snapshots(tmp_path / "memory", "n0/1", 1, 2)
    memory = tmp_path / "memory"
    store.inventory()
    os.truncate(memory / file_name("n0/0", 1, 0), 5000)
    (memory / "junk.snapshot").write_bytes(b"x" * 9000)
    holdings = {holding.source for holding in store.inventory()}
    assert holdings == {source("n0/0", 2), source("n0/1", 1), source("n0/1", 2)}
    assert len(store.problems) == 2
    assert any("is truncated" in problem for problem in store.problems)
    assert any("junk.snapshot: is no snapshot" in problem for problem in store.problems)
    with pytest.raises(ShardUnavailable):
        store.read(source("n0/0", 1), min(CASE.layout.shards_by_worker["n0/0"]))


def test_a_flipped_bit_is_never_given_out(store: AgentStore, tmp_path: Path) -> None:
    snapshots(tmp_path / "memory", "n0/0", 1)
    shard = max(CASE.layout.shards_by_worker["n0/0"])
    file = store.file_of(source("n0/0", 1), shard)
    with open(file.path, "r+b") as raw:
        raw.seek(file.map.extents[shard].offset)
        raw.write(b"\xff\xfe\xfd\xfc")
    with pytest.raises(ShardCorrupt):
        store.read(source("n0/0", 1), shard)


def push(store: AgentStore, worker: str, step: int, generation: int = 1) -> None:
    """A copy of a worker's state, as a peer's server takes it in."""
    shards = sorted(CASE.layout.shards_by_worker["n0/0"])[:3]
    writer = store.accept(step, generation, FileMap.of(worker, SPECS, shards))
    for shard, extent in writer.map.extents.items():
        writer.buffer[extent.offset : extent.offset + extent.num_bytes] = content(shard, step)
    writer.commit(step, generation)
    writer.close()


def places(store: AgentStore) -> set[Source]:
    return {holding.source for holding in store.inventory()}


def test_prune_keeps_newer_steps_and_the_files_of_the_living(
    store: AgentStore, tmp_path: Path
) -> None:
    snapshots(tmp_path / "memory", "n0/0", 3, 4)
    snapshots(tmp_path / "memory", "n0/1", 3, 4)
    assert store.prune((1, 4), 4, living=frozenset({"n0/0"})) == 1
    assert places(store) == {source("n0/0", 3), source("n0/0", 4), source("n0/1", 4)}


def test_memory_is_pruned_by_generation_and_step_and_the_disk_by_durable_step(
    store: AgentStore, tmp_path: Path
) -> None:
    snapshots(tmp_path / "memory", "n0/1", 8, 9, generation=1)
    snapshots(tmp_path / "disk", "n0/1", 8, 9, generation=1)
    for generation, step in ((1, 9), (2, 4), (2, 5)):
        push(store, "n7/0", step, generation)
    store.prune((2, 5), 9)
    assert places(store) == {source("n0/1", 9, "disk"), source("n7/0", 5, generation=2)}
    assert len(list((tmp_path / "memory").iterdir())) == 1


def test_superseded_copies_go_and_only_those(store: AgentStore, tmp_path: Path) -> None:
    snapshots(tmp_path / "memory", "n0/0", 1)
    for step in (1, 2, 3):
        push(store, "n0/0", step)
        push(store, "n8/0", step)
    assert store.drop_copies("n0/0", (1, 3)) == 2
    assert {s for s in places(store) if s.name == "n0/0"} == {source("n0/0", 1), source("n0/0", 3)}
    assert len({s for s in places(store) if s.name == "n8/0"}) == 3


def test_what_an_interrupted_push_has_left_is_removed(store: AgentStore, tmp_path: Path) -> None:
    push(store, "n7/0", 3)
    snapshots(tmp_path / "memory", "n0/0", 3)
    SnapshotWriter(tmp_path / "memory", "n0/1", CASE.layout, 1).close(20)
    unfinished = store.accept(
        4, 1, FileMap.of("n7/0", SPECS, sorted(CASE.layout.shards_by_worker["n0/0"]))
    )
    unfinished.close()
    (tmp_path / "memory" / ".n7%2F0.s5.g1.pushed1-1.snapshot.9.tmp").write_bytes(b"half a header")
    again = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")
    assert again.remove_unfinished() == 2
    assert places(again) == {source("n7/0", 3), source("n0/0", 3)}
    assert len(list((tmp_path / "memory").iterdir())) == 5, (
        "workers' own files stay, committed or not"
    )


def test_a_push_that_another_agent_is_in_the_middle_of_is_not_unfinished(
    store: AgentStore, tmp_path: Path
) -> None:
    """Two drivers have an agent each on this node: the second one's begins while a peer pushes to
    the first one's.
    """
    push(store, "n7/0", 3)
    (holding,) = store.inventory()
    coming = store.accept(4, 1, store.file_of(holding.source, min(holding.shards)).map)
    again = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")
    assert again.remove_unfinished() == 0
    assert coming.path.exists()
    coming.close()
    assert again.remove_unfinished() == 1, "once its writer is gone, it is"
    again.close()


def test_a_store_that_refuses_copies_says_what_it_has_taken(
    store: AgentStore, tmp_path: Path
) -> None:
    empty = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")
    assert empty.refuse_copies() is None
    push(store, "n7/0", 3)
    push(store, "n7/0", 2, generation=2)
    assert store.refuse_copies() == (2, 2)
    with pytest.raises(SnapshotError, match="about to leave"):
        push(store, "n7/0", 4, generation=2)
    assert len(places(store)) == 2


def test_pushed_copies_go_to_the_disk_when_memory_is_full(
    store: AgentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").write_text("not a directory: nothing can be made in it")
    shards = sorted(CASE.layout.shards_by_worker["n0/1"])[:3]
    writer = store.accept(5, 1, FileMap.of("n9/0", SPECS, shards))
    for shard, extent in writer.map.extents.items():
        writer.buffer[extent.offset : extent.offset + extent.num_bytes] = content(shard, 5)
    assert store.inventory() == [], "nothing before the commit"
    writer.commit(5, 1)
    writer.close()
    place = source("n9/0", 5, "disk")
    assert [holding.source for holding in store.inventory()] == [place]
    assert all(bytes(store.read(place, shard)) == content(shard, 5) for shard in shards)
    (tmp_path / "disk").rename(tmp_path / "gone")
    (tmp_path / "disk").write_text("full, too")
    with pytest.raises(SnapshotError, match="cannot make a file"):
        store.accept(5, 1, FileMap.of("n9/0", SPECS, shards))


def test_a_disk_that_hangs_hides_nothing_in_host_memory(
    store: AgentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens one of the disk's files waits for it."""
    answers = threading.Event()

    def open_slowly(path: Path) -> SnapshotFile:
        if path.parent.name == "disk":
            answers.wait(60)
        return SnapshotFile(path)

    monkeypatch.setattr(agent_store, "SnapshotFile", open_slowly)
    snapshots(tmp_path / "memory", "n0/0", 4)
    snapshots(tmp_path / "disk", "n0/0", 2)
    before, shard = threading.active_count(), min(CASE.layout.shards_by_worker["n0/0"])
    with ThreadPoolExecutor(1) as pool:
        try:
            for _ in range(3):
                looking = pool.submit(store.inventory, 0.1)
                assert [holding.source for holding in looking.result(10)] == [source("n0/0", 4)]
            assert store.problems == ("the disk of n0 does not answer: what it keeps is not known",)
            assert pool.submit(lambda: bytes(store.read(source("n0/0", 4), shard))).result(
                10
            ) == content(shard, 4)
            assert pool.submit(store.drop_copies, "n0/0", (9, 9)).result(10) == 0
            assert threading.active_count() <= before + 2, (
                "one that looks, whoever asks, and the pool's own"
            )
        finally:
            answers.set()
    assert [holding.source for holding in store.inventory(20)] == [
        source("n0/0", 4),
        source("n0/0", 2, "disk"),
    ]


def test_copies_that_come_at_once_take_no_more_than_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_map = FileMap.of("n9/0", SPECS, CASE.layout.shards_by_worker["n0/0"])
    store = AgentStore(
        tmp_path / "memory",
        tmp_path / "disk",
        "n0",
        max_copy_bytes=file_map.file_bytes + file_map.file_bytes // 2,
    )
    begun, go_on, fallocate = threading.Event(), threading.Event(), os.posix_fallocate

    def slow(*arguments: int) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(20)
        fallocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.accept, 1, 1, file_map)
        assert begun.wait(20)
        second = store.accept(1, 1, file_map)
        go_on.set()
        assert first.result(20).path.parent == tmp_path / "memory"
    assert second.path.parent == tmp_path / "disk"
    second.close()
    first.result().close()


def test_what_was_read_of_earlier_steps_is_forgotten(store: AgentStore, tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path / "memory", "n0/0", CASE.layout, 1)
    for step in range(1, 9):
        writer.start(step, state_of(CASE.layout, "n0/0", step))
        writer.wait(20)
        store.file_of(source("n0/0", step), min(CASE.layout.shards_by_worker["n0/0"]))
    writer.close(20)
    assert len(store.resolved) <= 3


def files_of(tmp_path: Path, worker: str) -> list[str]:
    found = sorted(path.name for path in (tmp_path / "disk").glob(f"{worker.replace('/', '%2F')}*"))
    return [name.split(".g")[1].removesuffix(".snapshot") for name in found]


def test_ten_generations_leave_the_newest_durable_step_and_no_other_file(
    store: AgentStore, tmp_path: Path
) -> None:
    """Some generations end before a durable step, some have one, some two; a worker lives through
    all of them.
    """
    step = 0
    for generation, num_durable in enumerate((2, 1, 0, 1, 0, 0, 2, 1, 0, 1), start=1):
        writer = SnapshotWriter(
            tmp_path / "disk",
            "n0/0",
            CASE.layout,
            generation,
            SnapshotOptions(force_to_device=True, in_background=True),
        )
        state = state_of(CASE.layout, "n0/0", generation)
        for _ in range(num_durable):
            step += 4
            writer.start(step, state)
            writer.wait()
        writer.close(20)
        store.prune((generation, step), step, frozenset({"n0/0"}), generation)
    assert {holding.step for holding in store.inventory()} == {step}
    assert files_of(tmp_path, "n0/0") == ["10.0", "10.1"]


def test_prune_leaves_what_an_older_generation_is_still_writing(
    store: AgentStore, tmp_path: Path
) -> None:
    old = SnapshotWriter(tmp_path / "disk", "n0/0", CASE.layout, 1)
    store.prune((2, 8), 8, frozenset({"n0/0"}), 2)
    assert files_of(tmp_path, "n0/0") == ["1.0", "1.1"]
    old.close(20)
    assert store.prune((2, 8), 8, frozenset({"n0/0"}), 2) == 2
    assert files_of(tmp_path, "n0/0") == []
