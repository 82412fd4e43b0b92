"""Shards over TCP: whole or refused, from peers that are slow, wrong, hostile or gone."""

import math
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from recovery.errors import (
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    ShardCorrupt,
    ShardUnavailable,
    SnapshotError,
)
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.peers import server as server_module
from recovery.peers.client import GREETINGS, PushOptions, ShardClient
from recovery.peers.protocol import (
    HELLO,
    NONCE_BYTES,
    OK,
    REPLY,
    VERSION,
    WELCOME,
    mac_of,
    receive,
)
from recovery.peers.server import ServerLimits, ShardServer
from recovery.state.checksum import checksum
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from tests.harness.scripted_peer import ScriptedPeer
from tests.harness.state_cases import placed, state_of, tensors_of, unit

CASE = placed(tensors_of(2), 2, [[(2, ["n0/0"])]])
SHARDS = sorted(CASE.layout.shards_by_worker["n0/0"])
HERE = Source("memory", "n0", "n0/0", 5, 1)
TOKEN = "correct horse"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentStore]:
    writer = SnapshotWriter(tmp_path / "memory", "n0/0", CASE.layout, 1)
    writer.start(5, state_of(CASE.layout, "n0/0", 5))
    writer.wait(20)
    writer.close(20)
    store = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")
    yield store
    store.close()


@pytest.fixture
def server(store: AgentStore) -> Iterator[ShardServer]:
    with ShardServer(store, TOKEN, host="127.0.0.1") as server:
        yield server


@pytest.fixture
def client(server: ShardServer) -> Iterator[ShardClient]:
    with ShardClient("127.0.0.1", server.port, TOKEN, 20) as client:
        yield client


def content(shard: ShardId, step: int = 5) -> bytes:
    return unit(CASE.layout.tensors[shard.tensor], shard, step).contiguous().numpy().tobytes()


def sums_of(step: int) -> dict[ShardId, int]:
    return {shard: checksum(memoryview(content(shard, step))) for shard in SHARDS}


SUMS = sums_of(5)


def test_many_requests_over_one_connection(client: ShardClient) -> None:
    for asked in (SHARDS, SHARDS[3:5], SHARDS[::-1]):
        got = [
            (shard, bytes(data))
            for shard, data in client.read(HERE, asked, SUMS)
            if isinstance(data, memoryview)
        ]
        assert got == [(shard, content(shard)) for shard in asked]
    assert not list(client.read(HERE, [], SUMS)), "nothing is asked, nothing is waited for"


def test_into_memory_of_the_caller(client: ShardClient) -> None:
    memory = bytearray(len(content(SHARDS[0])))
    list(client.read(HERE, SHARDS[:1], SUMS, {SHARDS[0]: memoryview(memory)}))
    assert bytes(memory) == content(SHARDS[0])
    with pytest.raises(PeerUnreachable, match=r"announces \d+ bytes"):
        list(client.read(HERE, SHARDS[:1], SUMS, {SHARDS[0]: memoryview(bytearray(3))}))


def test_what_is_not_there_does_not_stop_the_rest(client: ShardClient) -> None:
    other = ShardId("param/none", 0)
    replies = dict(client.read(HERE, [SHARDS[0], other, SHARDS[1]], SUMS))
    assert isinstance(replies[other], ShardUnavailable)
    assert bytes(replies[SHARDS[1]]) == content(SHARDS[1])  # type: ignore[arg-type]
    gone = Source("memory", "n0", "n0/0", 4, 1)
    assert all(isinstance(reply, ShardUnavailable) for _, reply in client.read(gone, SHARDS, SUMS))


def test_a_flipped_bit_is_found(client: ShardClient, store: AgentStore) -> None:
    file = store.file_of(HERE, SHARDS[1])
    with open(file.path, "r+b") as raw:
        raw.seek(file.map.extents[SHARDS[1]].offset)
        raw.write(b"\xff\xfe\xfd\xfc")
    replies = dict(client.read(HERE, SHARDS, SUMS))
    assert isinstance(replies.pop(SHARDS[1]), ShardCorrupt)
    assert all(bytes(data) == content(shard) for shard, data in replies.items())  # type: ignore[arg-type]


def test_a_holder_that_vouches_for_wrong_bytes_is_not_believed(
    client: ShardClient, store: AgentStore
) -> None:
    """Its bytes agree with what it recorded itself; the schedule, from the snapshot's birth, knows
    better.
    """
    file = store.file_of(HERE, SHARDS[1])
    extent = file.map.extents[SHARDS[1]]
    writer = SnapshotFileWriter(file.path, file.map)
    for shard, place in file.map.extents.items():
        writer.buffer[place.offset : place.offset + place.num_bytes] = content(shard)
    writer.buffer[extent.offset] ^= 1
    writer.commit(5, 1)
    writer.close()
    assert bytes(store.read(HERE, SHARDS[1])) != content(SHARDS[1]), "its own check finds nothing"
    replies = dict(client.read(HERE, SHARDS, SUMS))
    assert isinstance(replies.pop(SHARDS[1]), ShardCorrupt)
    assert all(isinstance(data, memoryview) for data in replies.values())


def test_what_no_checksum_is_known_of_is_not_taken(client: ShardClient) -> None:
    ((_, reply),) = client.read(HERE, SHARDS[:1], {})
    assert isinstance(reply, ShardUnavailable)


def test_a_read_left_half_way_does_not_spoil_the_next(client: ShardClient) -> None:
    reading = client.read(HERE, SHARDS, SUMS)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert [bytes(d) for _, d in client.read(HERE, SHARDS[4:6], SUMS)] == [
        content(s) for s in SHARDS[4:6]
    ]  # type: ignore[arg-type]


def test_a_stranger_is_refused(server: ShardServer, store: AgentStore) -> None:
    with ShardClient("127.0.0.1", server.port, "wrong", 20) as stranger:
        with pytest.raises(PeerRefused, match="rejected the token"):
            list(stranger.read(HERE, SHARDS, SUMS))
        with pytest.raises((PeerRefused, PeerUnreachable)):
            stranger.push(HERE, CASE.layout.tensors, {SHARDS[0]: memoryview(content(SHARDS[0]))})
    assert len(store.inventory()) == 1


def test_garbage_ends_only_its_own_connection(server: ShardServer, client: ShardClient) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x05\x00\x00\x00hello"):
        with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            connection.settimeout(20)
            connection.sendall(garbage)
            with suppress(OSError):  # the server may have hung up already
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
    assert len(list(client.read(HERE, SHARDS, SUMS))) == len(SHARDS)


def test_pushed_shards_are_kept_as_their_workers(client: ShardClient, store: AgentStore) -> None:
    replica = Source("worker", "n7", "n7/3", 6, 2)
    pieces = {shard: memoryview(content(shard, 6)) for shard in SHARDS[:4]}
    client.push(replica, CASE.layout.tensors, pieces)
    client.push(replica, CASE.layout.tensors, {SHARDS[5]: memoryview(content(SHARDS[5], 6))})
    here = Source("memory", "n0", "n7/3", 6, 2)
    holdings = [holding for holding in store.inventory() if holding.source == here]
    assert frozenset().union(*(holding.shards for holding in holdings)) == {*SHARDS[:4], SHARDS[5]}
    read = dict(client.read(here, [*SHARDS[:4], SHARDS[5]], sums_of(6)))
    assert all(bytes(data) == content(shard, 6) for shard, data in read.items())  # type: ignore[arg-type]


def test_a_push_damaged_on_the_way_leaves_nothing(
    client: ShardClient, store: AgentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.peers.client.checksum", lambda data: 1)
    with pytest.raises(ShardCorrupt):
        client.push(HERE, CASE.layout.tensors, {SHARDS[0]: memoryview(content(SHARDS[0], 6))})
    monkeypatch.undo()
    assert len(store.inventory()) == 1
    assert not list(tmp_path.rglob("*pushed*"))
    assert len(list(client.read(HERE, SHARDS, SUMS))) == len(SHARDS)


@contextmanager
def peer(behave: Callable[[socket.socket], None], token: str = TOKEN) -> Iterator[int]:
    """A server that greets and takes the request as it should, then does what the test wants."""
    with ScriptedPeer(lambda connection, _: behave(connection), token) as served:
        yield served.port


def test_a_silent_peer_times_out() -> None:
    done = threading.Event()
    with peer(lambda _: bool(done.wait(20)) and None) as port:  # type: ignore[func-returns-value]
        with (
            ShardClient("127.0.0.1", port, TOKEN, 0.1) as client,
            pytest.raises(PeerTimeout, match=r"within 0\.1 s"),
        ):
            list(client.read(HERE, SHARDS, SUMS))
        done.set()


def test_a_peer_that_trickles_times_out() -> None:
    """Each byte comes in time, the shard never would."""

    def trickle(connection: socket.socket) -> None:
        connection.sendall(REPLY.pack(OK, 1 << 20))
        try:
            while True:
                connection.sendall(b"x")
                time.sleep(0.01)
        except OSError:
            return

    with (
        peer(trickle) as port,
        ShardClient("127.0.0.1", port, TOKEN, 1.0) as client,
        pytest.raises(PeerTimeout),
    ):
        list(client.read(HERE, SHARDS[:1], SUMS))


def test_a_peer_that_hangs_up_in_a_shard() -> None:
    def short(connection: socket.socket) -> None:
        connection.sendall(REPLY.pack(OK, 1000) + b"x" * 400)

    with (
        peer(short) as port,
        ShardClient("127.0.0.1", port, TOKEN, 20) as client,
        pytest.raises(PeerUnreachable, match="hung up after 400 of 1000 bytes"),
    ):
        list(client.read(HERE, SHARDS[:1], SUMS))


def test_a_peer_that_lies_about_length_or_content() -> None:
    with (
        peer(lambda connection: connection.sendall(REPLY.pack(OK, 1 << 60))) as port,
        ShardClient("127.0.0.1", port, TOKEN, 20) as client,
        pytest.raises(PeerUnreachable, match="announces"),
    ):
        list(client.read(HERE, SHARDS[:1], SUMS))
    with (
        peer(lambda connection: connection.sendall(REPLY.pack(OK, 5) + b"bytes")) as port,
        ShardClient("127.0.0.1", port, TOKEN, 20) as client,
    ):
        ((_, reply),) = client.read(HERE, SHARDS[:1], SUMS)
        assert isinstance(reply, ShardCorrupt)


def test_a_server_without_the_token_is_no_agent() -> None:
    """Whoever listens on an agent's old address and says that all is well must not be given copies,
    nor be read from.
    """
    with (
        peer(lambda connection: connection.sendall(REPLY.pack(OK, 0)), token="guessed") as port,
        ShardClient("127.0.0.1", port, TOKEN, 20) as client,
        pytest.raises(PeerRefused, match="does not have the token"),
    ):
        list(client.read(HERE, SHARDS, SUMS))


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        ShardClient("127.0.0.1", port, TOKEN, 5) as client,
        pytest.raises(PeerUnreachable) as error,
    ):
        list(client.read(HERE, SHARDS, SUMS))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_close_hangs_up_on_peers_and_joins_every_thread(store: AgentStore) -> None:
    before = set(threading.enumerate())
    server = ShardServer(store, TOKEN, host="127.0.0.1")
    clients = [ShardClient("127.0.0.1", server.port, TOKEN, 20) for _ in range(5)]
    for client in clients:
        list(client.read(HERE, SHARDS[:1], SUMS))
    assert len(set(threading.enumerate()) - before) == 6
    server.close()
    assert set(threading.enumerate()) <= before
    for client in clients:
        with pytest.raises((PeerUnreachable, PeerTimeout)):
            list(client.read(HERE, SHARDS[:1], SUMS))


def greeted(port: int) -> socket.socket:
    """A connection that has shown the token."""
    connection = socket.create_connection(("127.0.0.1", port), 20)
    theirs = bytes(receive(connection, NONCE_BYTES))
    own = bytes(NONCE_BYTES)
    connection.sendall(HELLO.pack(VERSION, own, mac_of(TOKEN, "client", theirs, own)))
    assert receive(connection, WELCOME.size)[0] == OK
    return connection


def test_strangers_take_no_places_from_peers(
    store: AgentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections without the token than there are places, all the time, and a peer for whom
    there is one place: each of its reads, over a new connection, is answered.
    """
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 20)
    over, knocks = threading.Event(), []
    with ShardServer(store, TOKEN, host="127.0.0.1", limits=ServerLimits(connections=1)) as server:

        def knock() -> None:
            held: deque[socket.socket] = deque()
            while not over.is_set():
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", server.port), 5))
                    knocks.append(1)
                if len(held) > 30:
                    held.popleft().close()
                time.sleep(0.002)
            for connection in held:
                connection.close()

        threads = [threading.Thread(target=knock) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            while len(knocks) < 60:
                time.sleep(0.01)
            for _ in range(40):
                with ShardClient("127.0.0.1", server.port, TOKEN, 20) as client:
                    ((_, data),) = client.read(HERE, SHARDS[:1], SUMS)
                    assert bytes(data) == content(SHARDS[0])
            assert len(server.listener.strangers) <= 20
        finally:
            over.set()
            for thread in threads:
                thread.join(20)


def test_a_peer_that_hangs_up_before_the_greeting_is_asked_again(store: AgentStore) -> None:
    """As a peer does to the oldest of those that have not shown the token, where many are."""
    with (
        ShardServer(store, TOKEN, host="127.0.0.1") as server,
        socket.create_server(("127.0.0.1", 0)) as door,
    ):
        places = []

        def answer() -> None:
            for _ in range(3):
                place, _ = door.accept()
                if len(places) < 2:
                    place.close()
                    places.append(place)
                    continue
                behind = socket.create_connection(("127.0.0.1", server.port))
                places.extend((place, behind))
                for source, sink in ((place, behind), (behind, place)):
                    threading.Thread(target=_copy, args=(source, sink), daemon=True).start()

        threading.Thread(target=answer, daemon=True).start()
        try:
            with ShardClient("127.0.0.1", door.getsockname()[1], TOKEN, 20) as client:
                ((_, data),) = client.read(HERE, SHARDS[:1], SUMS)
            assert bytes(data) == content(SHARDS[0])
        finally:
            for place in places:
                place.close()


def test_a_peer_that_always_hangs_up_is_unreachable() -> None:
    accepted = 0
    with socket.create_server(("127.0.0.1", 0)) as door:

        def hang_up() -> None:
            nonlocal accepted
            with suppress(OSError):
                while True:
                    place, _ = door.accept()
                    accepted += 1
                    place.close()

        threading.Thread(target=hang_up, daemon=True).start()
        with (
            ShardClient("127.0.0.1", door.getsockname()[1], TOKEN, 20) as client,
            pytest.raises(PeerUnreachable),
        ):
            list(client.read(HERE, SHARDS[:1], SUMS))
        assert accepted == GREETINGS


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


def test_no_more_connections_than_allowed(store: AgentStore) -> None:
    """Where all of them have something to do: these have shown the token and ask nothing yet."""
    with ShardServer(store, TOKEN, host="127.0.0.1", limits=ServerLimits(connections=2)) as server:
        busy = [greeted(server.port) for _ in range(2)]
        with ShardClient("127.0.0.1", server.port, TOKEN, 20) as third:
            with pytest.raises(PeerUnreachable):
                list(third.read(HERE, SHARDS[:1], SUMS))
            busy.pop().close()
            until = time.monotonic() + 20
            while True:
                with suppress(PeerUnreachable):
                    list(third.read(HERE, SHARDS[:1], SUMS))
                    break
                assert time.monotonic() < until
        busy.pop().close()


def test_for_one_too_many_the_one_that_has_waited_longest_is_hung_up_on(
    store: AgentStore, greetings: list[str]
) -> None:
    """It costs its client a greeting at the next request, and no blame."""
    with ShardServer(store, TOKEN, host="127.0.0.1", limits=ServerLimits(connections=2)) as server:
        one, two, three = (ShardClient("127.0.0.1", server.port, TOKEN, 20) for _ in range(3))
        for client, greeted in (
            (one, 1),
            (two, 2),
            (one, 2),
            (three, 3),
            (one, 3),
            (two, 4),
            (one, 4),
            (three, 5),
        ):
            assert [bytes(data) for _, data in client.read(HERE, SHARDS[:1], SUMS)] == [
                content(SHARDS[0])
            ]
            assert len(greetings) == greeted
            wait_until_idle(server)
        for client in (one, two, three):
            client.close()


def test_a_request_under_way_is_not_ended_for_a_new_connection(store: AgentStore) -> None:
    """Although its connection has waited for a request before."""
    pieces, source = (
        {SHARDS[0]: memoryview(content(SHARDS[0]))},
        Source("memory", "n7", "n7/0", 5, 1),
    )
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def take(self, num_bytes: int, cancelled: threading.Event | None = None) -> None:
            begun.set()
            assert go_on.wait(20)

    with (
        ShardServer(store, TOKEN, host="127.0.0.1", limits=ServerLimits(connections=1)) as server,
        ShardClient("127.0.0.1", server.port, TOKEN, 20) as busy,
        ShardClient("127.0.0.1", server.port, TOKEN, 20) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        list(busy.read(HERE, SHARDS[:1], SUMS))
        wait_until_idle(server)
        options = PushOptions(limit=Slow())  # type: ignore[arg-type]
        pushed = pool.submit(busy.push, source, CASE.layout.tensors, pieces, options=options)
        try:
            assert begun.wait(20)
            with pytest.raises(PeerUnreachable):
                list(other.read(HERE, SHARDS[:1], SUMS))
        finally:
            go_on.set()
        pushed.result(20)


def wait_until_idle(server: ShardServer) -> None:
    """Until every connection waits for its next request, as far as its server knows."""
    until = time.monotonic() + 20
    while set(server.listener.idle) != set(server.listener.open):
        assert time.monotonic() < until
        time.sleep(0.005)


def test_copies_for_a_node_whose_address_another_has_are_refused(
    client: ShardClient, store: AgentStore
) -> None:
    pieces, source = (
        {SHARDS[0]: memoryview(content(SHARDS[0]))},
        Source("memory", "n7", "n7/0", 5, 1),
    )
    with pytest.raises(PeerRefused, match="another node"):
        client.push(source, CASE.layout.tensors, pieces, options=PushOptions(to="n1"))
    assert not [holding for holding in store.inventory() if holding.source.name == "n7/0"]
    client.push(source, CASE.layout.tensors, pieces, options=PushOptions(to="n0"))
    assert [holding for holding in store.inventory() if holding.source.name == "n7/0"]


def test_whoever_does_not_show_the_token_in_time_is_hung_up_on(
    store: AgentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.peers.server.GREETING_S", 0.1)
    with (
        ShardServer(store, TOKEN, host="127.0.0.1") as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as silent,
    ):
        assert len(receive(silent, NONCE_BYTES)) == NONCE_BYTES
        assert silent.recv(1) == b"", "hung up"


def test_another_version_is_refused(server: ShardServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        nonce = bytes(receive(connection, NONCE_BYTES))
        mine = bytes(NONCE_BYTES)
        connection.sendall(HELLO.pack(99, mine, mac_of(TOKEN, "client", nonce, mine)))
        assert receive(connection, 1)[0] != OK


def test_a_push_that_was_answered_leaves_its_place(tmp_path: Path) -> None:
    """Two peers in turn, where one may push at a time: neither is told that there is no room."""
    pieces = {shard: memoryview(content(shard, 6)) for shard in SHARDS}
    store = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")
    with (
        ShardServer(store, TOKEN, host="127.0.0.1", limits=ServerLimits(pushes=1)) as server,
        ShardClient("127.0.0.1", server.port, TOKEN, 20) as one,
        ShardClient("127.0.0.1", server.port, TOKEN, 20) as other,
    ):
        for step in range(100):
            for client in (one, other):
                client.push(Source("worker", "n7", "n7/0", step, 1), CASE.layout.tensors, pieces)
    store.close()


def test_pushes_are_bounded_in_number_and_in_bytes(tmp_path: Path) -> None:
    """One push at a time; and copies fill so much host memory, then the disk."""
    pieces = {shard: memoryview(content(shard, 6)) for shard in SHARDS}
    store = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0", max_copy_bytes=20_000)
    with (
        ShardServer(store, TOKEN, host="127.0.0.1", limits=ServerLimits(pushes=1)) as server,
        ShardClient("127.0.0.1", server.port, TOKEN, 20) as client,
        ShardClient("127.0.0.1", server.port, TOKEN, 20) as second,
    ):
        begun, go_on = threading.Event(), threading.Event()

        class Slow:
            def take(self, num_bytes: int, cancelled: threading.Event | None = None) -> None:
                begun.set()
                assert go_on.wait(20)

        push = threading.Thread(
            target=client.push,
            args=(HERE, CASE.layout.tensors, pieces),
            kwargs={"options": PushOptions(limit=Slow())},
        )
        push.start()
        assert begun.wait(20)
        with pytest.raises(SnapshotError, match="no room"):
            second.push(HERE, CASE.layout.tensors, pieces)
        go_on.set()
        push.join(20)
        for step in (7, 8):
            second.push(Source("worker", "n7", "n7/0", step, 1), CASE.layout.tensors, pieces)
    kinds = {(holding.source.step, holding.source.kind) for holding in store.inventory()}
    assert kinds == {(5, "memory"), (7, "disk"), (8, "disk")}
    store.close()


@pytest.mark.parametrize("field", ["step", "generation", "checksums"])
def test_a_push_with_a_number_that_is_none_ends_its_connection(
    server: ShardServer, client: ShardClient, capfd: pytest.CaptureFixture[str], field: str
) -> None:
    """Wrong: a traceback of the server's thread."""
    infinite = [math.inf] if field == "checksums" else math.inf
    request = {
        "op": "push",
        "worker": "n0/0",
        "step": 1,
        "generation": 1,
        "tensors": [],
        "shards": [],
        "checksums": [],
        "superseded": None,
        "to": None,
    }
    with (
        pytest.raises(PeerUnreachable),
        client._ask(request | {field: infinite}, "pushing", None),
    ):
        pass
    assert "Traceback" not in capfd.readouterr().err
