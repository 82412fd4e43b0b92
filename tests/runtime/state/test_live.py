"""State that leaves the device while a restore runs: where it goes, and what peers get of it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autohet.runtime.state import host_memory
from autohet.runtime.state.live import Live
from autohet.runtime.step.step_commit import StateVersion
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.state.holdings import Holding, Source
from recovery.state.layout import ShardId
from recovery.state.slices import empty_local, unit_views
from recovery.transfer import restore as restore_module
from recovery.transfer.restore import Access, Restored, RestoreTask, restore
from recovery.transfer.schedule import schedule
from tests.harness.state_cases import PostOffice, placed, state_of, tensors_of

LAYERS, STEP = 3, 7
TENSORS = tensors_of(LAYERS)
BEFORE = placed(TENSORS, LAYERS, [[(1, ["n0/0"]), (2, ["n1/0"])]])
AFTER = placed(TENSORS, LAYERS, [[(1, ["n1/0"]), (2, ["n0/0"])]])


def live_of(worker: str) -> Live:
    return Live(worker, 1, BEFORE.layout, state_of(BEFORE.layout, worker, STEP), StateVersion(STEP))


def snapshot_of(worker: str, directory: Path, step: int = STEP) -> SnapshotWriter:
    writer = SnapshotWriter(directory, worker, BEFORE.layout, 1)
    writer.start(step, state_of(BEFORE.layout, worker, step))
    writer.wait(20)
    return writer


@pytest.mark.parametrize("snapshots", [True, False])
def test_peers_get_what_has_left_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: bool
) -> None:
    workers = {worker: live_of(worker) for worker in ("n0/0", "n1/0")}
    writers = {
        worker: snapshot_of(worker, tmp_path / "m" / worker[:2]) for worker in workers if snapshots
    }

    def refusing(spec, units, device="cpu"):  # type: ignore[no-untyped-def]
        """No room as long as a tensor is there that the new state does not take over."""
        (worker,) = [
            name for name in workers if AFTER.layout.units_of(name).get(spec.name) == units
        ]
        if any(name not in AFTER.layout.units_of(worker) for name in workers[worker].state):
            raise torch.OutOfMemoryError(spec.name)
        return empty_local(spec, units, device)

    monkeypatch.setattr(restore_module, "empty_local", refusing)
    nodes = AFTER.node_by_worker
    holdings = [
        Holding(
            Source("worker", nodes[worker], worker, STEP, 1), BEFORE.layout.shards_by_worker[worker]
        )
        for worker in workers
    ]
    plan, office = schedule(AFTER.layout, nodes, holdings, STEP), PostOffice()

    def one(worker: str) -> Restored:
        known = workers[worker].known(
            True, {}, lambda *_: writers[worker].lease(STEP) if snapshots else None
        )
        access = Access(
            AgentStore(tmp_path / "m", tmp_path / "d", nodes[worker]), {}, lambda *_: iter(()), 20.0
        )
        return restore(
            RestoreTask(plan, worker, AFTER.layout, known), office.member(worker), access
        )

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(workers, pool.map(one, workers), strict=True))
    assert all(live.in_host_memory for live in workers.values())
    for worker, result in results.items():
        expected = state_of(AFTER.layout, worker, STEP)
        assert result.state.keys() == expected.keys()
        assert all(torch.equal(result.state[name], tensor) for name, tensor in expected.items())
    for live in workers.values():
        live.close()
    for writer in writers.values():
        writer.close()


def lies_in(copy: Tensor, memory: Tensor) -> bool:
    return copy.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


@pytest.mark.parametrize("same", [True, False])
def test_a_snapshot_serves_only_where_it_has_the_same_bits(tmp_path: Path, same: bool) -> None:
    live, writer = live_of("n1/0"), snapshot_of("n1/0", tmp_path)
    changed = ShardId("param/layers.1.norm", 0)
    if not same:
        live.state[changed.tensor][0] += 1  # as a replica that was mended after its snapshot
    wanted = live.state[changed.tensor].clone()
    lease = writer.lease(STEP)
    live.move_to_host((), lease)
    assert not live.state
    assert live.in_host_memory.keys() == BEFORE.layout.shards_by_worker["n1/0"]
    assert torch.equal(live.in_host_memory[changed], wanted)
    copies = lease.shards()
    assert {
        shard for shard, held in live.in_host_memory.items() if not lies_in(held, copies[shard])
    } == (set() if same else {changed})
    live.close()
    writer.close()


def test_what_shares_memory_with_a_tensor_that_leaves_goes_with_it() -> None:
    """Of a flat buffer that stays for the sake of one view nothing would be freed."""
    live = live_of("n1/0")
    names = sorted(live.state)[:2]
    flat = torch.cat([live.state[name].flatten() for name in names])
    for name, part in zip(
        names, flat.split([live.state[name].numel() for name in names]), strict=True
    ):
        live.state[name] = part.view(live.state[name].shape)
    live.move_to_host(set(live.state) - {names[0]}, None)
    assert not set(names) & set(live.state)
    assert len(live.state) == len(BEFORE.layout.units_of("n1/0")) - 2


@pytest.mark.parametrize("snapshot", [False, True])
def test_host_memory_is_asked_before_anything_moves_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    """Where it ends half-way, what has moved and what has not are still all of the state; a
    snapshot's shards need no room.
    """
    live, writer = live_of("n1/0"), snapshot_of("n1/0", tmp_path)
    sizes = {name: tensor.nbytes for name, tensor in live.state.items()}
    wanted = state_of(BEFORE.layout, "n1/0", STEP)

    def free() -> int:
        moved = sum(held.nbytes for held in live.in_host_memory.values())
        return host_memory.RESERVE_BYTES + (0 if snapshot else sum(sizes.values()) // 2 - moved)

    monkeypatch.setattr(host_memory, "free_bytes", free)
    if snapshot:
        live.move_to_host((), writer.lease(STEP))
        assert not live.state
    else:
        with pytest.raises(torch.OutOfMemoryError, match="no room in host memory"):
            live.move_to_host((), None)
        assert 0 < len(live.state) < len(sizes)
        views = {name: shard_views_of(live, name) for name in live.state}
        held = live.in_host_memory | {
            shard: view for each in views.values() for shard, view in each.items()
        }
        assert held.keys() == BEFORE.layout.shards_by_worker["n1/0"]
        assert all(torch.equal(live.state[name], wanted[name]) for name in live.state)
    live.close()
    writer.close()


def shard_views_of(live: Live, name: str) -> dict[ShardId, Tensor]:
    views = unit_views(
        live.layout.tensors[name], live.layout.units_of(live.worker)[name], live.state[name]
    )
    return {ShardId(name, unit): view for unit, view in views.items()}


def test_what_is_free_is_the_machines_or_the_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CONTAINER", tmp_path)
    assert host_memory.free_bytes() is None
    host_memory.require_host_memory(1 << 60)  # nobody knows better
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  1000 kB\n")
    assert host_memory.free_bytes() == 1_024_000
    for name, text in {
        "memory.current": "900000",
        "memory.stat": "anon 5\ninactive_file 200000\n",
    }.items():
        (tmp_path / name).write_text(text)
    for limit, free in {"max": 1_024_000, "1000000": 300_000, "5000000": 1_024_000}.items():
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert host_memory.free_bytes() == free


@pytest.mark.parametrize("usable", [True, False])
def test_state_that_lies_in_host_memory_makes_no_room_on_the_device(usable: bool) -> None:
    """Wrong: it is copied once more, to where it is."""
    offloaded = Live("n0/0", 1, BEFORE.layout, {}, StateVersion(STEP), offloaded=True).known(
        usable, {}, lambda generation, step: None
    )
    assert offloaded.make_room is None
    assert live_of("n0/0").known(usable, {}, lambda generation, step: None).make_room is not None
