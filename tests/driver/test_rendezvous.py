"""The rendezvous store: torch's client over a tunnel gets what torch's own server would give it;
strangers get nothing, and take nothing away from those with the secret.
"""

import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from autohet.driver.ray.store import store_queries, store_server
from autohet.driver.ray.store.store_server import MAX_STRANGERS, StoreServer
from autohet.runtime.process.store_tunnel import (
    HELLO,
    StoreTunnel,
    connect_to_store,
    generation_secret,
    is_own_connection,
)

KEY = bytes(32)
HOST = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer(HOST, KEY)
    yield server
    server.close()


@contextmanager
def member(server: StoreServer, generation: int = 1, timeout_s: float = 5.0) -> Iterator[Store]:
    secret = generation_secret(KEY, generation)
    tunnel = StoreTunnel(HOST, server.port, generation, secret, timeout_s)
    try:
        yield TCPStore(
            tunnel.host, tunnel.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
    finally:
        tunnel.close()


def exercise(store: Store, other: Store) -> list[object]:
    """Every query that torch sends for groups, and its answers."""
    store.set("a", "1")
    assert store.get("a") == b"1", "it has arrived"
    other.append("a", "2")
    assert other.get("a") == b"12"
    answers: list[object] = [store.get("a"), other.add("n", 5), store.add("n", -7)]
    answers += [store.check(["a", "n"]), store.check(["a", "none"]), other.num_keys()]
    store.multi_set(["x", "y"], [b"\x00" * 70_000, b""])
    answers += [other.multi_get(["x", "y"]), store.delete_key("x"), store.delete_key("x")]
    answers += [store.compare_set("c", "", "new"), store.compare_set("c", "old", "newer")]
    answers += [store.compare_set("c", "new", "newest"), store.compare_set("none", "old", "new")]
    late = threading.Timer(0.1, lambda: other.set("late", "here"))
    late.start()
    store.wait(["late", "a"])
    late.join()
    answers.append(store.get("late"))
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(milliseconds=100))
    answers.append(store.get("a"))
    prefixed = PrefixStore("deep", PrefixStore("deeper", store))
    prefixed.set("k", "v")
    answers.append(other.get("deeper/deep/k"))
    return answers


def test_it_answers_as_torchs_own_server(server: StoreServer) -> None:
    own = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    second = TCPStore(HOST, own.port, is_master=False, timeout=timedelta(seconds=5))
    with member(server) as store, member(server) as other:
        mine = exercise(store, other)
        theirs = exercise(own, second)
        own_keys = 5, 6  # torch's server counts a key of its own
        assert (mine.pop(own_keys[0]), theirs.pop(own_keys[0])) in {(2, 2), (2, 3)}
        assert mine == theirs


def test_gloo_builds_groups_over_it(server: StoreServer) -> None:
    size, sums = 4, {}

    def run(rank: int) -> None:
        with member(server) as store:
            limit = timedelta(seconds=20)
            group = dist.ProcessGroupGloo(PrefixStore("g", store), rank, size, limit)
            tensor = torch.ones(1) * rank
            group.allreduce([tensor]).wait()
            sums[rank] = tensor.item()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == dict.fromkeys(range(size), 6.0)


def test_generations_share_no_keys_and_old_ones_end(server: StoreServer) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(member(server, 1))
        first.set("address", "right")
        for generation in range(2, 2 + store_server.KEPT_GENERATIONS):
            newer = stack.enter_context(member(server, generation))
            assert not newer.check(["address"])
        with pytest.raises(dist.DistError):
            first.get("address")
        with pytest.raises(OSError, match="does not take this generation"):
            connect_to_store(HOST, server.port, 1, generation_secret(KEY, 1), 5.0)


def test_a_secret_opens_its_own_generation_alone(server: StoreServer) -> None:
    with pytest.raises(OSError, match="does not take"):
        connect_to_store(HOST, server.port, 2, generation_secret(KEY, 1), 5.0)


def test_a_worker_gives_no_secret_to_a_false_store() -> None:
    with socket.create_server((HOST, 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            connection.sendall(bytes(16))
            connection.recv(HELLO.size)
            connection.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(OSError, match="not the store of this run"):
            connect_to_store(HOST, listener.getsockname()[1], 1, bytes(32), 5.0)
        thread.join(5)


def test_a_stranger_with_torchs_client_reads_and_changes_nothing(server: StoreServer) -> None:
    with member(server) as store:
        store.set("addr0", "right")
        with pytest.raises(dist.DistError):
            TCPStore(HOST, server.port, is_master=False, timeout=timedelta(seconds=2))
        assert store.get("addr0") == b"right"


def test_idle_strangers_take_neither_descriptors_nor_places(server: StoreServer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((HOST, server.port)))
            for _ in range(MAX_STRANGERS + 100)
        ]
        with member(server) as store:
            store.set("a", "1")
            assert store.get("a") == b"1"
        taken = len(os.listdir("/proc/self/fd")) - before - len(strangers)
        assert taken <= MAX_STRANGERS + 20


def test_a_flood_before_the_handshake_stays_out_of_memory(server: StoreServer) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with socket.create_connection((HOST, server.port)) as flood, suppress(OSError):
        for _ in range(200):
            flood.sendall(bytes(1 << 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"
    with member(server) as store:
        store.set("a", "1")


def test_a_member_cannot_fill_the_drivers_memory(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_queries, "MAX_STORED_BYTES", 1 << 20)
    with member(server) as store, member(server) as other:
        with suppress(dist.DistError):
            for number in range(100):
                store.set(f"k{number}", b"v" * 100_000)
        with pytest.raises(dist.DistError):
            store.get("k99")
        other.set("small", "1")
        assert other.get("small") == b"1"


@pytest.mark.parametrize("seed", range(3))
def test_mutated_messages_end_their_connection_alone(server: StoreServer, seed: int) -> None:
    """Bytes of every kind from an authenticated member: torn lengths, unknown queries, noise."""
    draw = random.Random(seed)
    secret = generation_secret(KEY, 1)
    with member(server) as store:
        store.set("a", "1")
        for _ in range(150):
            connection = connect_to_store(HOST, server.port, 1, secret, 5.0)
            with connection, suppress(OSError):
                query = bytes([draw.randrange(20)])
                lengths = [draw.choice([0, 1, 3, 1 << 20, 1 << 40, (1 << 64) - 1]) for _ in "ab"]
                body = b"".join(length.to_bytes(8, "little") for length in lengths)
                connection.sendall(query + body + draw.randbytes(draw.randrange(200)))
        assert store.get("a") == b"1"


def test_it_listens_on_the_given_address_alone() -> None:
    server = StoreServer("127.0.0.2", KEY)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, server.port), 1.0)
        socket.create_connection(("127.0.0.2", server.port), 5.0).close()
    finally:
        server.close()


def test_an_address_of_another_machine_is_listened_for_on_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A head behind a translated address, which nodes reach it by."""
    server = StoreServer("192.0.2.1", KEY)
    try:
        socket.create_connection((HOST, server.port), 5.0).close()
    finally:
        server.close()
    assert "no address of this machine" in caplog.text


def test_a_tunnel_takes_its_own_process_alone(server: StoreServer) -> None:
    """Another user of the worker's machine reaches its loopback ports."""
    tunnel = StoreTunnel(HOST, server.port, 1, generation_secret(KEY, 1), 5.0)
    script = (
        "import socket, sys\n"
        f"connection = socket.create_connection(('{HOST}', {tunnel.port}), 5)\n"
        "connection.settimeout(5)\n"
        "sys.exit(len(connection.recv(10)))\n"
    )
    try:
        assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 0
        store = TCPStore(tunnel.host, tunnel.port, is_master=False, timeout=timedelta(seconds=5))
        store.set("a", "1")
    finally:
        tunnel.close()


def test_own_connections_are_recognised() -> None:
    with socket.create_server((HOST, 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            client_port, server_port = client.getsockname()[1], listener.getsockname()[1]
            assert is_own_connection(client_port, server_port)
        assert not is_own_connection(client_port, server_port)


def test_a_closed_server_leaves_no_thread_and_no_descriptor() -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    server = StoreServer(HOST, KEY)
    with member(server) as store:
        store.set("a", "1")
    server.close()
    del store
    deadline = time.monotonic() + 10
    while threading.active_count() > threads or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < deadline
        time.sleep(0.02)
