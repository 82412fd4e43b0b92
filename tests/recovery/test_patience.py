"""A storage that throttles, fails or hangs up for minutes is waited out by readers and writers of
checkpoints, within a bound, and nobody waits after the caller has given up.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from recovery.checkpoint.commit import (
    CheckpointFacts,
    CheckpointPart,
    commit_checkpoint,
    open_checkpoint,
)
from recovery.checkpoint.durable_reads import DurableReads
from recovery.checkpoint.read import read_shards, verify
from recovery.checkpoint.upload import Uploader
from recovery.checkpoint.write import write_shards
from recovery.errors import Cancelled
from recovery.storage import s3_connection, s3_download
from recovery.storage.errors import (
    ObjectTruncated,
    StorageError,
    StorageFailing,
    StorageThrottled,
    StorageUnreachable,
)
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage, StorageOptions
from tests.harness.refusing_proxy import RESET, Refusal, RefusingProxy, Request, refusing_proxy
from tests.harness.s3_server import S3Server
from tests.harness.state_cases import placed, state_of, tensors_of, unit

STEP, ME = 6, "n0/0"
TENSORS = tensors_of(2)
LAYOUT = placed(TENSORS, 2, [[(2, [ME])]]).layout
SHARDS = LAYOUT.shards_by_worker[ME]
OPTIONS = StorageOptions(attempts=3, backoff_s=0.01, request_timeout_s=20, part_bytes=5 << 20)
OUTAGES = {
    "SlowDown": Refusal(503, "SlowDown", "Please reduce your request rate."),
    "500": Refusal(500, "InternalError", "We encountered an internal error. Please try again."),
    "reset": Refusal(0, RESET, ""),
}
OUTAGE_S = 180.0
SOON_S = 5.0


class Outage:
    """A rule that refuses every request while it `lasts`."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self.lasts: Callable[[Request], bool] = lambda _: False

    def __call__(self, request: Request) -> Refusal | None:
        return self.refusal if self.lasts(request) else None


@pytest.fixture(params=list(OUTAGES))
def outage(request: pytest.FixtureRequest) -> Outage:
    return Outage(OUTAGES[request.param])


@pytest.fixture
def slow_down() -> Outage:
    return Outage(OUTAGES["SlowDown"])


@contextmanager
def _before(s3: S3Server, monkeypatch: pytest.MonkeyPatch, rule: Outage) -> Iterator[RefusingProxy]:
    with refusing_proxy(s3.endpoint, rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


class Clock:
    """Clock of `s3_connection`; pauses move it on by their seconds."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.waited = 0.0
        self.pauses: list[float] = []
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return time.monotonic() + self.waited

    def pause(self, cancelled: threading.Event | None, seconds: float, what: str, *_: Any) -> None:
        if cancelled is not None and cancelled.is_set():
            raise Cancelled(what)
        with self._lock:
            self.waited += seconds
            self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(s3_connection, "time", made)
    monkeypatch.setattr(s3_connection, "pause", made.pause)
    return made


def _commit(uri: str) -> None:
    with closing(open_storage(uri)) as storage:
        receipt = write_shards(
            CheckpointPart(storage, STEP, ME), state_of(LAYOUT, ME, STEP), LAYOUT, SHARDS
        )
        commit_checkpoint(storage, STEP, LAYOUT, [receipt], CheckpointFacts({"step": STEP}, {}))


def test_restore_waits_out_minutes_and_says_so_once(
    s3: S3Server,
    s3_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    outage: Outage,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _commit(s3_uri)
    with (
        _before(s3, monkeypatch, outage),
        closing(open_storage(s3_uri, OPTIONS)) as storage,
        DurableReads(storage, patience_s=300.0) as durable,
    ):
        outage.lasts = lambda _: clock.waited < OUTAGE_S
        found = dict(durable(s3_uri, STEP, sorted(SHARDS)))
    assert all(
        torch.equal(found[shard], unit(TENSORS[shard.tensor], shard, STEP)) for shard in SHARDS
    )
    assert clock.waited >= OUTAGE_S
    assert max(clock.pauses) <= 30.0
    said = [record.getMessage() for record in caplog.records]
    assert sum("trying again for up to 300 s" in message for message in said) == 1
    assert sum("answers again" in message for message in said) == 1


def test_restore_waits_no_longer_than_its_deadline(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, outage: Outage, clock: Clock
) -> None:
    _commit(s3_uri)
    outage.lasts = lambda _: True
    with (
        _before(s3, monkeypatch, outage),
        closing(open_storage(s3_uri, OPTIONS)) as storage,
        DurableReads(storage, patience_s=60.0) as durable,
        pytest.raises((StorageThrottled, StorageFailing, StorageUnreachable)),
    ):
        list(durable(s3_uri, STEP, sorted(SHARDS)))
    assert clock.waited < 4 * 60.0  # lease and manifest: one request after the other


def test_impatient_request_ends_after_its_tries(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, slow_down: Outage, clock: Clock
) -> None:
    slow_down.lasts = lambda _: True
    with (
        _before(s3, monkeypatch, slow_down),
        closing(open_storage(s3_uri, OPTIONS)) as storage,
        pytest.raises(StorageThrottled),
    ):
        storage.put("a", b"1")
    assert clock.waited < 1.0


def test_object_that_is_cut_short_is_not_waited_for(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    with closing(open_storage(s3_uri, OPTIONS)) as storage:
        storage.put("a", b"123")
        monkeypatch.setattr(s3_download, "_fetch_into", lambda *_: 1)
        patient = storage.patient(300.0)
        with pytest.raises(ObjectTruncated):
            patient.get_into("a", 0, memoryview(bytearray(3)))
    assert clock.waited < 1.0


def test_restore_that_waits_is_cancelled_at_once(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, slow_down: Outage
) -> None:
    """Real time: the next try would come after 30 s."""
    _commit(s3_uri)
    slow_down.lasts = lambda _: True
    cancelled = threading.Event()
    options = StorageOptions(attempts=1, backoff_s=30.0)
    with _before(s3, monkeypatch, slow_down) as proxy, closing(open_storage(s3_uri, options)) as s:
        threading.Thread(target=_call_when, args=(cancelled.set, lambda: proxy.refused > 0)).start()
        with DurableReads(s, cancelled, 600.0) as durable, pytest.raises(Cancelled):
            list(durable(s3_uri, STEP, sorted(SHARDS)))
        assert proxy.refused == 1


READERS: dict[str, Callable[[Storage], object]] = {
    "verify": lambda storage: verify(storage, STEP),
    "read_shards": lambda storage: list(read_shards(storage, open_checkpoint(storage, STEP))),
}


@pytest.fixture
def heeds_control_c() -> Iterator[None]:
    """Processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_control_c")
@pytest.mark.parametrize("reader", list(READERS))
def test_control_c_ends_a_read_that_waits(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, slow_down: Outage, reader: str
) -> None:
    """Data alone is refused, so the main thread waits for threads that wait for the storage."""
    _commit(s3_uri)
    slow_down.lasts = lambda request: request.key.endswith(".distcp")
    options = StorageOptions(attempts=1, backoff_s=30.0)

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with _before(s3, monkeypatch, slow_down) as proxy, closing(open_storage(s3_uri, options)) as s:
        patient = s.patient(600.0)
        pressed = threading.Thread(target=_call_when, args=(press, lambda: proxy.refused > 0))
        pressed.start()
        with pytest.raises(KeyboardInterrupt):
            READERS[reader](patient)
        pressed.join()
        left = [thread.name for thread in threading.enumerate() if "shard-read" in thread.name]
    assert left == []


def _call_when(action: Callable[[], None], condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    action()


def test_upload_goes_on_where_it_was_while_half_of_its_requests_are_refused(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, slow_down: Outage
) -> None:
    """An upload in parts is opened once: a part that is refused thrice is tried again alone."""
    content = os.urandom(11 << 20)
    counts: dict[str, int] = {}

    def refused(request: Request) -> bool:
        """The first four tries of each part."""
        if "partNumber" not in request.query:
            return False
        counts[request.path] = counts.get(request.path, 0) + 1
        return counts[request.path] <= 4

    slow_down.lasts = refused
    with (
        _before(s3, monkeypatch, slow_down) as proxy,
        closing(open_storage(s3_uri, OPTIONS)) as storage,
    ):
        storage.patient(60.0).put("a", content)
        opened = [r for r in proxy.requests if r.method == "POST" and "uploads" in r.query]
        assert len(opened) == 1
        assert storage.get("a") == content


def test_upload_that_waits_is_said_and_given_up_for_a_later_one(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, slow_down: Outage
) -> None:
    said: list[tuple[int, str]] = []
    waits = threading.Event()

    def note(step: int, reason: str) -> None:
        said.append((step, reason))
        waits.set()

    state = state_of(LAYOUT, ME, STEP)
    options = StorageOptions(attempts=1, backoff_s=30.0)
    with (
        _before(s3, monkeypatch, slow_down),
        closing(open_storage(s3_uri, options)) as storage,
        Uploader(storage, patience_s=600.0, on_failure=note) as uploader,
    ):
        slow_down.lasts = lambda _: True
        uploader.submit(5, ME, state, LAYOUT, SHARDS)
        assert waits.wait(20)
        uploader.abandon()
        with pytest.raises(StorageError, match="throttled"):
            uploader.wait(20)
        slow_down.lasts = lambda _: False
        uploader.submit(6, ME, state, LAYOUT, SHARDS)
        assert uploader.wait(30).shards == SHARDS
    assert [step for step, _ in said] == [5]
    assert "throttled" in said[0][1]


def test_a_short_slow_down_passes_in_real_time(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, slow_down: Outage
) -> None:
    _commit(s3_uri)
    with (
        _before(s3, monkeypatch, slow_down) as proxy,
        closing(open_storage(s3_uri, OPTIONS)) as storage,
        DurableReads(storage, patience_s=120.0) as durable,
    ):
        slow_down.lasts = lambda _: proxy.refused < 2 * OPTIONS.attempts
        assert {shard for shard, _ in durable(s3_uri, STEP, sorted(SHARDS))} == SHARDS
        assert proxy.refused == 2 * OPTIONS.attempts
