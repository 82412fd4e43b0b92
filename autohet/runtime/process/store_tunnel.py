"""Authenticated connection from a worker to the driver's rendezvous store.

torch's TCPStore has no authentication: every client that reaches its port can read and replace
every key. The driver therefore serves the store's protocol (`driver.ray.store_server`) behind a
handshake:

    server -> client   nonce (16 bytes)
    client -> server   generation u64, nonce (16 bytes), mac (32 bytes)
    server -> client   mac (32 bytes), then torch's protocol

Each `mac` is HMAC-SHA256 of the side's role and both nonces under the secret of the generation. A
worker's TCPStore connects to a `StoreTunnel` of its own process on the loopback interface, which
does the handshake and forwards bytes.
"""

import hmac
import logging
import os
import selectors
import socket
import struct
import threading
from contextlib import suppress
from functools import partial

logger = logging.getLogger("autohet")
NONCE = struct.Struct("!16s")
HELLO = struct.Struct("!Q16s32s")
"""Client's message: generation, nonce, MAC."""
WELCOME = struct.Struct("!32s")
LOOPBACK = "127.0.0.1"
PIECE_BYTES = 1 << 16
INTERNET = (socket.AF_INET, socket.AF_INET6)


def generation_secret(key: bytes, generation: int) -> bytes:
    """Derive the secret that the workers of one generation share from the run's key."""
    return hmac.digest(key, b"generation" + struct.pack("!Q", generation), "sha256")


def handshake_mac(secret: bytes, role: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the MAC by which `role` ("client" or "server") proves that it has the secret."""
    return hmac.digest(secret, role.encode() + server_nonce + client_nonce, "sha256")


def connect_to_store(
    host: str, port: int, generation: int, secret: bytes, timeout_s: float
) -> socket.socket:
    """Connect to the driver's store and authenticate both sides.

    Raises:
        OSError: the store is out of reach, refuses this generation's secret, or does not have it.
    """
    connection = socket.create_connection((host, port), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        (theirs,) = NONCE.unpack(_receive(connection, NONCE.size))
        own = os.urandom(NONCE.size)
        mac = handshake_mac(secret, "client", theirs, own)
        connection.sendall(HELLO.pack(generation, own, mac))
        (answer,) = WELCOME.unpack(_receive(connection, WELCOME.size))
        if not hmac.compare_digest(answer, handshake_mac(secret, "server", theirs, own)):
            raise ConnectionError(f"{host}:{port} is not the store of this run's driver")
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("the rendezvous store hung up: it does not take this generation")
        data += piece
    return data


class StoreTunnel:
    """Loopback listener whose connections are forwarded to the store by a thread.

    It accepts connections of its own process alone. Raises OSError as `connect_to_store` does.
    """

    def __init__(
        self, host: str, port: int, generation: int, secret: bytes, timeout_s: float
    ) -> None:
        self._connect = partial(connect_to_store, host, port, generation, secret, timeout_s)
        self._first: socket.socket | None = self._connect()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.host = LOOPBACK
        self.port = int(self._listener.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="store tunnel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no new connections; open ones stay until one side hangs up."""
        with suppress(OSError):
            self._wake.close()

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._stop_listening()
                else:
                    key.data.move()
        self._selector.close()

    def _stop_listening(self) -> None:
        for end in (self._listener, self._woken):
            self._selector.unregister(end)
            end.close()
        if self._first is not None:
            self._first.close()

    def _accept(self) -> None:
        try:
            local, address = self._listener.accept()
        except OSError as error:
            logger.warning("A connection to the store is not taken: %s", error)
            return
        if not is_own_connection(address[1], self.port):
            logger.warning("Another process's connection to this worker's store is refused")
            local.close()
            return
        remote = self._first
        self._first = None
        try:
            remote = remote or self._connect()
        except OSError as error:
            logger.warning("The rendezvous store is out of reach: %s", error)
            local.close()
            return
        _Pair(self._selector, local, remote)


class _Pair:
    """Pair of connections whose bytes are forwarded to each other, until either side hangs up."""

    def __init__(
        self, selector: selectors.BaseSelector, local: socket.socket, remote: socket.socket
    ) -> None:
        self._selector = selector
        self._ends = (local, remote)
        self._pending = {local: bytearray(), remote: bytearray()}
        """Bytes to send, by receiver."""
        for end in self._ends:
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(end, selectors.EVENT_READ, self)

    def move(self) -> None:
        """Forward the bytes that can be read and sent now."""
        if self._ends[0].fileno() < 0:  # closed by an earlier event of the same round
            return
        try:
            for source, sink in (self._ends, self._ends[::-1]):
                self._forward(source, sink)
        except OSError:
            self._close()
            return
        for end in self._ends:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._pending[end] else 0)
            if self._selector.get_key(end).events != events:
                self._selector.modify(end, events, self)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        """Forward bytes from `source` to `sink`; raise OSError if either side is gone."""
        pending = self._pending[sink]
        with suppress(BlockingIOError):
            data = source.recv(PIECE_BYTES)
            if not data:
                raise ConnectionError("hung up")
            pending += data
        if pending:
            with suppress(BlockingIOError):
                del pending[: sink.send(pending)]

    def _close(self) -> None:
        for end in self._ends:
            self._selector.unregister(end)
            end.close()


def is_own_connection(client_port: int, server_port: int) -> bool:
    """Return True if the client of a connection to LOOPBACK is a socket of this process.

    The process's own descriptors decide: the kernel's table of all connections takes many
    milliseconds to read.
    """
    for entry in os.scandir("/proc/self/fd"):
        # Other threads close descriptors meanwhile.
        with suppress(OSError):
            if not os.readlink(entry.path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as held:
                if held.family in INTERNET and _ends_of(held) == (client_port, server_port):
                    return True
    return False


def _ends_of(connected: socket.socket) -> tuple[int, int] | None:
    """Return the ports of both ends of a connection to LOOPBACK; None for another one.

    torch connects by an IPv6 socket to the mapped IPv4 address.
    """
    host, port = connected.getpeername()[:2]
    if host not in (LOOPBACK, f"::ffff:{LOOPBACK}"):
        return None
    return int(connected.getsockname()[1]), int(port)
