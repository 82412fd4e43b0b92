"""Record that a run leaves in its job's storage, next to the checkpoints.

`runs/<start>-<id>/` has events, logs, report and timeline.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from autohet.control.ledger.ledger import NOTHING_TOLD, ToldSteps
from autohet.driver.job.supervise import is_restart
from autohet.driver.report.events import last_run, read_events
from autohet.driver.report.write import report_paths
from autohet.runtime.job import Job
from autohet.runtime.process.log import ProcessLog, RunRecord
from autohet.runtime.process.stored_copies import StoredCopies, tail_of
from planner.errors import ConfigError


class RunCopies:
    """Copies of the driver's part of a run's record to the storage.

    They are the run's events, those of killed drivers of the same run included, the driver's own
    log, and at the end the report. Workers and agents copy their own logs. Nothing is copied before
    `begin`: a job that is refused leaves nothing in a storage that may be another's.
    """

    def __init__(self, job: Job, events: Path | None) -> None:
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.record = RunRecord(job.checkpoint_storage, f"runs/{started}-{secrets.token_hex(3)}")
        self._events = events
        self._start = 0
        if events is not None and events.exists():
            self._start = begin_of_run(events, goes_on=is_restart())
        self._log: ProcessLog | None = None
        self._copies: StoredCopies | None = None

    def begin(self) -> None:
        """Begin to copy; no-op after the first call."""
        if self._log is not None:
            return
        self._log = ProcessLog("driver", self.record)
        logger = logging.getLogger("autohet")
        if logger.level == logging.NOTSET:
            # The default level lets no decision through to the log.
            logger.setLevel(logging.INFO)
        logger.addHandler(self._log)
        if self._events is not None:
            source = partial(tail_of, str(self._events), self._start)
            self._copies = StoredCopies(
                self.record.storage, self.record.prefix, {"events.jsonl": source}
            )

    def note(self, event: Mapping[str, Any]) -> None:
        """Update the generation in the log's lines to that of the newest event."""
        if self._log is not None:
            self._log.generation = event["generation"]

    def close(self) -> None:
        """Finish the copies after the report is written; waits for the storage, within bounds."""
        if self._copies is not None and self._events is not None:
            for path in report_paths(self._events):
                self._copies.add(path.name, partial(tail_of, str(path)))
            self._copies.close()
        if self._log is not None:
            logging.getLogger("autohet").removeHandler(self._log)
            self._log.close()


def steps_told(path: Path | None) -> ToldSteps:
    """Return the steps in the events of this run's earlier drivers; empty if unreadable."""
    if path is None:
        return NOTHING_TOLD
    try:
        events = last_run(read_events(path))
    except ConfigError:
        return NOTHING_TOLD

    first: int | None = None
    steps = set()
    committed = []
    newest = (0, -1)
    for event in events:
        if event["kind"] == "started" and first is None:
            first = int(event["step"])
        elif event["kind"] == "step":
            steps.add(int(event["step"]))
            newest = max(newest, (int(event["generation"]), int(event["step"])))
        elif event["kind"] == "checkpoint":
            committed.append(int(event["step"]))
    return ToldSteps(first or 0, frozenset(steps), max(committed, default=None), newest)


def begin_of_run(events: Path, *, goes_on: bool) -> int:
    """Return the byte at which a run's part of this file begins.

    It is the end of the file. If the run continues that of a killed driver, it is the last line
    that begins a new run.
    """
    content = events.read_bytes()
    if not goes_on:
        return len(content)
    # Bytes, not parsed lines: the last line of a killed driver may be half of one.
    position = 0
    begin = 0
    for line in content.splitlines(keepends=True):
        if b'"kind": "started"' in line and b'"restart": true' not in line:
            begin = position
        position += len(line)
    return begin
