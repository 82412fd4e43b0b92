"""What a node's host memory is shared out to, what a snapshot of some shards holds, and a memory
file system that is too small.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recovery.errors import SnapshotError
from recovery.local import memory_budget
from recovery.local.agent_store import AgentStore, write_copies_limit
from recovery.local.memory_budget import FILES, ROUNDS, Budget, capacity_of, share_out
from recovery.local.snapshot import SnapshotOptions, SnapshotWriter
from recovery.local.snapshot_format import FileMap
from recovery.state.layout import Layout, ShardId, TensorSpec

MB = 1 << 20
SPECS = {
    name: TensorSpec(name, (4, 65536), "float32", 0, (0, 1, 2, 4))
    for name in ("param/a", "param/b", "param/c")
}


def shards_of(*names: str) -> frozenset[ShardId]:
    return frozenset(shard for name in names for shard in SPECS[name].shards)


# n0's first worker shares its shards with n1, its second has the only ones.
LAYOUT = Layout(
    SPECS,
    {
        "n0/0": shards_of("param/a"),
        "n0/1": shards_of("param/b"),
        "n1/0": shards_of("param/a", "param/c"),
    },
)
NODES = {"n0/0": "n0", "n0/1": "n0", "n1/0": "n1"}


def budget(capacity: float, replicates: bool = False) -> Budget:
    return share_out("n0", LAYOUT, NODES, int(capacity), replicates=replicates)


def test_where_all_fits_all_is_kept_and_the_rest_is_for_copies() -> None:
    found = budget(100 * MB)
    assert found.shards_by_worker == {"n0/0": shards_of("param/a"), "n0/1": shards_of("param/b")}
    assert found.suffices
    assert "NOTHING" not in found.sentence
    assert found.copies_bytes == pytest.approx(100 * MB - 2 * FILES * MB, rel=0.01)


def test_what_this_node_alone_holds_comes_first() -> None:
    found = budget(2.5 * MB)
    assert found.shards_by_worker == {"n0/0": frozenset(), "n0/1": shards_of("param/b")}
    assert not found.suffices
    assert "n0/0 keeps NOTHING of its state (0 MB)" in found.sentence


def test_then_copies_of_what_others_alone_hold_then_the_rest() -> None:
    needed = FILES * 1.01 + ROUNDS * 1
    found = budget((needed + 1) * MB, replicates=True)
    assert found.shards_by_worker["n0/0"] == frozenset()
    assert found.copies_bytes >= ROUNDS * MB
    assert budget((needed + 2.1) * MB, replicates=True).suffices


def test_too_little_for_anything_is_said() -> None:
    found = budget(1 * MB)
    assert not any(found.shards_by_worker.values())
    assert "n0/1 keeps NOTHING of its state, although no other node has it" in found.sentence


def test_a_snapshot_of_some_shards_holds_those_and_no_more(tmp_path: Path) -> None:
    """Units of the middle and of the end of one tensor, and nothing of another."""
    only = {ShardId("param/a", 1), ShardId("param/a", 2)}
    layout = Layout(SPECS, {"n0/0": shards_of("param/a", "param/b")})
    state = {name: torch.rand(4, 65536) for name in ("param/a", "param/b")}
    writer = SnapshotWriter(tmp_path / "memory", "n0/0", layout, 1, SnapshotOptions(only=only))
    assert not writer.whole
    writer.start(3, state)
    writer.wait()
    writer.close()
    with closing(AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")) as store:
        (held,) = store.inventory()
        assert held.shards == only
        first, last = (bytes(store.read(held.source, shard)) for shard in sorted(only))
    assert first == state["param/a"][1:2].numpy().tobytes()
    assert last == state["param/a"][2:].numpy().tobytes()


def test_copies_take_no_more_than_they_were_left(tmp_path: Path) -> None:
    file_map = FileMap.of("n1/0", SPECS, sorted(shards_of("param/c")))
    with closing(AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")) as store:
        (tmp_path / "memory").mkdir()
        write_copies_limit(tmp_path / "memory", file_map.file_bytes)
        for step in (1, 2):
            writer = store.accept(step, 1, file_map)
            writer.commit(step, 1)
            writer.close()
        assert [holding.source.kind for holding in store.inventory()] == ["memory", "disk"]


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 4 MiB."""
    place = tmp_path / "memory"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_the_capacity_is_that_of_the_file_system(small_memory: Path) -> None:
    assert 3.5 * MB < capacity_of(small_memory) < 4 * MB


def test_a_file_system_that_others_have_filled_is_an_error_and_no_signal(
    small_memory: Path,
) -> None:
    (small_memory / "others").write_bytes(bytes(3 * MB))
    with pytest.raises(SnapshotError, match="No space left"):
        SnapshotWriter(small_memory, "n0/1", LAYOUT, 1)
    assert [path.name for path in small_memory.iterdir()] == ["others"]


@pytest.mark.parametrize(
    ("shm_bytes", "wanted_bytes", "expected"),
    [
        (64 << 20, 40 << 30, "/ has 67 MB: start the container with --shm-size=48g"),
        (64 << 20, 40 << 30, "or run mount -o remount,size=48G /"),
        (250 << 30, 900 << 30, "use nodes with more"),
    ],
)
def test_too_small_a_memory_file_system_comes_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, shm_bytes: int, wanted_bytes: int, expected: str
) -> None:
    """Docker gives a container 64 MB of /dev/shm, whatever the machine has."""
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_blocks=shm_bytes >> 12, f_frsize=1 << 12)
    )
    monkeypatch.setattr(
        os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 500 << 30}[name]
    )
    assert expected in memory_budget.memory_remedy("/", wanted_bytes)


def test_state_in_host_memory_leaves_less_for_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of 100 GiB, half of it the memory file system: 90 and 45 can be used."""
    gib = 1 << 30
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_blocks=50 * gib >> 12, f_frsize=1 << 12)
    )
    monkeypatch.setattr(
        os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 100 * gib}[name]
    )
    left = [capacity_of(tmp_path / "m", taken * gib) / gib for taken in (0, 40, 60, 95)]
    assert left == pytest.approx([45, 45, 30, 0])


def test_the_capacity_does_not_follow_what_is_free(small_memory: Path) -> None:
    """All workers of a node ask, some before and some after the first files are made."""
    before = capacity_of(small_memory)
    (small_memory / "taken").write_bytes(bytes(int(2 * MB)))
    assert capacity_of(small_memory) == before
