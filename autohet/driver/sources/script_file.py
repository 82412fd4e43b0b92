"""Notices from anybody's script: a file of JSON lines, or what a command prints, read over and
over.

    {"node": "g5-0", "in_s": 90, "reason": "maintenance"}          one node, 90 s from when the line was first read
    {"instance": "i-0123", "time": "2026-11-24T10:00:00Z"}         by EC2's id, at a date of this machine's clock
    {"node": "g6e-1", "risk": true}                                a hint: copy more, do not leave

What a line said stands when the line is gone; a line that names a node again stands in its place.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from autohet.driver.control.observation import Notice
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.watch import Watch

logger = logging.getLogger("autohet.sources")
COMMAND_TIMEOUT_S = 10.0
MAX_BYTES = 1 << 20
MOST_SAID = 10_000


@dataclass(frozen=True)
class Said:
    """One line. `deadline`: on this process's monotonic clock."""

    subject: str
    reason: str
    risk: bool
    deadline: float | None


def parse_line(line: str, now: float) -> Said:
    """What a line says, first read at `now` (monotonic).

    Raises:
        ValueError: says what is wrong with it.
    """
    try:
        document: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON: {line[:80]!r}") from None
    if not isinstance(document, dict):
        raise ValueError(f"no object: {line[:80]!r}")
    subject = document.get("node") or document.get("instance")
    if not isinstance(subject, str):
        raise ValueError(f"a line that names no node and no instance: {line[:80]!r}")
    return Said(
        subject,
        str(document.get("reason", "says so"))[:200],
        document.get("risk") is True,
        _deadline(document, now),
    )


def _deadline(document: dict[str, Any], now: float) -> float | None:
    in_s, date = document.get("in_s"), document.get("time")
    if in_s is None and date is None:
        return None
    try:
        left = (
            float(in_s)
            if in_s is not None
            else datetime.fromisoformat(str(date)).timestamp() - time.time()
        )
    except (TypeError, ValueError, OverflowError):
        left = math.nan
    if not math.isfinite(left):
        raise ValueError(
            f"a deadline that cannot be read: {str(in_s if in_s is not None else date)[:80]!r}"
        )
    return now + left


def run_bounded(command: Sequence[str]) -> bytes:
    """Run `command` and return at most MAX_BYTES of its output. One that prints more, or takes
    longer than COMMAND_TIMEOUT_S, is killed with all that it started.

    Raises:
        OSError, TimeoutError, CalledProcessError.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        output, ended = _read_bounded(process.stdout, time.monotonic() + COMMAND_TIMEOUT_S)
        status = process.wait(COMMAND_TIMEOUT_S) if ended else 0
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait(COMMAND_TIMEOUT_S)
    if status != 0:
        raise subprocess.CalledProcessError(status, command)
    return output


def _read_bounded(stream: IO[bytes], deadline: float) -> tuple[bytes, bool]:
    """Read until the end or MAX_BYTES; returns the bytes, and whether the stream has ended.

    Raises TimeoutError at `deadline` (monotonic).
    """
    data = b""
    while len(data) < MAX_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            raise TimeoutError(f"the command took longer than {COMMAND_TIMEOUT_S:.0f} s")
        piece = os.read(stream.fileno(), MAX_BYTES - len(data))
        if not piece:
            return data, True
        data += piece
    return data, False


class ScriptNotices:
    """Owns a thread that reads `file` or runs `command` every `poll_s`."""

    def __init__(self, file: str | None, command: Sequence[str] | None, poll_s: float) -> None:
        self._file, self._command = file, tuple(command or ())
        self._lines: dict[str, None] = {}
        self._said: dict[tuple[str, bool], Said] = {}
        self._watch = Watch("the script of notices", self._read, poll_s)

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        ahead = now - time.monotonic()
        found = []
        for node in nodes:
            for subject in (node.name, node.instance_id):
                for risk in (False, True):
                    said = self._said.get((subject or "", risk))
                    if said is not None:
                        deadline = None if said.deadline is None else said.deadline + ahead
                        found.append(
                            Notice(node.name, f"script: {said.reason}", now, deadline, said.risk)
                        )
        return found

    def _read(self) -> int:
        text = self._text()
        now = time.monotonic()
        for line in filter(None, map(str.strip, text.splitlines())):
            if line in self._lines or len(self._lines) >= MOST_SAID:
                continue
            self._lines[line] = None
            try:
                said = parse_line(line, now)
            except ValueError as error:
                logger.warning("The script of notices says %s", error)
                continue
            self._said = {**self._said, (said.subject, said.risk): said}
        return len(self._lines)

    def _text(self) -> str:
        if self._file is not None:
            try:
                with Path(self._file).open("rb") as file:
                    return file.read(MAX_BYTES).decode("utf-8", "replace")
            except FileNotFoundError:
                return ""  # nothing is said yet: no failure, after which a watch asks more seldom
        return run_bounded(self._command).decode("utf-8", "replace")

    def close(self) -> None:
        self._watch.close(COMMAND_TIMEOUT_S + 1.0)
