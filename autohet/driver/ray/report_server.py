"""The driver's end of `runtime.report_channel`: takes connections, and what comes over them, without ever waiting for one."""

from __future__ import annotations

import hmac
import logging
import pickle
import secrets
import select
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from autohet.runtime.report_channel import BEAT, FRAME, MOST_NEWS_BYTES, NONCE_BYTES, NUMBER, ReportAddress, mac_of

logger = logging.getLogger("autohet")
MOST_STRANGERS = 256
"""Connections of which nobody has said yet who speaks; a further one ends the oldest."""
MOST_GREETING_BYTES = 1024
READ_BYTES, MOST_READS = 1 << 16, 256
"""At a time, and of one connection before the others have their turn."""


@dataclass
class Speaker:
    """A process that is expected: the secret between the two, the number of its newest news, its connection if there is one."""

    key: bytes
    number: int = 0
    connection: Connection | None = None


@dataclass(eq=False)
class Connection:
    """One connection, and what has come over it in part. `name` once its first frame has proved who speaks."""

    socket: socket.socket
    nonce: bytes
    name: str | None = None
    place: int = 0
    data: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Unreadable:
    """In place of news that are proved to be from their speaker and cannot be read here: its node has another version of something."""

    why: str


class BadFrame(Exception):
    """What came is not from the process that it says."""


class ReportServer:
    """Owns a listening socket and its connections; called from one thread."""

    def __init__(self, host: str, beat_s: float) -> None:
        self._host, self._beat_s = host, beat_s
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._listener.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._speakers: dict[str, Speaker] = {}
        self._strangers: dict[Connection, Connection] = {}

    def expect(self, who: str) -> ReportAddress:
        """From now on a process may speak as the address says; `who` it is, people may read in its name."""
        name, key = f"{who} {secrets.token_hex(8)}", secrets.token_bytes(32)
        self._speakers[name] = Speaker(key)
        return ReportAddress(self._host, self._listener.getsockname()[1], name, key, self._beat_s)

    def forget(self, name: str) -> None:
        speaker = self._speakers.pop(name, None)
        if speaker is not None and speaker.connection is not None:
            self._end(speaker.connection)

    def take(self) -> tuple[set[str], list[tuple[str, Any]]]:
        """What has come by now: the names that were heard of, and their news in order."""
        heard: set[str] = set()
        news: list[tuple[str, Any]] = []
        for number, _ in self._poll.poll(0):
            connection = self._connections.get(number)
            if connection is not None:
                self._read(connection, heard, news)
            elif number == self._listener.fileno():
                self._accept()
        return heard, news

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._end(connection)
        self._listener.close()
        self._poll.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is gone already
            while True:
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                connection = Connection(accepted, secrets.token_bytes(NONCE_BYTES))
                self._poll.register(accepted, select.EPOLLIN)
                self._connections[accepted.fileno()] = self._strangers[connection] = connection
                if len(self._strangers) > MOST_STRANGERS:
                    self._end(next(iter(self._strangers)))
                accepted.send(connection.nonce)

    def _read(self, connection: Connection, heard: set[str], news: list[tuple[str, Any]]) -> None:
        try:
            over = self._receive(connection)
            if connection.data == BEAT and connection.name is not None:  # nearly always
                connection.data.clear()
            else:
                self._take_frames(connection, news)
            if over:
                self._end(connection)
            elif connection.name is not None:  # whatever came is a sign of life, also a part of long news
                heard.add(connection.name)
        except OSError:
            self._end(connection)
        except BadFrame as error:
            logger.warning("A connection for reports is ended: %s", error)
            self._end(connection)

    def _receive(self, connection: Connection) -> bool:
        """Take what is there; True where nothing more will come."""
        for _ in range(MOST_READS):
            try:
                data = connection.socket.recv(READ_BYTES)
            except BlockingIOError:
                return False
            connection.data += data
            if len(data) < READ_BYTES:
                return not data
        return False

    def _take_frames(self, connection: Connection, news: list[tuple[str, Any]]) -> None:
        answer = 0
        while (frame := self._next_frame(connection)) is not None:
            number, payload, speaker = frame
            if connection.name is None:
                self._know(connection, payload.decode(), speaker)
            elif number > speaker.number:
                speaker.number = number
                news.append((connection.name, _read_news(payload)))
            answer = speaker.number if number else answer
        if answer:
            with suppress(BlockingIOError):  # the next one stands for this one, too
                connection.socket.send(NUMBER.pack(answer))

    def _next_frame(self, connection: Connection) -> tuple[int, bytes, Speaker] | None:
        """The number and payload of one whole frame, and the process that it is proved to be from."""
        data = connection.data
        while data.startswith(BEAT) and connection.name is not None:
            del data[: len(BEAT)]
        if len(data) < FRAME.size:
            return None
        length, number, mac = FRAME.unpack_from(data)
        if length > (MOST_GREETING_BYTES if connection.name is None else MOST_NEWS_BYTES):
            raise BadFrame(f"{length} bytes are too many for {connection.name or 'a name'}")
        if len(data) < FRAME.size + length:
            return None
        payload = bytes(data[FRAME.size : FRAME.size + length])
        del data[: FRAME.size + length]
        speaker = self._speaker(connection, payload)
        if not hmac.compare_digest(mac, mac_of(speaker.key, connection.nonce, connection.place, number, payload)):
            raise BadFrame(f"a wrong MAC in place {connection.place} of {connection.name or payload!r}")
        connection.place += 1
        return number, payload, speaker

    def _speaker(self, connection: Connection, payload: bytes) -> Speaker:
        name = payload.decode(errors="replace") if connection.name is None else connection.name
        speaker = self._speakers.get(name)
        if speaker is None:  # of a node that was cut off and has come back, say: it tries for ever
            raise ConnectionAbortedError(f"nobody of the name {name!r} is expected")
        return speaker

    def _know(self, connection: Connection, name: str, speaker: Speaker) -> None:
        """It has proved who it is: its older connection, if there is one, is not read any more."""
        if speaker.connection is not None:
            self._end(speaker.connection)
        connection.name, speaker.connection = name, connection
        self._strangers.pop(connection, None)

    def _end(self, connection: Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._poll.unregister(connection.socket)
        connection.socket.close()
        self._strangers.pop(connection, None)
        speaker = self._speakers.get(connection.name or "")
        if speaker is not None and speaker.connection is connection:
            speaker.connection = None


def _read_news(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:  # noqa: BLE001  (whatever another version raises: others' news are not lost for it)
        return Unreadable(f"{type(error).__name__}: {error}")
