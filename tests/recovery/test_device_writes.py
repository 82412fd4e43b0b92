"""Restores whose targets are on a device: through pinned memory where there is room, and right with
any mixture of sources and faults.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recovery.errors import RestoreError
from recovery.local.snapshot_file import SnapshotFile
from recovery.state.device_checksum import view_checksums
from recovery.state.layout import ShardId
from recovery.transfer import device_reads, device_writes
from recovery.transfer import restore as restore_module
from recovery.transfer.device_writes import CudaCopies, DeviceWrites, writes_to
from recovery.transfer.schedule import schedule
from tests.harness.faulty_tier import FAULTS, FaultyTier
from tests.harness.restore_fleet import (
    LAYERS,
    LINKS,
    S3,
    STEP,
    TENSORS,
    TWO,
    Fleet,
    check,
    drawn,
    moved,
    run,
)
from tests.harness.state_cases import PostOffice, placed

NUM_BYTES = max(
    TENSORS[shard.tensor].unit_bytes(shard.unit)
    for spec in TENSORS.values()
    for shard in spec.shards
)


@dataclass
class PosedCopies:
    """Host memory that poses as a device: what is copied from pinned memory, and from any other."""

    refuses: bool = False
    given: list[Tensor] = field(default_factory=list)
    num_bytes: dict[str, int] = field(default_factory=lambda: {"pinned": 0, "pageable": 0})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pinned(self, num_bytes: int) -> Tensor:
        if self.refuses:
            raise RuntimeError("CUDA error: out of memory")
        memory = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
        with self._lock:
            self.given.append(memory)
        return memory

    def copy(self, target: Tensor, data: Tensor) -> None:
        assert target.shape == data.shape
        assert target.dtype == data.dtype
        target.copy_(data)
        with self._lock:
            pinned = any(
                memory.data_ptr() <= data.data_ptr() < memory.data_ptr() + memory.nbytes
                for memory in self.given
            )
            self.num_bytes["pinned" if pinned else "pageable"] += data.nbytes

    def move(self, target: Tensor, data: Tensor) -> None:
        target.copy_(data)

    def start(self, targets: list[Tensor], sources: list[Tensor]) -> Callable[[], None]:
        """A device that is late: each copy happens when it is waited for."""

        def wait() -> None:
            while targets:
                self.copy(targets.pop(), sources.pop())

        return wait

    def checksums(self, tensors: Sequence[Tensor]) -> list[int]:
        return view_checksums(tensors)


Posed = Callable[..., tuple[PosedCopies, list[DeviceWrites]]]


@pytest.fixture
def posed(monkeypatch: pytest.MonkeyPatch) -> Posed:
    """Restores write to host memory as if it were a device's."""

    def pose(**options: Any) -> tuple[PosedCopies, list[DeviceWrites]]:
        copies, made = PosedCopies(**options), list[DeviceWrites]()

        def writes(device: torch.device) -> DeviceWrites:
            made.append(DeviceWrites(copies))
            return made[-1]

        monkeypatch.setattr(restore_module, "writes_to", writes)
        return copies, made

    return pose


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_layout_from_any_mixture_of_holders(
    fleet: Fleet, posed: Posed, data: st.DataObject
) -> None:
    _, made = posed()
    after, _, states, plan = drawn(fleet, data)
    results = run(plan, after, states, fleet)
    check(results, after)
    assert moved(results) == plan.bytes_by_tier
    assert all(
        writes.room_bytes == device_writes.PINNED_BYTES and not writes.pinned_by_shard
        for writes in made
    )


@pytest.mark.parametrize("kind", ["memory", "disk", "peer"])
def test_what_nodes_keep_is_read_straight_into_pinned_memory(
    fleet: Fleet, posed: Posed, kind: str
) -> None:
    copies, _ = posed()
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(
        TWO, "disk" if kind == "disk" else "memory", ["n1/0" if kind == "peer" else "n0/0"]
    )
    results = run(schedule(after.layout, after.node_by_worker, kept, STEP, LINKS), after, {}, fleet)
    check(results, after)
    assert copies.num_bytes == {"pinned": after.layout.num_bytes, "pageable": 0}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["memory", "disk", "peer"])
def test_a_source_that_fails_is_replaced_by_the_next(
    fleet: Fleet, posed: Posed, kind: str, fault: str
) -> None:
    _, made = posed()
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(
        TWO, "disk" if kind == "disk" else "memory", ["n1/0" if kind == "peer" else "n0/0"]
    )
    plan = schedule(after.layout, after.node_by_worker, [*kept, S3], STEP, LINKS)
    fleet.faults[kind] = FaultyTier(None, fault, at=5)  # type: ignore[arg-type]
    check(run(plan, after, {}, fleet), after)
    assert all(not writes.pinned_by_shard for writes in made)


@pytest.mark.parametrize("room", [0, 1, NUM_BYTES, 3 * NUM_BYTES])
def test_no_more_is_pinned_than_may_be(
    fleet: Fleet, posed: Posed, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(device_writes, "PINNED_BYTES", room)
    copies, made = posed()
    most = 0
    memory_of = DeviceWrites.memory_of

    def watched(writes: DeviceWrites, shard: ShardId, num_bytes: int) -> memoryview | None:
        nonlocal most
        found = memory_of(writes, shard, num_bytes)
        most = max(most, sum(memory.nbytes for memory in list(writes.pinned_by_shard.values())))
        return found

    monkeypatch.setattr(DeviceWrites, "memory_of", watched)
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(TWO, "memory", ["n1/0"])
    check(
        run(schedule(after.layout, after.node_by_worker, kept, STEP, LINKS), after, {}, fleet),
        after,
    )
    assert most <= room
    assert (copies.num_bytes["pinned"] > 0) == (room >= NUM_BYTES)
    assert copies.num_bytes["pageable"] > 0 or room >= NUM_BYTES
    assert made[0].room_bytes == room


def test_a_host_that_pins_nothing_restores_all_the_same(fleet: Fleet, posed: Posed) -> None:
    copies, _ = posed(refuses=True)
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(TWO, "memory", ["n1/0"])
    check(
        run(schedule(after.layout, after.node_by_worker, kept, STEP, LINKS), after, {}, fleet),
        after,
    )
    assert copies.num_bytes == {"pinned": 0, "pageable": after.layout.num_bytes}


def test_a_shard_that_no_source_gives_is_an_error(fleet: Fleet, posed: Posed) -> None:
    posed()
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(TWO, "memory", ["n0/0"])
    plan = schedule(after.layout, after.node_by_worker, kept, STEP, LINKS)
    fleet.faults["memory"] = FaultyTier(None, "corrupt", at=5)  # type: ignore[arg-type]
    with pytest.raises(RestoreError):
        run(plan, after, {}, fleet)


def test_a_nodes_memory_comes_in_pieces_of_the_pinned_slots(
    fleet: Fleet, posed: Posed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: a shard larger than a slot is cut short, or parts lie one slot's turn apart."""
    monkeypatch.setattr(device_reads, "SLOT_BYTES", 24)
    copies, _ = posed()
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(TWO, "memory", ["n0/0"])
    results = run(schedule(after.layout, after.node_by_worker, kept, STEP, LINKS), after, {}, fleet)
    check(results, after)
    assert {memory.nbytes for memory in copies.given} == {24}


def test_a_damaged_shard_of_the_nodes_memory_is_not_restored(fleet: Fleet, posed: Posed) -> None:
    """Wrong: what the device holds is believed unchecked."""
    posed()
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    kept = fleet.keep(TWO, "memory", ["n0/0"])
    path = next(fleet.directory.rglob("*.snapshot"))
    with SnapshotFile(path) as file:
        damaged = file.shards[-1]
        offset = file.extent(damaged).offset
    with open(path, "r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)
        raw.seek(offset)
        raw.write(bytes([byte[0] ^ 1]))
    plan = schedule(after.layout, after.node_by_worker, kept, STEP, LINKS)
    with pytest.raises(RestoreError, match=re.escape(str(damaged))):
        run(plan, after, {}, fleet)


def test_a_shard_has_one_pinned_memory_until_it_is_written() -> None:
    copies = PosedCopies()
    writes, shard, target = (
        DeviceWrites(copies),
        ShardId("param/one", 0),
        torch.zeros(4, dtype=torch.float32),
    )
    first, again = writes.memory_of(shard, 16), writes.memory_of(shard, 16)
    assert first is not None
    assert again is not None
    assert len(copies.given) == 1
    first[:] = torch.arange(4, dtype=torch.float32).numpy().tobytes()
    writes.write(shard, target, torch.frombuffer(again, dtype=torch.float32))
    assert target.tolist() == [0, 1, 2, 3]
    assert writes.memory_of(shard, 16) is not None
    assert len(copies.given) == 2


def test_targets_in_host_memory_are_written_to_themselves() -> None:
    assert writes_to(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_waits_for_what_used_the_targets_memory_before() -> None:
    """The allocator gives a tensor's memory to the next one of the stream at once: what still runs
    on it must not overwrite the copy.
    """
    device, size = torch.device("cuda", 0), 1 << 26
    wanted = torch.arange(size, dtype=torch.float32)
    data = wanted.pin_memory()
    scratch = torch.zeros(size, device=device)
    for _ in range(2000):
        scratch.add_(1.0)
    where = scratch.data_ptr()
    del scratch
    target = torch.empty(size, device=device)
    assert target.data_ptr() == where
    CudaCopies(device).copy(target, data)
    data.zero_()
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_peers_keep_comes_to_a_gpu_through_pinned_memory(fleet: Fleet) -> None:
    device = torch.device("cuda", 0)
    writes = writes_to(device)
    assert writes is not None
    memory = writes.memory_of(ShardId("param/one", 0), 64)
    assert memory is not None
    assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
    after = placed(TENSORS, LAYERS, [[(3, ["n0/0"])]])
    plan = schedule(
        after.layout, after.node_by_worker, fleet.keep(TWO, "memory", ["n1/0"]), STEP, LINKS
    )
    restored = restore_module.restore(
        restore_module.RestoreTask(plan, "n0/0", after.layout, None, device),
        PostOffice().member("n0/0"),
        fleet.access("n0"),
    )
    assert all(tensor.device == device for tensor in restored.state.values())
    check(
        {
            "n0/0": replace(
                restored, state={name: tensor.cpu() for name, tensor in restored.state.items()}
            )
        },
        after,
    )
