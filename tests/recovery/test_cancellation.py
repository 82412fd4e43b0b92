"""Reads that are given up while a storage or a peer says nothing: they end at once, blame nobody
and leave nothing behind.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from recovery.cancellation import call_until
from recovery.checkpoint.commit import CheckpointFacts, CheckpointPart, commit_checkpoint
from recovery.checkpoint.durable_reads import DurableReads
from recovery.checkpoint.retention import reading_checkpoint
from recovery.checkpoint.write import write_shards
from recovery.errors import Cancelled
from recovery.local.agent_store import AgentStore
from recovery.peers.client import ShardClient
from recovery.state.holdings import Holding, Source
from recovery.state.layout import ShardId
from recovery.storage.open import open_storage
from recovery.storage.protocol import BandwidthLimit, Storage, StorageOptions
from recovery.transfer.restore import Access, RestoreProgress, RestoreTask, restore
from recovery.transfer.schedule import schedule
from tests.harness.misbehaving_proxy import MisbehavingProxy, proxy_before
from tests.harness.s3_server import S3Server
from tests.harness.state_cases import Member, PostOffice, placed, state_of, tensors_of

STEP, ME = 6, "n0/0"
SOON_S = 3.0  # a loaded machine; what is given up would take 20 to 60 s
CASE = placed(tensors_of(3), 3, [[(3, [ME])]])
SHARDS = CASE.layout.shards_by_worker[ME]


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[MisbehavingProxy]:
    """Before S3; who opens a storage goes through it."""
    with proxy_before(s3.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.fixture
def storage(proxy: MisbehavingProxy, s3_uri: str) -> Iterator[Storage]:
    """The whole state of STEP behind the proxy; patient: 60 s for a request, 30 s between two
    tries.
    """
    opened = open_storage(s3_uri, StorageOptions(backoff_s=30.0))
    receipt = write_shards(
        CheckpointPart(opened, STEP, ME), state_of(CASE.layout, ME, STEP), CASE.layout, SHARDS
    )
    commit_checkpoint(opened, STEP, CASE.layout, [receipt], CheckpointFacts({"step": STEP}, {}))
    yield opened
    opened.close()


@contextmanager
def cancelled_when(
    condition: Callable[[], bool],
) -> Iterator[tuple[threading.Event, Callable[[], float]]]:
    """An event that is set once the condition holds, and the seconds since then."""
    cancelled, at = threading.Event(), [float("inf")]

    def watch() -> None:
        until = time.monotonic() + 20
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        at[0] = time.monotonic()
        cancelled.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield cancelled, lambda: time.monotonic() - at[0]
    watcher.join()


def await_end(threads: set[threading.Thread], within_s: float = 5.0) -> None:
    until = time.monotonic() + within_s
    while left := [
        t.name for t in threading.enumerate() if t not in threads and "Thread-" not in t.name
    ]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["silent", "half", "unreachable"])
@pytest.mark.parametrize("begun", [False, True], ids=["from the manifest on", "of the data"])
def test_a_read_of_storage_that_says_nothing_is_cancelled(
    mode: str, begun: bool, proxy: MisbehavingProxy, storage: Storage
) -> None:
    """It hangs before its answer or in the middle of it, or waits half a minute for its next
    try.
    """
    proxy.mode = "good" if begun else mode
    threads = set(threading.enumerate())

    def read(cancelled: threading.Event) -> None:
        with DurableReads(storage, cancelled) as durable:
            if begun:
                durable.manifest(STEP)
                proxy.mode = mode
            list(durable(storage.uri, STEP, sorted(SHARDS)))

    with (
        cancelled_when(lambda: proxy.silent + proxy.refused > 0) as (cancelled, since),
        pytest.raises(Cancelled),
    ):
        read(cancelled)
    assert since() < SOON_S
    refused = proxy.refused
    proxy.mode = "good"
    await_end(threads)
    assert proxy.refused == refused, "no further try"


def test_the_end_waits_for_no_read_that_nobody_wants_any_more(
    proxy: MisbehavingProxy, storage: Storage
) -> None:
    """Another source has overtaken it: nobody cancels anything."""
    with ThreadPoolExecutor(1) as pool:
        with DurableReads(storage) as durable:
            durable.manifest(STEP)
            proxy.mode = "silent"
            reading = pool.submit(lambda: list(durable(storage.uri, STEP, sorted(SHARDS))))
            until = time.monotonic() + 20
            while not proxy.silent:
                assert time.monotonic() < until
                time.sleep(0.01)
            proxy.mode, began = "good", time.monotonic()
        assert time.monotonic() - began < SOON_S
        with pytest.raises(Cancelled):
            reading.result(SOON_S)


def test_a_lease_ends_although_its_reader_gave_up(storage: Storage) -> None:
    cancelled = threading.Event()

    def leases() -> list[str]:
        return [item.name for item in storage.list("step-") if item.name.endswith(".lease")]

    with reading_checkpoint(storage, STEP, cancelled=cancelled):
        assert len(leases()) == 1
        cancelled.set()
    until = time.monotonic() + 10
    while leases():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("mode", ["silent", "half"])
def test_a_restore_is_given_up_and_what_has_come_stays(
    mode: str, proxy: MisbehavingProxy, storage: Storage, tmp_path: Path
) -> None:
    plan = schedule(
        CASE.layout,
        CASE.node_by_worker,
        [Holding(Source("s3", "", storage.uri, STEP), SHARDS)],
        STEP,
    )
    first, *others = sorted(SHARDS)
    arrived: dict[ShardId, torch.Tensor] = {}

    def first_alone(
        uri: str, step: int, shards: object, into: object
    ) -> Iterator[tuple[ShardId, torch.Tensor]]:
        yield from durable(uri, step, [first])
        proxy.mode = mode
        yield from durable(uri, step, others)

    with (
        cancelled_when(lambda: proxy.silent > 0) as (cancelled, since),
        closing(AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")) as store,
        DurableReads(storage, cancelled) as durable,
    ):
        access = Access(store, {}, first_alone, 60.0, cancelled=cancelled)
        with pytest.raises(Cancelled):
            restore(
                RestoreTask(plan, ME, CASE.layout, None),
                Member(PostOffice(), ME),
                access,
                RestoreProgress(arrived=arrived),
            )
    assert since() < SOON_S
    proxy.mode = "good"
    assert set(arrived) == {first}


def test_a_silent_peer_is_cancelled() -> None:
    """One that accepts the connection and says nothing, and one that does not even accept."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        host, port = listener.getsockname()
        waiting = []
        for _ in range(8):  # until none is taken any more
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex((host, port))
        for case in range(2):
            cancelled = threading.Event()
            threading.Timer(0.2, cancelled.set).start()
            began = time.monotonic()
            with pytest.raises(Cancelled), ShardClient(host, port, "token", 30.0) as client:
                list(
                    client.read(
                        Source("memory", "n1", "n1/0", STEP),
                        sorted(SHARDS),
                        {},
                        cancelled=cancelled,
                    )
                )
            assert time.monotonic() - began < 0.2 + SOON_S, case
            for one in waiting:
                one.close()
            while case == 0 and _accepts(listener):
                pass


def _accepts(listener: socket.socket) -> bool:
    listener.settimeout(0.2)
    try:
        listener.accept()[0].close()
    except TimeoutError:
        return False
    return True


def test_a_directory_that_hangs_is_cancelled(tmp_path: Path) -> None:
    """A named pipe that nobody writes to blocks who opens it, as a file server that is gone
    does.
    """
    storage = open_storage(str(tmp_path))
    os.mkfifo(tmp_path / "object")
    threads = set(threading.enumerate())
    began = time.monotonic()
    cancelled = threading.Event()
    threading.Timer(0.2, cancelled.set).start()
    with pytest.raises(Cancelled):
        storage.until(cancelled).get_into("object", 0, memoryview(bytearray(8)))
    assert time.monotonic() - began < 0.2 + SOON_S
    with pytest.raises(Cancelled):
        storage.until(cancelled).get("object")
    with (tmp_path / "object").open("wb"):
        await_end(threads)


def test_a_turn_within_the_bandwidth_is_not_waited_for() -> None:
    limit, cancelled = BandwidthLimit(1.0), threading.Event()
    limit.take(60)
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(Cancelled):
        limit.take(1, cancelled)


def test_what_a_call_says_comes_through() -> None:
    cancelled = threading.Event()
    assert call_until(cancelled, lambda: 5, "five") == 5
    with pytest.raises(ZeroDivisionError):
        call_until(cancelled, lambda: 1 // 0, "nothing")
    cancelled.set()
    with ThreadPoolExecutor(1) as pool, pytest.raises(Cancelled, match="of what"):
        pool.submit(call_until, cancelled, pytest.fail, "of what").result(5)
