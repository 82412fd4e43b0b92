"""Mutual TLS between agents: who shows a certificate of the authority may speak, and nobody
else.
"""

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from recovery.errors import Cancelled, PeerTimeout, PeerUnreachable
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.peers import server as server_module
from recovery.peers.client import ShardClient
from recovery.peers.pool import ClientPool
from recovery.peers.protocol import NONCE_BYTES, receive
from recovery.peers.server import ServerLimits, ShardServer
from recovery.peers.tls import PeerTls
from recovery.transfer.tiers import PeerTier
from tests.harness.state_cases import placed, state_of, tensors_of

CASE = placed(tensors_of(2), 2, [[(2, ["n0/0"])]])


def make_certificates(directory: Path, name: str) -> PeerTls:
    """An authority of this name and a certificate that it has signed."""
    directory.mkdir(exist_ok=True)
    new = [
        "openssl",
        "req",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    root = [
        *new,
        "-x509",
        "-subj",
        f"/CN={name}",
        "-keyout",
        f"{directory}/root.pem",
        "-out",
        f"{directory}/authority.pem",
    ]
    signer = ["-CA", f"{directory}/authority.pem", "-CAkey", f"{directory}/root.pem"]
    leaf = [
        *new,
        "-x509",
        *signer,
        "-subj",
        "/CN=agent",
        "-keyout",
        f"{directory}/key.pem",
        "-out",
        f"{directory}/certificate.pem",
    ]
    for command in (root, leaf):
        subprocess.run(command, check=True, capture_output=True)
    return PeerTls(
        directory / "certificate.pem", directory / "key.pem", directory / "authority.pem"
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentStore]:
    writer = SnapshotWriter(tmp_path / "memory", "n0/0", CASE.layout, 1)
    writer.start(5, state_of(CASE.layout, "n0/0", 5))
    writer.wait(20)
    writer.close(20)
    store = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")
    yield store
    store.close()


def test_agents_of_one_authority_read_and_push_and_others_do_not(
    tmp_path: Path, store: AgentStore
) -> None:
    ours, foreign = (
        make_certificates(tmp_path / "ours", "job"),
        make_certificates(tmp_path / "foreign", "other"),
    )
    (held,) = store.inventory()
    shards = sorted(held.shards)
    with ShardServer(store, "token", host="127.0.0.1", tls=ours) as server:
        with ShardClient("127.0.0.1", server.port, "token", 20, tls=ours) as client:
            replies = dict(client.read(held.source, shards, held.checksums))
            assert all(isinstance(data, memoryview) for data in replies.values())
            client.push(
                held.source, CASE.layout.tensors, {shards[0]: store.read(held.source, shards[0])}
            )
        for stranger in (foreign, None):
            with (
                ShardClient("127.0.0.1", server.port, "token", 1, tls=stranger) as client,
                pytest.raises((PeerUnreachable, PeerTimeout)),
            ):
                list(client.read(held.source, shards, held.checksums))


def test_a_restores_reads_share_a_connection_and_may_be_cancelled(
    tmp_path: Path, store: AgentStore, greetings: list[str]
) -> None:
    """What one record of TLS brought is read bit by bit: nothing more comes that could be waited
    for.
    """
    ours = make_certificates(tmp_path / "ours", "job")
    (held,) = store.inventory()
    shards, cancelled = sorted(held.shards), threading.Event()
    with (
        ShardServer(store, "token", host="127.0.0.1", tls=ours) as server,
        ClientPool(ours) as pool,
    ):
        tier = PeerTier({"n0": ("127.0.0.1", server.port, "token")}, pool, 5, cancelled)
        for _ in range(3):
            pieces = [piece for _, piece in tier.read(held.source, shards, held.checksums, {})]
            assert len(pieces) == len(shards)
            assert all(isinstance(piece, Tensor) for piece in pieces)
        assert len(greetings) == 1
        cancelled.set()
        with pytest.raises(Cancelled):
            list(tier.read(held.source, shards, held.checksums, {}))


def test_a_server_hangs_up_on_who_waits_and_on_all_at_its_close(
    tmp_path: Path, store: AgentStore, greetings: list[str]
) -> None:
    """Although TLS has put another object in place of the socket that was accepted."""
    ours, before = make_certificates(tmp_path / "ours", "job"), set(threading.enumerate())
    (held,) = store.inventory()
    with ShardServer(
        store, "token", host="127.0.0.1", tls=ours, limits=ServerLimits(connections=1)
    ) as server:
        clients = [ShardClient("127.0.0.1", server.port, "token", 20, tls=ours) for _ in range(2)]
        for number in range(4):
            assert len(
                list(clients[number % 2].read(held.source, sorted(held.shards), held.checksums))
            ) == len(held.shards)
            until = time.monotonic() + 20
            while set(server.listener.idle) != set(server.listener.open):
                assert time.monotonic() < until
                time.sleep(0.005)
        assert len(greetings) == 4
    assert set(threading.enumerate()) <= before
    for client in clients:
        client.close()


@dataclass
class Knock:
    """A connection to a patient server over TLS that has said nothing; `before`: the threads
    without both.
    """

    tls: PeerTls
    server: ShardServer
    plain: socket.socket
    before: set[threading.Thread]


@pytest.fixture
def knock(tmp_path: Path, store: AgentStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Knock]:
    monkeypatch.setattr("recovery.peers.server.GREETING_S", 60.0)
    ours, before = make_certificates(tmp_path / "ours", "job"), set(threading.enumerate())
    with (
        ShardServer(store, "token", host="127.0.0.1", tls=ours) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as plain,
    ):
        yield Knock(ours, server, plain, before)


def test_a_server_closes_while_somebody_is_to_show_the_token(knock: Knock) -> None:
    with knock.tls.context(server=False).wrap_socket(knock.plain) as silent:
        assert len(receive(silent, NONCE_BYTES)) == NONCE_BYTES
        knock.server.close()
        assert set(threading.enumerate()) <= knock.before


def test_a_server_closes_while_somebody_is_to_shake_hands(knock: Knock) -> None:
    until = time.monotonic() + 20
    while not any(
        isinstance(each, ssl.SSLSocket) for each in list(knock.server.listener.strangers.values())
    ):
        assert time.monotonic() < until
        time.sleep(0.005)
    knock.server.close()
    assert set(threading.enumerate()) <= knock.before


def test_a_connection_that_has_just_been_let_go_of_is_waited_for(
    store: AgentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is not in the list of open ones any more, and not at its end."""
    serve, release_references = server_module._ThreadingServer._serve, threading.Event()

    def slow(*arguments: Any) -> None:
        serve(*arguments)
        release_references.set()
        time.sleep(0.3)

    monkeypatch.setattr(server_module._ThreadingServer, "_serve", slow)
    before = set(threading.enumerate())
    with ShardServer(store, "token", host="127.0.0.1") as server:
        socket.create_connection(("127.0.0.1", server.port), 20).close()
        assert release_references.wait(20)
    assert set(threading.enumerate()) <= before
