"""Log of one process of a job, on standard error and, with a delay, in the job's storage.

Each line has the process's name and generation. A node that dies takes its log files along, and the
head takes Ray's: the copies in the storage outlive both.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from autohet.runtime.process.stored_copies import StoredCopies

MOST_BYTES = 1 << 20
"""Size limit of the log that is kept for the storage; the newest lines stay."""


@dataclass(frozen=True)
class RunRecord:
    """Destination of a run's events and logs: `prefix` within the job's storage."""

    storage: str
    prefix: str


class GenerationFormatter(logging.Formatter):
    """Formatter of `2026-11-25T02:40:07Z a100-0/0 generation 3 WARNING autohet.worker: ...`.

    The generation is the current one.
    """

    def __init__(self, who: str) -> None:
        super().__init__(
            "%(asctime)sZ %(who)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
        )
        self.converter = time.gmtime
        self.who = who
        self.generation: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        record.who = (
            self.who if self.generation is None else f"{self.who} generation {self.generation}"
        )
        return super().format(record)


class ProcessLog(logging.Handler):
    """Handler that keeps a process's newest lines in memory and copies them to `record`.

    It owns a thread that copies. Set `generation` when it changes.
    """

    def __init__(self, who: str, record: RunRecord | None) -> None:
        super().__init__()
        self._formatter = GenerationFormatter(who)
        self.setFormatter(self._formatter)
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._guard = threading.Lock()
        name = f"logs/{who.replace('/', '-')}.log"
        self._copies = (
            None
            if record is None
            else StoredCopies(record.storage, record.prefix, {name: self.text})
        )

    @property
    def generation(self) -> int | None:
        return self._formatter.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._formatter.generation = generation

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record).encode() + b"\n"
        with self._guard:
            self._lines.append(line)
            self._num_bytes += len(line)
            while self._num_bytes > MOST_BYTES and len(self._lines) > 1:
                self._num_bytes -= len(self._lines.popleft())
        if self._copies is not None and record.levelno >= logging.WARNING:
            self._copies.soon()  # its process may be about to end

    def text(self) -> bytes:
        with self._guard:
            return b"".join(self._lines)

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        if self._copies is not None:
            self._copies.close()
        super().close()


def log_as(who: str, record: RunRecord | None) -> ProcessLog:
    """Configure logging of this process as `who`: a worker or a node agent.

    The process must be its own, since the root logger is configured.
    """
    log = ProcessLog(who, record)
    stream = logging.StreamHandler()
    stream.setFormatter(log.formatter)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(stream)
    root.addHandler(log)
    for noisy in ("boto3", "botocore", "urllib3", "s3transfer"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return log
