"""Many shards fall back to S3 at once: one client, one lease, requests side by side."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from torch import Tensor

from recovery.checkpoint.commit import CheckpointFacts, CheckpointPart, commit_checkpoint
from recovery.checkpoint.durable_reads import DurableReads
from recovery.checkpoint.errors import CheckpointMissing
from recovery.checkpoint.write import write_shards
from recovery.local.agent_store import AgentStore
from recovery.state.holdings import Holding, Source
from recovery.state.slices import shard_views
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from recovery.transfer import exchange
from recovery.transfer.restore import Access, LiveState, Restored, RestoreTask, restore
from recovery.transfer.schedule import schedule
from tests.harness.state_cases import Member, PostOffice, placed, state_of, tensors_of, unit
from tests.recovery.conftest import SMALL

STEP, ME, PEER = 6, "n0/0", "n1/0"
TENSORS = tensors_of(3)
AFTER, BEFORE = placed(TENSORS, 3, [[(3, [ME])]]), placed(TENSORS, 3, [[(3, [PEER])]])
SHARDS = AFTER.layout.shards_by_worker[ME]


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many clients of each service are made from now on."""
    made: Counter[str] = Counter()
    make = boto3.session.Session.client

    def counted(session: boto3.session.Session, service: str, **given: Any) -> Any:
        made[service] += 1
        return make(session, service, **given)

    monkeypatch.setattr(boto3.session.Session, "client", counted)
    return made


@pytest.fixture
def committed(s3_uri: str) -> str:
    """The URI of a storage that has the whole state of STEP."""
    storage = open_storage(s3_uri)
    receipt = write_shards(
        CheckpointPart(storage, STEP, ME), state_of(AFTER.layout, ME, STEP), AFTER.layout, SHARDS
    )
    commit_checkpoint(storage, STEP, AFTER.layout, [receipt], CheckpointFacts({"step": STEP}, {}))
    storage.close()
    return s3_uri


class Watched:
    """A storage that counts calls, and whose first two reads of data wait for each other."""

    def __init__(self, inner: Storage) -> None:
        self._inner, self.calls, self.meeting = inner, Counter[str](), threading.Barrier(2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def until(self, cancelled: threading.Event) -> Watched:
        return self

    def patient(self, *_: Any, **__: Any) -> Watched:
        return self

    def put(self, name: str, *data: Any, **given: Any) -> None:
        self.calls["lease" if name.endswith(".lease") else "put"] += 1
        self._inner.put(name, *data, **given)

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.calls["data"] += 1
        if self.calls["data"] <= 2:
            self.meeting.wait(timeout=10)
        self._inner.get_into(name, start, buffer)


class Liar(Member):
    """A live worker of whose messages nothing is to be used."""

    def send(self, tensor: Tensor, to: str, tag: int) -> Any:
        return super().send(torch.full_like(tensor, 0x55), to, tag)


def restore_from_liar(durable: DurableReads, directory: Path, uri: str) -> Restored:
    """`ME` gets all its shards from a live worker, whose every message is damaged, or else from
    storage.
    """
    source = Source("worker", "n1", PEER, STEP, 1)
    holdings = [Holding(source, SHARDS), Holding(Source("s3", "", uri, STEP), SHARDS)]
    plan = schedule(AFTER.layout, AFTER.node_by_worker | BEFORE.node_by_worker, holdings, STEP)
    office = PostOffice()
    with (
        closing(AgentStore(directory / "memory", directory / "disk", "n0")) as store,
        ThreadPoolExecutor(2) as pool,
    ):
        access = Access(store, {}, durable, 20)
        theirs = LiveState(BEFORE.layout, state_of(BEFORE.layout, PEER, STEP))
        giving = pool.submit(
            restore, RestoreTask(plan, PEER, AFTER.layout, theirs), Liar(office, PEER), access
        )
        taken = restore(RestoreTask(plan, ME, AFTER.layout, None), Member(office, ME), access)
        giving.result(20)
    return taken


@pytest.mark.parametrize("direct_bytes", [1, exchange.DIRECT_BYTES])
def test_shards_that_fall_back_share_one_client(
    clients: Counter[str],
    committed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    direct_bytes: int,
) -> None:
    monkeypatch.setattr(exchange, "DIRECT_BYTES", direct_bytes)
    monkeypatch.setattr("recovery.transfer.messages.make_messages.__defaults__", (64,))
    monkeypatch.setattr(exchange, "IN_FLIGHT_BYTES", 1)
    clients.clear()
    storage = Watched(open_storage(committed))
    with DurableReads(storage) as durable:  # type: ignore[arg-type]
        restored = restore_from_liar(durable, tmp_path, committed)
    expected = state_of(AFTER.layout, ME, STEP)
    assert all(torch.equal(restored.state[name], tensor) for name, tensor in expected.items())
    assert len(restored.bad) == len(SHARDS) > 20
    assert restored.bytes_by_tier["s3"] == AFTER.layout.num_bytes
    assert clients == {"s3": 1}
    assert storage.calls["lease"] == 1
    assert storage.calls["data"] > 2, "and the first two were under way together"
    assert not [item.name for item in storage.list() if item.name.endswith(".lease")]
    storage.close()


@pytest.fixture
def durable(committed: str) -> Iterator[DurableReads]:
    storage = open_storage(committed)
    with DurableReads(storage) as reads:
        yield reads
    storage.close()


def test_a_reader_that_stops_early_disturbs_no_other(durable: DurableReads, committed: str) -> None:
    stopped, whole = (durable(committed, STEP, sorted(SHARDS)) for _ in range(2))
    next(iter(stopped))
    stopped.close()  # type: ignore[attr-defined]
    for shard, tensor in whole:
        assert torch.equal(tensor, unit(TENSORS[shard.tensor], shard, STEP))


def test_a_step_that_is_not_there_says_so_and_others_still_come(
    durable: DurableReads, committed: str
) -> None:
    with pytest.raises(CheckpointMissing):
        list(durable(committed, STEP + 1, sorted(SHARDS)))
    assert {shard for shard, _ in durable(committed, STEP, sorted(SHARDS))} == SHARDS


def test_shards_are_read_into_the_callers_memory(durable: DurableReads, committed: str) -> None:
    """Coalesced or alone, and the others beside them in memory of their own, although buffers are
    used again.
    """
    shards = sorted(SHARDS)
    memory = {
        shard: memoryview(bytearray(AFTER.layout.shard_bytes(shard))) for shard in shards[::2]
    }
    found = dict(durable(committed, STEP, shards, memory))
    expected = shard_views(AFTER.layout.tensors, SHARDS, state_of(AFTER.layout, ME, STEP))
    assert all(torch.equal(found[shard], expected[shard]) for shard in shards)
    for shard, view in memory.items():
        assert (
            bytes(view) == expected[shard].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )


class Slow:
    """A storage in which some calls stand until `go_on`."""

    def __init__(self, inner: Storage, stands: Callable[[str, str], bool]) -> None:
        self._inner, self._stands = inner, stands
        self.standing, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def until(self, cancelled: threading.Event) -> Slow:
        return self

    def patient(self, *_: Any, **__: Any) -> Slow:
        return self

    def _stand(self, method: str, name: str) -> None:
        if self._stands(method, name):
            self.standing.set()
            assert self.go_on.wait(20)

    def put(self, name: str, *data: Any, **given: Any) -> None:
        self._stand("put", name)
        self._inner.put(name, *data, **given)

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._stand("get_into", name)
        self._inner.get_into(name, start, buffer)


def test_a_reader_that_is_left_behind_ends_when_the_reads_are_closed(committed: str) -> None:
    """Its further requests are called off by the pool's end, not by itself."""
    options = replace(SMALL, concurrency=1, part_bytes=64)
    slow = Slow(open_storage(committed, options), lambda method, _: method == "get_into")
    reads = DurableReads(slow)  # type: ignore[arg-type]
    reader = threading.Thread(
        target=lambda: suppress_all(list, reads(committed, STEP, sorted(SHARDS))), daemon=True
    )
    reader.start()
    assert slow.standing.wait(20)
    threading.Thread(target=lambda: reads.ended.wait(20) and slow.go_on.set(), daemon=True).start()
    reads.close()
    reader.join(10)
    assert not reader.is_alive()


def test_a_lease_that_comes_after_the_close_is_ended(committed: str) -> None:
    slow = Slow(open_storage(committed), lambda method, name: name.endswith(".lease"))
    reads = DurableReads(slow)  # type: ignore[arg-type]
    before = set(threading.enumerate())
    reader = threading.Thread(
        target=lambda: suppress_all(list, reads(committed, STEP, sorted(SHARDS))), daemon=True
    )
    reader.start()
    assert slow.standing.wait(20)
    reads.close()
    slow.go_on.set()
    reader.join(20)
    until = time.monotonic() + 20
    while set(threading.enumerate()) - before:
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.01)
    assert not [info.name for info in slow.list() if info.name.endswith(".lease")]


def suppress_all(call: Callable[..., object], *arguments: Any) -> None:
    with suppress(Exception):
        call(*arguments)
