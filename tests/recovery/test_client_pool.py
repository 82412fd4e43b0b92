"""Connections to peers that are used again: how many there are, which are never used again, and
that none is left.
"""

import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from recovery.errors import (
    Cancelled,
    PeerTimeout,
    PeerUnreachable,
    RecoveryError,
    ShardCorrupt,
    ShardUnavailable,
)
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.peers import server as shard_server
from recovery.peers.pool import ClientPool
from recovery.peers.protocol import OK, REPLY
from recovery.peers.server import ShardServer
from recovery.state.checksum import checksum
from recovery.state.holdings import Source
from recovery.state.layout import Layout, ShardId
from recovery.transfer.restore import Access, Restored, RestoreTask, restore
from recovery.transfer.schedule import schedule
from recovery.transfer.tier_threads import THREADS_BY_TIER
from recovery.transfer.tiers import PeerTier, ShardAnswer, Tier
from tests.harness.leaks import nothing_left
from tests.harness.scripted_peer import ScriptedPeer
from tests.harness.state_cases import placed, state_of, tensors_of

STEP, TOKEN = 5, "token"
CASE = placed(tensors_of(2), 2, [[(2, ["n0/0"])]])
SHARDS = sorted(CASE.layout.shards_by_worker["n0/0"])
HERE = Source("memory", "n0", "n0/0", STEP, 1)
A, B = ShardId("param/a", 0), ShardId("param/a", 1)
DATA = bytes(range(200))
SUMS = {shard: checksum(memoryview(DATA)) for shard in (A, B)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentStore]:
    writer = SnapshotWriter(tmp_path / "memory", "n0/0", CASE.layout, 1)
    writer.start(STEP, state_of(CASE.layout, "n0/0", STEP))
    writer.wait(20)
    writer.close(20)
    store = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")
    store.file_of(HERE, SHARDS[0])  # it keeps what it has opened
    yield store
    store.close()


@dataclass(frozen=True)
class KeepsPool(Access):
    """Remembers the restore's pool, so that its connections are not closed for want of an owner."""

    pools: set[ClientPool] = field(default_factory=set)

    def tier(
        self,
        source: Source,
        cancelled: threading.Event | None = None,
        *,
        node: str,
        pool: ClientPool,
    ) -> Tier:
        self.pools.add(pool)
        return super().tier(source, cancelled, node=node, pool=pool)


def restored(
    store: AgentStore, port: int, directory: Path, **more: threading.Event
) -> tuple[Restored, Access]:
    """All of n0's state in a new worker of another node, one request a shard."""
    after = Layout(CASE.layout.tensors, {"n1/0": CASE.layout.shards})
    plan = schedule(after, {"n1/0": "n1"}, store.inventory(), STEP)
    own = AgentStore(directory / "m1", directory / "d1", "n1")
    access = KeepsPool(own, {"n0": ("127.0.0.1", port, TOKEN)}, lambda *_: [], 20, **more)
    done = restore(RestoreTask(plan, "n1/0", after, None), None, access)  # type: ignore[arg-type]
    expected = state_of(CASE.layout, "n0/0", STEP)
    assert all(torch.equal(done.state[name], tensor) for name, tensor in expected.items())
    return done, access


def read(
    pool: ClientPool,
    port: int,
    shards: Sequence[ShardId] = (A,),
    timeout_s: float = 20,
) -> list[ShardAnswer]:
    tier = PeerTier({"n0": ("127.0.0.1", port, TOKEN)}, pool, timeout_s)
    return [piece for _, piece in tier.read(HERE, shards, SUMS, {})]


def is_right(pieces: list[ShardAnswer]) -> bool:
    return [bytes(piece.tolist()) for piece in pieces if isinstance(piece, torch.Tensor)] == [
        DATA
    ] * len(pieces)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def whole(connection: socket.socket, _: int = 0) -> bool:
    connection.sendall(REPLY.pack(OK, len(DATA)) + DATA)
    return True


@pytest.mark.parametrize("piece_bytes", [1, 64 << 20])
def test_a_restore_of_many_pieces_greets_once_a_stream_and_leaves_no_connection(
    store: AgentStore,
    greetings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr("recovery.transfer.reads.FETCH_BYTES", piece_bytes)
    with ShardServer(store, TOKEN, host="127.0.0.1") as server, nothing_left(tmp_path / "none"):
        done, access = restored(store, server.port, tmp_path)
        assert not done.failures
        assert len(greetings) <= (THREADS_BY_TIER["peer"] if piece_bytes == 1 else 1) < len(SHARDS)
    del access


def test_a_cancelled_restore_leaves_no_connection(
    store: AgentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server, which goes on, sees each of them end: those that wait to be used again, and those
    that wait for a reply.
    """
    cancelled, requests, answer = threading.Event(), list[object](), shard_server._Handler._answer

    def answer_some(handler: shard_server._Handler, request: dict[str, object]) -> bool:
        requests.append(request)
        if len(requests) <= 20:
            return answer(handler, request)
        cancelled.set()
        return handler.request.recv(1) != b""

    monkeypatch.setattr("recovery.transfer.reads.FETCH_BYTES", 1)
    monkeypatch.setattr(shard_server._Handler, "_answer", answer_some)
    with (
        ShardServer(store, TOKEN, host="127.0.0.1") as server,
        nothing_left(tmp_path / "none"),
        pytest.raises(Cancelled),
    ):
        restored(store, server.port, tmp_path, cancelled=cancelled)
    assert cancelled.is_set()


def test_a_server_that_hangs_up_after_each_reply_is_not_blamed(
    store: AgentStore, greetings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = shard_server._Handler._answer
    monkeypatch.setattr("recovery.transfer.reads.FETCH_BYTES", 1)
    monkeypatch.setattr(
        shard_server._Handler, "_answer", lambda self, request: answer(self, request) and False
    )
    with ShardServer(store, TOKEN, host="127.0.0.1") as server:
        done, _ = restored(store, server.port, tmp_path)
    assert (done.failures, done.bad, len(greetings)) == ((), (), len(SHARDS))


def test_a_server_that_was_restarted_costs_one_connection(
    store: AgentStore, greetings: list[str]
) -> None:
    sums = store.inventory()[0].checksums
    with ClientPool() as pool:
        with ShardServer(store, TOKEN, host="127.0.0.1") as server:
            tier = PeerTier({"n0": ("127.0.0.1", server.port, TOKEN)}, pool, 20)
            for _ in range(3):
                assert all(
                    isinstance(piece, torch.Tensor)
                    for _, piece in tier.read(HERE, SHARDS, sums, {})
                )
        assert len(greetings) == 1
        with ShardServer(store, TOKEN, host="127.0.0.1", port=server.port):
            for _ in range(3):
                assert all(
                    isinstance(piece, torch.Tensor)
                    for _, piece in tier.read(HERE, SHARDS, sums, {})
                )
        assert len(greetings) == 2


def test_another_node_at_the_same_address_gives_nothing_for_the_one_before(
    store: AgentStore, tmp_path: Path
) -> None:
    """Although it has a copy of the same worker's state of the same step."""
    (held,) = store.inventory()
    other = AgentStore(tmp_path / "memory", tmp_path / "disk", "n1")
    with ClientPool() as pool:
        with ShardServer(store, TOKEN, host="127.0.0.1") as server:
            tier = PeerTier({"n0": ("127.0.0.1", server.port, TOKEN)}, pool, 20)
            assert all(
                isinstance(piece, torch.Tensor)
                for _, piece in tier.read(HERE, SHARDS, held.checksums, {})
            )
        with ShardServer(other, TOKEN, host="127.0.0.1", port=server.port):
            pieces = [piece for _, piece in tier.read(HERE, SHARDS, held.checksums, {})]
    other.close()
    assert [type(piece) for piece in pieces] == [ShardUnavailable] * len(SHARDS)


def hang_up(connection: socket.socket, reset: bool) -> bool:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
def test_a_kept_connection_that_ends_after_the_request_is_replaced_once(reset: bool) -> None:
    """The server closed it while the request was on its way.

    A new connection that ends so, too, is the peer's failure.
    """

    def answer(connection: socket.socket, request: int) -> bool:
        return whole(connection) if request in (1, 3) else hang_up(connection, reset)

    with ScriptedPeer(answer, TOKEN) as peer, ClientPool() as pool:
        assert is_right(read(pool, peer.port))
        assert is_right(read(pool, peer.port))
        assert (peer.greeted, peer.requests) == (2, 3)
        with pytest.raises(PeerUnreachable):
            read(pool, peer.port)
        assert (peer.greeted, peer.requests) == (3, 5)
        with pytest.raises(PeerUnreachable):
            read(pool, peer.port)
        assert (peer.greeted, peer.requests) == (4, 6), "nothing is kept after a failure"


def test_a_kept_connection_that_says_nothing_is_the_peers_failure() -> None:
    over = threading.Event()
    with (
        ScriptedPeer(lambda c, number: whole(c) if number == 1 else over.wait(20), TOKEN) as peer,
        ClientPool() as pool,
    ):
        assert is_right(read(pool, peer.port, timeout_s=0.2))
        with pytest.raises(PeerTimeout):
            read(pool, peer.port, timeout_s=0.2)
        assert (peer.greeted, peer.requests) == (1, 2)
        over.set()


def half(pool: ClientPool, port: int) -> None:
    with pytest.raises(PeerTimeout):
        read(pool, port, timeout_s=0.2)


def announced_wrongly(pool: ClientPool, port: int) -> None:
    tier = PeerTier({"n0": ("127.0.0.1", port, TOKEN)}, pool, 20)
    with pytest.raises(PeerUnreachable, match="announces"):
        list(tier.read(HERE, [A], SUMS, {A: memoryview(bytearray(len(DATA)))}))


def damaged(pool: ClientPool, port: int) -> None:
    (piece,) = read(pool, port)
    assert isinstance(piece, ShardCorrupt)


def left(pool: ClientPool, port: int) -> None:
    reading = PeerTier({"n0": ("127.0.0.1", port, TOKEN)}, pool, 20).read(HERE, [A, B], SUMS, {})
    next(reading)
    reading.close()  # type: ignore[attr-defined]


def cancelled(pool: ClientPool, port: int) -> None:
    event = threading.Event()
    threading.Timer(0.1, event.set).start()
    with pytest.raises(Cancelled):
        list(
            PeerTier({"n0": ("127.0.0.1", port, TOKEN)}, pool, 20, event).read(HERE, [A], SUMS, {})
        )


HEADER = REPLY.pack(OK, len(DATA))
BROKEN: dict[str, tuple[bytes, Callable[[ClientPool, int], None]]] = {
    "half a header": (HEADER[:4], half),
    "half a shard": (HEADER + DATA[:50], half),
    "another length": (REPLY.pack(OK, 3) + DATA[:3], announced_wrongly),
    "other bytes": (HEADER + DATA[::-1], damaged),
    "left by its reader": (HEADER + DATA + HEADER + DATA, left),
    "cancelled before it": (b"", cancelled),
    "cancelled within it": (HEADER + DATA[:50], cancelled),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
def test_a_connection_with_a_broken_reply_is_closed_at_once(kind: str, kept: bool) -> None:
    sent, broken_read = BROKEN[kind]

    def answer(connection: socket.socket, request: int) -> bool:
        if request == 1 + kept:
            connection.sendall(sent)
            return connection.recv(1) != b""  # the client's end, or a request that must not come
        return whole(connection)

    with ScriptedPeer(answer, TOKEN) as peer, ClientPool() as pool:
        if kept:
            assert is_right(read(pool, peer.port, timeout_s=0.2 if broken_read is half else 20))
        broken_read(pool, peer.port)
        until(lambda: peer.ended == 1)
        assert is_right(read(pool, peer.port))
        assert (peer.greeted, peer.requests) == (2, 2 + kept)


def test_what_comes_behind_a_reply_is_never_taken_for_the_next() -> None:
    def answer(connection: socket.socket, request: int) -> bool:
        connection.sendall(HEADER + DATA + (HEADER + DATA[::-1] if request == 1 else b""))
        return True

    with ScriptedPeer(answer, TOKEN) as peer, ClientPool() as pool:
        assert is_right(read(pool, peer.port))
        assert is_right(read(pool, peer.port))
        assert (peer.greeted, peer.requests) == (2, 2)


def test_each_peer_has_its_own_connections() -> None:
    with (
        ScriptedPeer(whole, TOKEN) as one,
        ScriptedPeer(whole, TOKEN) as other,
        ClientPool() as pool,
    ):
        for peer in (one, other, other, one):
            assert is_right(read(pool, peer.port))
        assert (one.requests, other.requests) == (one.greeted + 1, other.greeted + 1) == (2, 2)
        with pytest.raises(RecoveryError):
            list(
                PeerTier({"n0": ("127.0.0.1", one.port, "other")}, pool, 20).read(
                    HERE, [A], SUMS, {}
                )
            )


def test_so_many_wait_and_the_one_that_waited_longest_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recovery.peers.pool.MAX_IDLE", 2)
    with (
        ScriptedPeer(whole, TOKEN) as one,
        ScriptedPeer(whole, TOKEN) as other,
        ClientPool() as pool,
    ):
        assert is_right(read(pool, one.port))
        with ExitStack() as stack:
            for _ in range(2):
                client = stack.enter_context(pool.client("127.0.0.1", other.port, TOKEN, 20))
                assert len(list(client.read(HERE, [A], SUMS))) == 1
        until(lambda: one.ended == 1)
        assert is_right(read(pool, other.port))
        assert (other.greeted, other.ended) == (2, 0)


def test_what_waits_holds_a_connection_and_no_memory() -> None:
    with ScriptedPeer(whole, TOKEN) as peer, ClientPool() as pool:
        with pool.client("127.0.0.1", peer.port, TOKEN, 20) as client:
            ((_, data),) = client.read(HERE, [A], SUMS)
        assert isinstance(data, memoryview)
        buffer = weakref.ref(data.obj.base)
        del data
        assert client.is_idle
        assert buffer() is None


def test_what_is_given_back_after_the_close_is_closed() -> None:
    with ScriptedPeer(whole, TOKEN) as peer:
        pool = ClientPool()
        with pool.client("127.0.0.1", peer.port, TOKEN, 20) as client:
            list(client.read(HERE, [A], SUMS))
            pool.close()
        until(lambda: peer.ended == 1)
        assert not client.is_idle
