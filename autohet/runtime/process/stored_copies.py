"""Copies of small growing texts (events, logs, reports) in a job's storage.

They are updated from time to time, so that they outlive their machine.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from recovery.errors import RecoveryError
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage, StorageOptions

logger = logging.getLogger(__name__)

PERIOD_S = 30.0
SOON_S = 1.0
LARGEST_SHARE = 0.01
"""Limit on the fraction of time spent on copying.

Texts that have grown large, or go to a slow storage, are copied less often.
"""
CLOSE_S = 20.0
OPTIONS = StorageOptions(attempts=2, request_timeout_s=15.0)
ByteSource = Callable[[], bytes | None]


class StoredCopies:
    """Thread that copies each source whole to `prefix/<name>` when it has changed.

    A storage failure is logged once for each reason and is otherwise harmless. The storage is not
    opened before there is something to copy.
    """

    def __init__(
        self,
        storage: str,
        prefix: str,
        sources: Mapping[str, ByteSource],
        period_s: float = PERIOD_S,
    ) -> None:
        self._uri = storage
        self._prefix = prefix
        self._period_s = period_s
        self._sources = dict(sources)
        self._storage: Storage | None = None
        self._copied: dict[str, int] = {}
        self._said: set[str] = set()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stored-copies", daemon=True)
        self._thread.start()

    def add(self, name: str, source: ByteSource) -> None:
        self._sources = {**self._sources, name: source}

    def soon(self) -> None:
        """Copy soon, without waiting for the end of the period."""
        self._wake.set()

    def close(self) -> None:
        """Copy the sources that have changed, and end; wait at most `CLOSE_S`."""
        self._ended.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        pause = self._period_s
        while not self._ended.is_set():
            self._wake.wait(pause)
            self._ended.wait(SOON_S)  # what is said next goes along
            self._wake.clear()
            begun = time.monotonic()
            self._copy()
            pause = max(self._period_s, (time.monotonic() - begun) / LARGEST_SHARE)
        self._copy()
        if self._storage is not None:
            self._storage.close()

    def _copy(self) -> None:
        for name, source in self._sources.items():
            try:
                self._copy_one(name, source())
            except (RecoveryError, OSError) as error:
                text = str(error)
                if text not in self._said:
                    self._said.add(text)
                    logger.info("%s is not copied to %s yet: %s", name, self._uri, text)

    def _copy_one(self, name: str, data: bytes | None) -> None:
        if not data or self._copied.get(name) == hash(data):
            return
        if self._storage is None:
            self._storage = open_storage(self._uri, OPTIONS)
        self._storage.put(f"{self._prefix}/{name}", data)
        self._copied[name] = hash(data)


def tail_of(path: str, start: int = 0) -> bytes | None:
    """Return the file at `path` from byte `start` on; None while there is none."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(start)
        return file.read()
    return None
