"""What workers and agents tell the driver over their own connections: in order, once, from nobody
else, and nobody is waited for.
"""

from __future__ import annotations

import errno
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayError

from autohet.driver.ray.agents.agent_calls import AgentReport
from autohet.driver.ray.observer import BEATS, all_train
from autohet.driver.ray.reports import report_server
from autohet.driver.ray.reports.newest_reports import LAST_WORDS_S, Reports
from autohet.driver.ray.reports.report_server import ReportServer
from autohet.driver.ray.reports.silence import LONGEST_TICK_S
from autohet.driver.ray.reports.wake_up import WakeUp
from autohet.driver.ray.worker_losses import WorkerLosses
from autohet.driver.sources.protocol import Sign
from autohet.runtime.job.elastic import ElasticSection
from autohet.runtime.messages import AgentEndpoint, Phase, StateTransfer, WorkerReport
from autohet.runtime.process import report_channel
from autohet.runtime.process.report_channel import (
    AGE,
    BEAT,
    FRAME,
    NONCE_BYTES,
    NUMBER,
    ReportAddress,
    ReportSender,
    frame_mac,
)
from tests.harness.waits import wait_until

HOST = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[ReportServer]:
    running = ReportServer(HOST, 0.05)
    yield running
    running.close()


@contextmanager
def telling(address: ReportAddress, values: list[Any]) -> Iterator[ReportSender]:
    """A process that reports the last of `values`."""
    sender = ReportSender(address, lambda: values[-1], lambda old, new: old != new)
    try:
        yield sender
    finally:
        sender.close()


def gather(
    server: ReportServer, enough: Callable[[list[Any]], bool], timeout_s: float = 20.0
) -> list[Any]:
    """The news until there are enough."""
    found: list[Any] = []
    deadline = time.monotonic() + timeout_s
    while not enough(found):
        assert time.monotonic() < deadline, f"only {found} after {timeout_s} s"
        found += [each.value for each in server.take()[1]]
        time.sleep(0.005)
    return found


class Client:
    """Speaks the protocol by hand."""

    def __init__(self, address: ReportAddress, server: ReportServer) -> None:
        self.address, self.place = address, 0
        self.socket = socket.create_connection((address.host, address.port), 10)
        deadline = time.monotonic() + 10
        while not select.select([self.socket], [], [], 0.01)[0]:
            assert time.monotonic() < deadline
            server.take()  # which takes the connection
        self.socket.settimeout(10)
        self.nonce = self.socket.recv(NONCE_BYTES, socket.MSG_WAITALL)

    def frame(self, number: int, payload: bytes, key: bytes | None = None) -> bytes:
        mac = frame_mac(key or self.address.key, self.nonce, self.place, number, payload)
        self.place += 1
        return FRAME.pack(len(payload), number, mac) + payload

    def news(self, number: int, value: Any, age_s: float = 0.0) -> bytes:
        return self.frame(number, AGE.pack(age_s) + pickle.dumps(value))

    def greet(self) -> Client:
        self.socket.sendall(self.frame(0, self.address.name.encode()))
        return self

    def ended(self, server: ReportServer) -> bool:
        """Whether the driver has ended this connection within a while."""
        self.socket.settimeout(0.05)
        for _ in range(100):
            server.take()
            with suppress(TimeoutError):
                try:
                    return self.socket.recv(1) == b""
                except ConnectionResetError:
                    return True
        return False


def test_news_come_in_order_and_once(server: ReportServer) -> None:
    values: list[Any] = [0]
    with telling(server.expect("a"), values):
        got = []
        for number in range(1, 30):
            got += gather(server, lambda found: found[-1:] == [values[-1]])
            values.append(number)
    assert got == values[:-1]


def test_who_has_no_news_is_heard_all_the_same(server: ReportServer) -> None:
    with telling(address := server.expect("a"), ["the only one"]):
        gather(server, lambda found: bool(found))
        for _ in range(2):
            heard: set[str] = set()
            deadline = time.monotonic() + 20
            while not heard:
                assert time.monotonic() < deadline
                heard, news = server.take()
                assert not news
                time.sleep(0.01)
            assert heard == {address.name}


def test_what_a_broken_connection_has_swallowed_comes_over_the_next(server: ReportServer) -> None:
    values: list[Any] = [0]
    with telling(address := server.expect("a"), values):
        gather(server, lambda found: found == [0])
        for number in range(1, 4):
            values.append(number)
            time.sleep(0.1)  # it may lie in the driver's buffers by now, or not: both end well
            server.disconnect(address.name)
            assert gather(server, lambda found: bool(found)) == [number]


def test_what_comes_twice_counts_once_and_is_answered_each_time(server: ReportServer) -> None:
    """The answer to the first was lost with its connection."""
    address, news = server.expect("a"), []
    for _ in range(2):
        client = Client(address, server).greet()
        client.socket.sendall(client.news(1, "one") + client.news(2, "two"))
        client.socket.settimeout(0.02)
        answer = b""
        deadline = time.monotonic() + 20
        while len(answer) < NUMBER.size:
            assert time.monotonic() < deadline
            news += [each.value for each in server.take()[1]]
            server.acknowledge()
            with suppress(TimeoutError):
                answer += client.socket.recv(NUMBER.size)
        assert NUMBER.unpack(answer) == (2,)
        client.socket.close()
    assert news == ["one", "two"]


def test_the_next_driver_is_told_what_the_one_before_has_not_recorded(server: ReportServer) -> None:
    """It knows nothing: what is no news to others is to it. While no driver is there, what waits
    for one is bounded.
    """
    values: list[Any] = ["recorded"]
    with telling(server.expect("a"), values) as sender:
        gather(server, lambda found: found == ["recorded"])
        server.acknowledge()
        wait_until(lambda: not sender._unanswered, "the acknowledgement")
        values.append("received alone")
        gather(server, lambda found: found == ["received alone"])
        server.close()
        wait_until(lambda: sender.away_s > 0, "the end of the first driver")
        values.append("of the gap")
        wait_until(lambda: len(sender._unsent) + len(sender._unanswered) == 2, "news of the gap")
        second = ReportServer(HOST, 0.05)
        sender.redirect(second.expect("a"))
        found = gather(second, lambda found: len(found) == 3)
        assert found == ["received alone", "of the gap", "of the gap"]
        assert sender.away_s == 0
        second.acknowledge()
        wait_until(lambda: sender._kept_bytes == 0, "the acknowledgement")
        second.close()


def test_a_driver_that_redirects_is_there_before_its_connection_is(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the job is stopped then, a process would end for the gap before it."""
    address = server.expect("a")
    with telling(address, [0]) as sender:
        gather(server, lambda found: found == [0])
        server.close()
        wait_until(lambda: sender.away_s > 0, "the end of the driver")
        monkeypatch.setattr(sender, "_there_at", time.monotonic() - 3600.0)
        assert sender.away_s > 3500.0
        sender.redirect(address)
        assert sender.away_s < 3500.0


def test_news_that_waits_for_a_driver_is_bounded(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_channel, "MOST_KEPT_BYTES", 2000)
    monkeypatch.setattr(report_channel, "RETRY_S", 3600.0)
    values: list[Any] = [0]
    with telling(server.expect("a"), values) as sender:
        gather(server, lambda found: found == [0])
        server.close()
        wait_until(lambda: sender.away_s > 0, "the end of the driver")
        for number in range(1, 9):
            values.append(bytes(500) + bytes([number]))
            wait_until(lambda: sender._last is values[-1], "a look")
        kept = [pickle.loads(value)[-1] for _, _, value in sender._unsent]
        assert kept == [6, 7, 8]
        assert sender._kept_bytes < 2000


class Trap:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize(
    "case", ["wrong key", "unknown name", "replay", "too long", "out of place"]
)
def test_nothing_of_a_stranger_is_unpickled(
    case: str, server: ReportServer, tmp_path: Path
) -> None:
    address = server.expect("a")
    trap = AGE.pack(0.0) + pickle.dumps(Trap(str(tmp_path / "sprung")))
    client = Client(address, server)
    if case == "wrong key":
        said = client.greet().frame(1, trap, key=b"other")
    elif case == "unknown name":
        client.socket.sendall(client.frame(0, b"b"))
        said = client.frame(1, trap)
    elif case == "replay":
        old = Client(address, server)
        said = old.frame(0, address.name.encode()) + old.frame(1, trap)
    elif case == "too long":
        said = FRAME.pack(report_server.MOST_GREETING_BYTES + 1, 0, bytes(16))
    else:
        client.greet().frame(1, b"held back")
        said = client.frame(2, trap)
    client.socket.sendall(said)
    assert client.ended(server)
    assert not (tmp_path / "sprung").exists()
    with telling(address, ["still here"]):
        assert gather(server, lambda found: bool(found)) == ["still here"]


def test_news_wake_who_waits_and_signs_of_life_do_not(server: ReportServer) -> None:
    wake_up = WakeUp()
    wake_up.watch(server)
    client = Client(server.expect("a"), server)
    client.greet()
    wake_up.wait(20, 0.0)
    server.take()
    taken = server.connection(client.address.name)
    assert taken is not None
    for _ in range(BEATS):
        client.socket.sendall(BEAT)
    here, deadline = b"", time.monotonic() + 20
    while len(here) < BEATS * len(BEAT):
        assert time.monotonic() < deadline
        with suppress(BlockingIOError):
            here = taken.socket.recv(100, socket.MSG_PEEK)
    assert not wake_up.is_due()
    assert server.take() == ({client.address.name}, []), "they are heard whenever anybody looks"
    client.socket.sendall(client.news(1, ""))
    assert wake_up.is_due(20), "the shortest news there are"
    assert [each.value for each in server.take()[1]] == [""]
    client.socket.close()
    assert wake_up.is_due(20), "so does the end of a connection"
    wake_up.wait(1000, 1000)  # at once, since nothing is gathered then
    server.take()
    assert not server.speaks(client.address.name)
    assert not wake_up.is_due()
    wake_up.close()


def test_who_says_nothing_is_not_heard(server: ReportServer) -> None:
    """Nor while a part of a frame waits for the rest."""
    client = Client(server.expect("a"), server).greet()
    client.socket.sendall(client.news(1, "up") + client.news(2, "late")[:10])
    gather(server, lambda found: found == ["up"])
    assert server.take() == (set(), [])
    client.socket.sendall(BEAT[:1])
    heard: set[str] = set()
    deadline = time.monotonic() + 20
    while not heard:
        assert time.monotonic() < deadline
        heard, _ = server.take()
    assert heard == {client.address.name}
    assert server.take() == (set(), [])


def test_who_waits_is_woken_by_another_thread_and_not_after_the_end(server: ReportServer) -> None:
    wake_up = WakeUp()
    wake_up.watch(server)
    threading.Timer(0.05, wake_up.wake).start()
    wake_up.wait(1000, 1000)
    assert not wake_up.is_due(), "once"
    wake_up.close()
    wake_up.wake()
    wake_up.close()


def test_news_that_come_along_are_gathered_and_a_ring_ends_that(server: ReportServer) -> None:
    wake_up = WakeUp()
    wake_up.watch(server)
    client = Client(server.expect("a"), server).greet()
    wake_up.is_due(20)
    threading.Timer(0.05, wake_up.wake).start()
    wake_up.wait(1000, 1000)
    assert server.take()[0] == {client.address.name}
    wake_up.close()


def test_large_news_come_whole(server: ReportServer) -> None:
    """Larger than all buffers between the two."""
    large = bytes(range(256)) * (1 << 17)
    with telling(server.expect("a"), [large]):
        assert gather(server, lambda found: bool(found)) == [large]


def test_half_a_frame_holds_nobody_up(server: ReportServer) -> None:
    slow = Client(server.expect("a"), server).greet()
    frame = slow.news(1, "late")
    slow.socket.sendall(BEAT + BEAT + frame[:-3])
    with telling(server.expect("b"), ["quick"]):
        assert gather(server, lambda found: bool(found)) == ["quick"]
    slow.socket.sendall(frame[-3:] + BEAT)
    assert gather(server, lambda found: bool(found)) == ["late"]


def test_strangers_that_say_nothing_are_bounded(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_server, "MOST_STRANGERS", 2)
    clients = [Client(server.expect(str(index)), server) for index in range(3)]
    assert clients[0].ended(server)
    assert gather(server, lambda found: True) == []
    for index, client in enumerate(clients[1:]):
        client.greet().socket.sendall(client.news(1, index))
    assert sorted(gather(server, lambda found: len(found) == 2)) == [0, 1]


def test_who_is_forgotten_is_not_heard_any_more(server: ReportServer) -> None:
    values: list[Any] = [0]
    with telling(address := server.expect("a"), values):
        gather(server, lambda found: bool(found))
        server.forget(address.name)
        values.append(1)
        with telling(server.expect("a"), ["the next"]):
            assert gather(server, lambda found: bool(found)) == ["the next"]


def test_a_process_that_cannot_report_says_why(server: ReportServer) -> None:
    def fail() -> Any:
        raise RuntimeError("no report")

    sender = ReportSender(server.expect("a"), fail, lambda old, new: True)
    with pytest.raises(RuntimeError, match="no report"):
        sender.wait()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Call:
    """A call to an actor that is watched, as `ObjectRef.future` shows it."""

    def __init__(self, error: Exception | None = None) -> None:
        self._future: Future[Any] = Future()
        if error is not None:
            self._future.set_exception(error)

    def future(self) -> Future[Any]:
        return self._future


def died() -> Any:
    return Call(RayError("the actor died"))


@contextmanager
def reports(clock: Clock) -> Iterator[Reports]:
    wake_up = WakeUp()
    running = Reports(HOST, clock, 0.05, wake_up)
    try:
        yield running
    finally:
        running.close()
        wake_up.close()


def is_woken(running: Reports) -> bool:
    """Whether whoever waits is woken."""
    return running.wake_up.is_due()


def listen(running: Reports, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        running.listen()
        time.sleep(0.01)


def test_last_words_are_heard_with_the_end() -> None:
    """A vote that only the dead has seen lets the others commit its step."""
    with reports(Clock()) as running:
        address = running.expect("a/0")
        client = Client(address, running.server).greet()
        client.socket.sendall(client.news(1, "last words"))
        client.socket.close()
        running.watch("a/0", died)
        time.sleep(0.1)
        assert is_woken(running)
        running.listen()
        assert running.answers["a/0"].value == "last words"
        assert running.answers["a/0"].error == "RayError: the actor died"


def test_words_that_come_after_rays_notice_are_heard_before_the_end_counts() -> None:
    """The notice takes another way than the words do, and may be faster."""
    with reports(Clock()) as running:
        client = Client(running.expect("a/0"), running.server).greet()
        client.socket.sendall(client.news(1, "up"))
        assert running.wake_up.is_due(20), "who waits is woken"
        listen(running, lambda: running.answers["a/0"].value == "up")
        running.watch("a/0", died)
        running.listen()
        assert running.answers["a/0"].error is None, "its connection stands: more may come"
        client.socket.sendall(client.news(2, "last words"))
        client.socket.close()
        listen(running, lambda: running.answers["a/0"].error is not None)
        assert running.answers["a/0"].value == "last words"


def test_words_said_between_a_look_and_rays_notice_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come, and the end with them, when this round has read already."""
    with reports(Clock()) as running:
        client = Client(running.expect("a/0"), running.server).greet()
        listen(running, lambda: running.server.speaks(client.address.name))
        take = running.server.take

        def take_and_lose() -> Any:
            taken = take()
            monkeypatch.setattr(running.server, "take", take)
            client.socket.sendall(client.news(1, "last words"))
            client.socket.close()
            time.sleep(0.1)
            running.watch("a/0", died)
            return taken

        monkeypatch.setattr(running.server, "take", take_and_lose)
        listen(running, lambda: running.answers["a/0"].error is not None)
        assert running.answers["a/0"].value == "last words"


def test_an_end_whose_connection_the_network_keeps_counts_all_the_same() -> None:
    clock = Clock()
    with reports(clock) as running, telling(running.expect("a/0"), ["up"]):
        listen(running, lambda: running.answers["a/0"].value == "up")
        running.watch("a/0", died)
        running.listen()
        assert running.answers["a/0"].error is None
        assert running.await_words
        clock.now += LAST_WORDS_S
        running.listen()
        assert running.answers["a/0"].error == "RayError: the actor died"


def test_one_that_ray_cannot_reach_for_a_while_is_watched_on_and_not_dead() -> None:
    calls = [
        ActorUnavailableError("a broken connection", None),
        ActorUnavailableError("again", None),
        None,
    ]
    made: list[Call] = []

    def call() -> Any:
        made.append(Call(calls[len(made)]))
        return made[-1]

    with reports(Clock()) as running:
        running.expect("a/0")
        running.watch("a/0", call)
        for tries in (2, 3, 3, 3):
            running.listen()
            assert len(made) == tries, "once in a round"
        assert running.answers["a/0"].error is None
        assert not is_woken(running), "nobody is woken over and over"
        made[-1].future().set_exception(RayError("the actor died"))
        assert is_woken(running)
        running.listen()
        assert running.answers["a/0"].error == "RayError: the actor died"


def test_one_that_is_watched_again_in_vain_is_not_forgotten() -> None:
    """Ray's client itself may fail: then the tick fails, and the next one tries again."""
    answers: list[Any] = [
        Call(ActorUnavailableError("gone for a while", None)),
        RuntimeError("no GCS"),
        died(),
    ]

    def call() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with reports(Clock()) as running:
        running.expect("a/0")
        running.watch("a/0", call)
        with pytest.raises(RuntimeError, match="no GCS"):
            running.listen()
        running.listen()
        assert running.answers["a/0"].error == "RayError: the actor died"


def test_what_has_lain_at_its_sender_counts_from_when_it_was_said() -> None:
    """A notice's remaining time is counted from that moment."""
    with reports(Clock()) as running:
        client = Client(running.expect("a"), running.server).greet()
        client.socket.sendall(client.news(1, "leaves in 120 s", age_s=30.0))
        listen(running, lambda: running.answers["a"].value is not None)
        assert running.answers["a"].told_at == Clock.now - 30.0


def test_news_grow_old_while_there_is_no_connection(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tried = Clock(), threading.Event()
    monkeypatch.setattr(report_channel, "time", SimpleNamespace(monotonic=clock))

    def refuse(*_: Any) -> None:
        tried.set()
        raise ConnectionRefusedError

    monkeypatch.setattr(report_channel, "socket", SimpleNamespace(create_connection=refuse))
    with telling(address := server.expect("a"), ["said"]):
        assert tried.wait(20)
        clock.now += 60.0
        monkeypatch.setattr(report_channel, "socket", socket)
        assert first_news(server) == (address.name, "said", 60.0)


def first_news(server: ReportServer) -> report_server.News:
    deadline = time.monotonic() + 20
    while not (news := server.take()[1]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return news[0]


def test_a_driver_without_descriptors_says_so_once_and_waits(
    server: ReportServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [0]
    real = server.listener

    class Exhausted:
        def accept(self) -> Any:
            attempts[0] += 1
            raise OSError(errno.EMFILE, "Too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    server.listener = Exhausted()  # type: ignore[assignment]
    clock = Clock()
    monkeypatch.setattr(report_server, "time", SimpleNamespace(monotonic=clock))
    with telling(server.expect("a"), ["here"]):
        deadline = time.monotonic() + 20
        while not attempts[0]:
            assert time.monotonic() < deadline
            server.take()
        for _ in range(5):
            server.take()
            assert not select.select([server], [], [], 0)[0], "who waits for news is not woken"
        assert attempts[0] == 1, "it waits"
        clock.now += report_server.SHORT_S
        monkeypatch.setattr(report_server, "SHORT_S", 0.0)
        for _ in range(6):
            server.take()
        assert attempts[0] == 4
        assert caplog.text.count("No more connections") == 1
        server.listener = real
        assert gather(server, lambda found: bool(found)) == ["here"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_reports_come_over_ipv4_and_ipv6(host: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    running = ReportServer(host, 0.05)
    try:
        with telling(running.expect("a"), ["here"]):
            assert gather(running, lambda found: bool(found)) == ["here"]
    finally:
        running.close()


def test_it_listens_on_the_given_address_alone() -> None:
    running = ReportServer("127.0.0.2", 0.05)
    try:
        port = running.expect("a").port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1.0)
        socket.create_connection(("127.0.0.2", port), 5.0).close()
    finally:
        running.close()


def test_strangers_cannot_fill_the_log(
    server: ReportServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each forged frame ends its connection; the log has one line for all of them."""
    port = server.expect("a").port
    for _ in range(30):
        with socket.create_connection((HOST, port), 5.0) as stranger:
            stranger.sendall(bytes([255]) * FRAME.size)
            time.sleep(0.002)
            server.take()
    server.take()
    assert caplog.text.count("A connection for reports is ended") == 1


def test_a_connection_alone_is_no_report() -> None:
    """Whoever is heard of has a value; a worker that cannot make its first report is late in the
    end.
    """
    with reports(Clock()) as running:
        client = Client(running.expect("a/0"), running.server).greet()
        client.socket.sendall(BEAT)
        listen(running, lambda: running.server.speaks(client.address.name))
        running.listen()
        assert running.answers["a/0"].heard_at is None
        client.socket.sendall(client.news(1, "up"))
        listen(running, lambda: running.answers["a/0"].value == "up")
        assert running.answers["a/0"].heard_at is not None


def test_a_driver_that_stood_still_blames_nobody() -> None:
    clock = Clock()
    with reports(clock) as running, telling(running.expect("a/0"), ["here"]):
        running.expect("b/0")
        listen(running, lambda: running.answers["a/0"].heard_at is not None)
    with reports(clock) as running:
        running.expect("b/0")
        running.listen()
        clock.now += 3600.0
        running.listen()
        answer = running.answers["b/0"]
        assert clock.now - answer.asked_at <= LONGEST_TICK_S


def test_a_driver_that_listens_measures_silence_as_it_is() -> None:
    clock = Clock()
    with reports(clock) as running:
        running.expect("b/0")
        for _ in range(100):
            running.listen()
            clock.now += 0.25
        assert clock.now - running.answers["b/0"].asked_at == 25.0


REPORT = WorkerReport("a/0", 1, 1, Phase.TRAINING, 5, 1)
UPLOAD = StateTransfer("s3", "a/0", 1, 5, 700, 2.0)


@pytest.mark.parametrize(
    ("after", "news"),
    [
        (REPORT, False),
        (replace(REPORT, prepared_step=6), False),
        (replace(REPORT, phase=Phase.HALTED, prepared_step=6), True),
        (replace(REPORT, vote=(5, None)), True),
        (replace(REPORT, receipts=("one",)), True),
        (replace(REPORT, transfers=(UPLOAD,)), True),
        (replace(REPORT, replicated_step=5), True),
    ],
)
def test_what_of_a_worker_is_news(after: WorkerReport, news: bool) -> None:
    assert after.is_news_after(REPORT) is news
    assert not replace(REPORT, prepared_step=None).is_news_after(
        replace(REPORT, receipts=("told",), transfers=(UPLOAD,))
    )
    assert replace(REPORT, receipts=("told",), transfers=(UPLOAD,)).without_news() == REPORT
    assert REPORT.is_news_after(None)


def test_a_deadline_that_comes_nearer_is_no_news() -> None:
    def at(in_s: float | None, text: str = "terminate") -> AgentReport:
        return AgentReport(
            "a", AgentEndpoint("a", HOST, 1, ""), signs=(Sign("EC2", text, in_s=in_s),)
        )

    first = at(120.0)
    assert not at(117.2).is_news_after(first, 3.0)
    assert at(60.0).is_news_after(first, 3.0), "an earlier one"
    assert at(None).is_news_after(first, 3.0)
    assert at(117.0, "stop").is_news_after(first, 3.0)
    assert replace(first, signs=()).is_news_after(first, 0.0)
    assert replace(first, problems=("a full disk",)).is_news_after(first, 0.0)


class Unloadable:
    """What is pickled here and cannot be read again, as if another version had sent it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_news_that_cannot_be_read_cost_nobody_elses_and_are_said() -> None:
    with (
        reports(Clock()) as running,
        telling(running.expect("a"), [1]),
        telling(running.expect("b"), [Unloadable()]),
    ):
        answers = running.answers
        listen(running, lambda: answers["a"].value is not None and answers["b"].error is not None)
        assert "cannot be read" in str(answers["b"].error)


def test_news_that_the_driver_would_not_take_end_their_sender(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_channel, "MOST_NEWS_BYTES", 100)
    sender = ReportSender(server.expect("a"), lambda: bytes(200), lambda old, new: old != new)
    with pytest.raises(ValueError, match="longer than the driver takes"):
        sender.wait()


def test_a_part_of_long_news_is_a_sign_of_life(server: ReportServer) -> None:
    client = Client(server.expect("a"), server).greet()
    whole = client.news(1, bytes(5000))
    time.sleep(0.05)
    server.take()
    client.socket.sendall(whole[:100])
    time.sleep(0.05)
    assert server.take() == ({client.address.name}, [])


def test_a_driver_that_cannot_be_reached_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_channel, "PATIENCE_S", 0.05)
    monkeypatch.setattr(report_channel, "RETRY_S", 0.05)
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    sender = ReportSender(
        ReportAddress(HOST, port, "a", bytes(32), 0.05), lambda: 1, lambda old, new: old != new
    )
    deadline = time.monotonic() + 20
    while "takes no reports" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    sender.close()
    assert caplog.text.count("takes no reports") == 1


def test_workers_that_the_plan_does_not_use_leave_the_driver_calm() -> None:
    """Wrong: one idle worker of a thousand makes the driver look twenty times a second."""
    idle = {Phase.IDLE, Phase.RELEASED}
    assert all_train({Phase.TRAINING})
    assert all_train({Phase.TRAINING, *idle})
    assert not all_train({*idle})
    assert not all_train({Phase.TRAINING, None})
    for phase in set(Phase) - {Phase.TRAINING, *idle}:
        assert not all_train({Phase.TRAINING, phase})


@pytest.mark.parametrize(
    ("error", "later_s", "is_lost"),
    [("PeerLost: world", 0.1, True), ("PeerLost: world", 2.0, False), ("Interrupted", 0.1, False)],
)
def test_a_connection_that_ends_as_others_lose_a_peer_is_a_death(
    error: str, later_s: float, is_lost: bool
) -> None:
    """Wrong: all wait for Ray to name the dead; or whoever loses its connection is dead."""
    clock = Clock()
    with reports(clock) as running:
        losses = WorkerLosses(ElasticSection().timeouts(), SimpleNamespace(), running)  # type: ignore[arg-type]
        losses.freezes.frozen = lambda *_: {}  # type: ignore[method-assign]
        report = WorkerReport("a/0", 1, 1, Phase.TRAINING, 0, 1)
        clients = {}
        for worker in ("a/0", "b/0"):
            clients[worker] = Client(running.expect(worker), running.server).greet()
        for worker, client in clients.items():
            client.socket.sendall(client.news(1, replace(report, worker=worker)))
        listen(running, lambda: all(each.value for each in running.answers.values()))
        clients["a/0"].socket.close()
        listen(running, lambda: running.answers["a/0"].broke_off_at is not None)
        losses.find({}, clock.now)
        assert not losses.by_worker, "the network may have ended it"
        clock.now += later_s
        running.listen()
        halted = replace(report, worker="b/0", phase=Phase.HALTED, error=error)
        clients["b/0"].socket.sendall(clients["b/0"].news(2, halted))
        listen(running, lambda: running.answers["b/0"].value.error == error)
        losses.find({}, clock.now)
        assert set(losses.by_worker) == ({"a/0"} if is_lost else set())
        clients["a/0"] = Client(clients["a/0"].address, running.server).greet()
        listen(running, lambda: running.answers["a/0"].broke_off_at is None)
