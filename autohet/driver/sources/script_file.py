"""Notices from a user's script: a file of JSON lines, or a command's output, polled.

    {"node": "g5-0", "in_s": 90, "reason": "maintenance"}          one node, 90 s from when the line was first read
    {"instance": "i-0123", "time": "2026-11-24T10:00:00Z"}         by the cloud's id, at a date of this machine's clock
    {"node": "10.0.0.7", "in_s": 30}                               by its address, host name, or name at the cloud
    {"node": "g6e-1", "risk": true}                                a hint: copy more, do not leave

A line that names no node is logged with the names that exist.

A line belongs to the node that has the name when the line is first read, by Ray's id, and ends with
that node: the next node of the name is another. A notice stands when its line is gone; a later line
that names the node again replaces it. Lines are remembered beyond the driver, so that one that
is started again neither counts `in_s` anew nor reads an old line as a new one.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Protocol

from autohet.control.values.observation import Notice
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.watch import Watch
from planner.inputs.documents import Document

logger = logging.getLogger("autohet.sources")
COMMAND_TIMEOUT_S = 10.0
MAX_BYTES = 1 << 20
MOST_SAID = 10_000
MOST_LOGGED = 10
"""Lines that cannot be read and are logged, each once; a command may print the same for ever."""
UNKNOWN_S = 60.0
"""Seconds for which a line may name a node that is not there yet.

A node of that name that comes later is another node.
"""


@dataclass(frozen=True)
class Said:
    """Parsed line. `deadline`: on this process's monotonic clock."""

    subject: str
    reason: str
    risk: bool
    deadline: float | None


def parse_line(line: str, now: float) -> Said:
    """Parse a line that was first read at `now` (monotonic).

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


def _deadline(document: Document, now: float) -> float | None:
    in_s = document.get("in_s")
    date = document.get("time")
    if in_s is None and date is None:
        return None
    given = date if in_s is None else in_s
    try:
        if in_s is not None:
            left_s = float(in_s)
        else:
            left_s = datetime.fromisoformat(str(date)).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        left_s = math.nan
    if not math.isfinite(left_s):
        raise ValueError(f"a deadline that cannot be read: {str(given)[:80]!r}")
    return now + left_s


def run_bounded(command: Sequence[str]) -> bytes:
    """Run `command` and return at most MAX_BYTES of its output.

    A command that prints more, or takes longer than COMMAND_TIMEOUT_S, is killed with all that it
    started.

    Raises:
        OSError, TimeoutError, CalledProcessError.
    """
    # A session of its own, so that a kill reaches all that the command starts.
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
    """Read until the end or MAX_BYTES; return the bytes, and true if the stream has ended.

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


class LineMemory(Protocol):
    """Storage of lines that outlives the driver, but not the cluster."""

    def load(self) -> Document:
        """Return the document saved last; {} if there is none."""
        ...

    def save(self, document: Document) -> None:
        """Save this JSON document."""
        ...


@dataclass
class Line:
    """Line that was read.

    read_at: time by the wall clock; node: Ray's id of the node that it belongs to; lapsed: no node
    had its name for `UNKNOWN_S`; logged: that no node has its name is logged.
    """

    said: Said
    read_at: float
    node: str = ""
    lapsed: bool = False
    logged: bool = False


def nodes_by_name(nodes: Sequence[WatchedNode]) -> dict[str, str]:
    """Return Ray's id of each node by every name that is its alone."""
    counts = Counter(alias for node in nodes for alias in {*node.aliases})
    by_name: dict[str, str] = {}
    for node in nodes:
        by_name |= {alias: node.ray_id for alias in node.aliases if alias and counts[alias] == 1}
    # The name in plans comes last: no address of another machine hides it.
    return by_name | {node.name: node.ray_id for node in nodes}


def _names(node: WatchedNode) -> str:
    others = [alias for alias in (*node.aliases, node.instance_id) if alias != node.ray_id]
    return " = ".join(dict.fromkeys(name for name in (node.name, *others) if name))


class ScriptNotices:
    """Owns a thread that reads `file` or runs `command` every `poll_s`."""

    def __init__(
        self,
        file: str | None,
        command: Sequence[str] | None,
        poll_s: float,
        memory: LineMemory | None = None,
    ) -> None:
        self._file = file
        self._command = tuple(command or ())
        self._memory = memory
        self._lock = threading.Lock()
        self._lines: dict[str, Line] = {}
        """Lines by their number among equal ones and their text, in the order of reading."""
        self._refused: set[str] = set()
        self._num_unknown = 0
        self._living: frozenset[str] = frozenset()
        self._recall()
        self._saved = self._document()
        self.watch = Watch("the script of notices", self._read, poll_s)

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        ahead = now - time.monotonic()
        self._living = frozenset(node.ray_id for node in nodes)
        with self._lock:
            self._bind(nodes)
            lines = list(self._lines.values())
        self._remember()
        found: dict[tuple[str, bool], Notice] = {}
        for node in nodes:
            for line in lines:
                said = line.said
                if line.node == node.ray_id or said.subject == node.instance_id:
                    # Lines are in the order of reading: a later one replaces the notice.
                    deadline = None if said.deadline is None else said.deadline + ahead
                    text = f"script: {said.reason}"
                    notice = Notice(node.name, text, now, deadline, said.risk)
                    found[node.name, said.risk] = notice
        return list(found.values())

    def _bind(self, nodes: Sequence[WatchedNode]) -> None:
        """Assign each new line to its node."""
        by_name = nodes_by_name(nodes)
        instances = {node.instance_id for node in nodes}
        for line in self._lines.values():
            if line.node or line.lapsed or line.said.subject in instances:
                continue
            line.node = by_name.get(line.said.subject, "")
            if line.node or not nodes:
                continue
            line.lapsed = time.time() - line.read_at > UNKNOWN_S
            if not line.logged:
                line.logged = True
                self._log_unknown(line.said.subject, nodes)

    def _log_unknown(self, subject: str, nodes: Sequence[WatchedNode]) -> None:
        """Log that no node has a line's name, with the names that exist."""
        self._num_unknown += 1
        if self._num_unknown <= MOST_LOGGED:
            known = "; ".join(_names(node) for node in nodes[:MOST_LOGGED])
            logger.warning(
                "The script of notices names %r, which is no node of this job; its %d nodes: %s",
                subject[:80],
                len(nodes),
                known,
            )

    def _read(self) -> int:
        text = self._text()
        now = time.monotonic()
        count: Counter[str] = Counter()
        for untrimmed in text.splitlines():
            line = untrimmed.strip()
            if not line:
                continue
            count[line] += 1
            key = f"{count[line]} {line}"
            is_known = line in self._refused or key in self._lines
            if is_known or len(self._lines) >= MOST_SAID:
                continue
            try:
                said = parse_line(line, now)
            except ValueError as error:
                self._refuse(line, error)
                continue
            with self._lock:
                if not self._is_repeated(line, count[line]):
                    self._lines[key] = Line(said, time.time())
        return len(self._lines)

    def _refuse(self, line: str, error: ValueError) -> None:
        if len(self._refused) < MOST_SAID:
            self._refused.add(line)
        if len(self._refused) <= MOST_LOGGED:
            logger.warning("The script of notices says %s", error)
        if len(self._refused) == MOST_LOGGED:
            logger.warning("Further lines of the script of notices are not logged")

    def _is_repeated(self, text: str, number: int) -> bool:
        """Return true if the equal line before it still stands.

        That line stands while its node lives, or while it has no node yet.
        """
        before = self._lines.get(f"{number - 1} {text}")
        return before is not None and (not before.node or before.node in self._living)

    def _document(self) -> Document:
        return {key: [line.read_at, line.node, line.lapsed] for key, line in self._lines.items()}

    def _remember(self) -> None:
        with self._lock:
            shown = self._document()
        if shown != self._saved:
            self._saved = shown
            if self._memory is not None:
                self._memory.save(shown)

    def _recall(self) -> None:
        """Load the lines of an earlier driver, with the moments at which it read them."""
        if self._memory is None:
            return
        ahead = time.time() - time.monotonic()
        for key, (said_at, node, lapsed) in self._memory.load().items():
            # The clock of the driver before may have been ahead of this one.
            read_at = min(float(said_at), time.time())
            said = parse_line(key.partition(" ")[2], read_at - ahead)
            self._lines[key] = Line(said, read_at, str(node), bool(lapsed))

    def _text(self) -> str:
        if self._file is not None:
            try:
                with Path(self._file).open("rb") as file:
                    return file.read(MAX_BYTES).decode("utf-8", "replace")
            except FileNotFoundError:
                # Nothing is said yet. A failure would make the watch ask more seldom.
                return ""
        return run_bounded(self._command).decode("utf-8", "replace")

    def close(self) -> None:
        self.watch.close(COMMAND_TIMEOUT_S + 1.0)
