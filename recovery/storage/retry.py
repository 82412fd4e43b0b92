"""When a failed request is tried again: a pure schedule."""

from __future__ import annotations

import random

from recovery.storage.protocol import StorageOptions

MAX_PAUSE_S = 20.0
"""Longest pause between two tries of a patient request."""


class RetrySchedule:
    """Pauses between the tries of one request: exponential with jitter.

    `attempts` and `request_timeout_s` bound the tries; whoever works in the background has
    `patience_s` on top: a store may ask for fewer requests for minutes (S3: 503 SlowDown).
    """

    def __init__(self, options: StorageOptions, patience_s: float, now: float) -> None:
        self._options = options
        self._stop_at = now + options.request_timeout_s
        self._patient_until = now + patience_s
        self._pause_s = options.backoff_s
        self._failures = 0
        self.is_late = False
        """Whether the next try is the first that patience alone allows."""

    def next_pause_s(self, now: float) -> float | None:
        """Return the pause before the next try after one that failed; None: there is none."""
        self._failures += 1
        pause_s = self._pause_s * random.uniform(0.5, 1.5)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        until = now + pause_s
        usual = self._failures < self._options.attempts and until <= self._stop_at
        self.is_late = not usual and self._failures == self._options.attempts
        if usual or until <= self._patient_until:
            return pause_s
        return None
