"""Another user of the machine, and a stranger on its network: a forked child with another user's id
that attacks ports and directories and says what it got.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (a host's name is encoded by it; not readable afterwards)
import json
import os
import random
import resource
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

USER = 12345
ANSWER_S = 0.05
HELD = 64
"""Connections of frames that stay open behind the newest."""


@dataclass(frozen=True)
class Targets:
    """What is attacked: ports of 127.0.0.1 with frames that a member of an earlier connection sent
    (hexadecimal), directories, and how much.
    """

    ports: dict[str, int]
    captures: dict[str, list[str]]
    directories: list[str]
    secrets: list[str]
    """Bytes (hexadecimal) that must never be seen."""
    num_frames: int
    num_idle: int
    seed: int = 0


@contextmanager
def hostile_user() -> Iterator[HostileUser]:
    """Fork it before the servers start their threads."""
    here, there = Pipe()
    child = os.fork()
    if child == 0:
        here.close()
        status = 1
        try:
            _become_other_user()
            _attack(Targets(**there.recv()), there)
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)
    there.close()
    user = HostileUser(child, here)
    try:
        yield user
    finally:
        user.end()


class HostileUser:
    """The parent's side of the child."""

    def __init__(self, child: int, pipe: Connection) -> None:
        self._child: int | None = child
        self._pipe = pipe

    def attack(self, targets: Targets) -> None:
        self._pipe.send(asdict(targets))

    @property
    def has_ended(self) -> bool:
        return self._pipe.poll()

    def result(self, timeout_s: float) -> dict[str, Any]:
        assert self._pipe.poll(timeout_s), "the attack did not end"
        found: dict[str, Any] = self._pipe.recv()
        return found

    def end(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child, 9)
            os.waitpid(self._child, 0)
            self._child = None
        self._pipe.close()


def _become_other_user() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)


def _attack(targets: Targets, pipe: Connection) -> None:
    draw = random.Random(targets.seed)
    began = time.monotonic()
    idle = _hold_idle(targets)
    counts, leaks = _send_frames(targets, draw)
    got = _try_directories(targets)
    seconds = time.monotonic() - began
    pipe.send(
        {
            "user": os.geteuid(),
            "idle_sockets": len(idle),
            "frames": dict(counts),
            "leaks": leaks,
            "directory_successes": got,
            "seconds": seconds,
        }
    )
    pipe.recv()  # the sockets stay open until the parent has looked


def _hold_idle(targets: Targets) -> list[socket.socket]:
    held = []
    ports = list(targets.ports.values())
    for number in range(targets.num_idle):
        with suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", ports[number % len(ports)]), 5))
    return held


def _send_frames(targets: Targets, draw: random.Random) -> tuple[Counter[str], int]:
    """Replayed, mutated, cut and extended frames; returns how many of each, and leaked secrets."""
    counts: Counter[str] = Counter()
    leaks = 0
    open_ones = []
    secrets = [bytes.fromhex(secret) for secret in targets.secrets]
    names = sorted(targets.ports)
    for _ in range(targets.num_frames):
        name = draw.choice(names)
        kind, data = _frame(bytes.fromhex(draw.choice(targets.captures[name])), draw)
        counts[f"{name} {kind}"] += 1
        answer = b""
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", targets.ports[name]), 5)
            open_ones.append(connection)
            connection.settimeout(ANSWER_S)
            answer += connection.recv(4096)
            connection.sendall(data)
            if draw.random() < 0.2:
                answer += connection.recv(1 << 16)
        leaks += any(secret in answer for secret in secrets)
        while len(open_ones) > HELD:
            open_ones.pop(0).close()
    return counts, leaks


def _frame(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    kind = draw.choice(["replayed", "mutated", "truncated", "extended"])
    if kind == "mutated":
        changed = bytearray(data)
        for _ in range(draw.randint(1, 8)):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return kind, bytes(changed)
    if kind == "truncated":
        return kind, data[: draw.randrange(len(data))]
    if kind == "extended":
        return kind, data + draw.randbytes(draw.randrange(1, 2000))
    return kind, data


def _try_directories(targets: Targets) -> list[str]:
    """What could be listed, read, changed or planted."""
    got = []
    for name in targets.directories:
        directory = Path(name)
        with suppress(OSError):
            os.listdir(directory)
            got.append(f"listed {name}")
        for path in (directory / "a.snapshot", directory / "copies.limit"):
            with suppress(OSError):
                path.read_bytes()
                got.append(f"read {path}")
            with suppress(OSError):
                path.write_bytes(b"")
                got.append(f"wrote {path}")
        with suppress(OSError):
            (directory / "planted.snapshot").symlink_to("/etc/passwd")
            got.append(f"planted in {name}")
        with suppress(OSError):
            os.mkfifo(directory / "pipe.snapshot")
            got.append(f"planted in {name}")
        with suppress(OSError):
            os.rename(directory, tempfile.mkdtemp() + "/taken")
            got.append(f"took {name}")
    return got


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")
