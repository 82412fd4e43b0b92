"""Retries of failed requests: a pure schedule, and the log messages of a storage's waits."""

import logging
import random
import threading
from collections.abc import Callable

from recovery.storage.errors import StorageError
from recovery.storage.protocol import StorageOptions

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 20.0
"""Longest pause between two tries of a patient request."""


class RetrySchedule:
    """Pauses between the tries of one request: exponential with jitter.

    `attempts` and `request_timeout_s` bound the tries. Background work has `patience_s` on top: a
    store may ask for fewer requests for minutes (S3: 503 SlowDown).
    """

    def __init__(self, options: StorageOptions, patience_s: float, now: float) -> None:
        self._options = options
        self._stop_at = now + options.request_timeout_s
        self._patient_until = now + patience_s
        self._pause_s = options.backoff_s
        self._failures = 0
        self.is_late = False
        """True if patience alone allows the next try."""

    def next_pause_s(self, now: float, *, patient: bool = True) -> float | None:
        """Return the seconds to wait before the next try after a failure; None: no more tries.

        Without `patient`, there are only the usual tries.
        """
        self._failures += 1
        pause_s = self._pause_s * random.uniform(0.5, 1.5)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        until = now + pause_s
        usual = self._failures < self._options.attempts and until <= self._stop_at
        self.is_late = not usual
        if usual or (patient and until <= self._patient_until):
            return pause_s
        return None


class Patience:
    """Time for which requests of one storage object wait out a storage that does not serve them.

    Such a storage throttles, fails or does not answer. Threads share the object. Of all requests
    that wait, it logs the first that begins to wait and the first that is answered again.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        on_wait: Callable[[StorageError], None] | None = None,
        until: threading.Event | None = None,
    ) -> None:
        """Start with no request waiting.

        `on_wait` is called, by the request's thread, whenever a wait is logged. Once `until` is
        set, no request waits any more.
        """
        self._seconds = seconds
        self._on_wait = on_wait
        self.until = until
        self._lock = threading.Lock()
        self._waiting_since: float | None = None

    @property
    def seconds(self) -> float:
        """Patience that is left to a request that begins now."""
        if self.until is not None and self.until.is_set():
            return 0.0
        return self._seconds

    def note_wait(self, error: StorageError, now: float) -> None:
        """Record that a request has failed for longer than usual, and is retried.

        No request waits longer than `seconds`: a wait recorded before that was another failure.
        """
        with self._lock:
            since = self._waiting_since
            if since is not None and now - since <= self._seconds:
                return
            self._waiting_since = now
        logger.warning("%s; trying again for up to %.0f s", error, self._seconds)
        if self._on_wait is not None:
            self._on_wait(error)

    def note_answer(self, uri: str, now: float) -> None:
        """Record that a request that had waited was answered."""
        with self._lock:
            since = self._waiting_since
            self._waiting_since = None
        if since is not None:
            logger.warning("%s answers again after %.0f s", uri, now - since)
