"""`events.jsonl`: every decision and its cause, one JSON object a line.

Each is also logged as a sentence.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from autohet.control.values.effects import Decision, Remark
from planner.inputs.documents import Document, Json

logger = logging.getLogger("autohet")

KINDS = (
    "started",
    "plan",
    "step",
    "snapshot",
    "checkpoint",
    "checkpoint_failed",
    "memory_shortage",
    "compile_fallback",
    "notice",
    "risk",
    "death",
    "departure",
    "arrival",
    "price",
    "slow",
    "calibration",
    "parted",
    "audit",
    "skipped",
    "from_scratch",
    "evaluation",
    "decision",
    "reconfigure",
    "restore",
    "transfers",
    "finished",
    "failed",
)
WARNINGS = ("checkpoint_failed", "memory_shortage", "compile_fallback", "from_scratch", "audit")
"""Kinds whose sentence is logged as a warning."""
FREQUENT = ("step", "snapshot", "transfers")
"""Kinds that are written to the file, but not kept in memory."""


class EventLog:
    """Log of events, appended to a file line by line and flushed; kept in memory for the summary.

    Owned by the driver alone. `listener` is called with each event, the frequent ones too, and must
    return at once.
    """

    def __init__(
        self,
        path: Path | None,
        wall_clock: Callable[[], float] = time.time,
        listener: Callable[[Json], None] | None = None,
    ) -> None:
        self.path = path
        self.records: list[Document] = []
        self._wall_clock = wall_clock
        self._listener = listener
        self.is_silenced: Callable[[], bool] = lambda: False
        """Function that returns True once another driver tells what happens."""
        self._has_warned = False
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
            if _is_cut_off(path):
                self._write("\n")

    def emit(self, kind: str, generation: int, sentence: str | None = None, **fields: Any) -> None:
        """Record an event that is no decision."""
        self.tell(Decision(kind=kind, generation=generation, sentence=sentence, fields=fields))

    def tell(self, what: Decision | Remark) -> None:
        """Record a decision or remark, and log its sentence, if it has one."""
        if self.is_silenced():
            return
        if what.sentence is not None:
            level = logging.WARNING if _is_warning(what) else logging.INFO
            logger.log(level, "%s", what.sentence)
        if isinstance(what, Decision):
            self._record({"time": self._wall_clock(), **what.document()})

    def _record(self, record: Document) -> None:
        kind = record["kind"]
        assert kind in KINDS, kind
        if kind not in FREQUENT:
            self.records.append(record)
        if self._file is not None:
            self._write(json.dumps(finite(record)) + "\n")
        if self._listener is not None:
            self._listener(record)

    def _write(self, line: str) -> None:
        """Write a line.

        An error (a full disk, say) costs the record, never the job; it is logged once.
        """
        assert self._file is not None
        try:
            self._file.write(line)
            self._file.flush()
        except OSError:
            # Once, since a full disk fails each event.
            if not self._has_warned:
                logger.warning("Events cannot be written to %s", self._file.name, exc_info=True)
            self._has_warned = True

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of what could not be written
                self._file.close()
            self._file = None


def failing_note(status: Json) -> str:
    """Return a note on failing checkpoints for a status line; empty where none fails."""
    failing = status.get("checkpoint_failing")
    safe = status.get("checkpoint_step")
    if failing is None:
        return ""
    kept = "no step is safe" if safe is None else f"step {safe} is safe"
    return f"  CHECKPOINT OF STEP {failing['step']} FAILED, {kept}: {failing['reason']}"


def _is_warning(what: Decision | Remark) -> bool:
    if isinstance(what, Remark):
        return what.warning
    return what.kind in WARNINGS


def _is_cut_off(path: Path) -> bool:
    """Return True if the file ends in the middle of a line, as a killed driver may leave it."""
    # A pipe, say, has no end to look at: seeking raises, and nothing is cut off.
    with suppress(OSError), open(path, "rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    return False


def finite(value: Any) -> Any:
    """Return `value` with None for each number that is not finite.

    JSON has no word for such a number, and its readers refuse Python's.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
