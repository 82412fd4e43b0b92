"""Retries of a driver's checks.

A restarted driver retries any error, since the same check passed when the first driver of the run
made it. An error of a storage that throttles or fails is retried at any start.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from autohet.driver.job.supervise import is_restart
from planner.errors import ConfigError
from recovery.storage.errors import PASSING, StorageError

logger = logging.getLogger("autohet")
T = TypeVar("T")
RETRY_S = 2.0
REMIND_S = 30.0


def with_patience(check: Callable[[], T], patience_s: float) -> T:
    """Return the answer of `check`; log and retry its transient errors for `patience_s`.

    All errors of a restarted driver count as transient, else only those that pass by themselves.
    Other errors are the user's.

    Raises:
        ConfigError, StorageError: as `check` does.
    """
    deadline = time.monotonic() + patience_s
    said_at: float | None = None
    while True:
        try:
            return check()
        except (ConfigError, StorageError) as error:
            now = time.monotonic()
            if now >= deadline or not (is_restart() or _passes(error)):
                raise
            if said_at is None or now - said_at >= REMIND_S:
                said_at = now
                logger.warning(
                    "Deciding to try again for %.0f s before this run goes on, since %s",
                    deadline - now,
                    error,
                )
            time.sleep(RETRY_S)


def _passes(error: BaseException) -> bool:
    """Return true if the storage throttles requests or answers with server errors."""
    return isinstance(error, PASSING) or isinstance(error.__cause__, PASSING)
