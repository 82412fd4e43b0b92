"""Patience of a driver with what its checks find wrong. In a restart it was right when the first
driver of the run looked, so it may pass; a storage that throttles or fails passes at any start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from autohet.driver.supervise import is_restart
from planner.errors import ConfigError
from recovery.storage.errors import StorageError, StorageFailing, StorageThrottled

logger = logging.getLogger("autohet")
T = TypeVar("T")
RETRY_S = 2.0
REMIND_S = 30.0


def with_patience(check: Callable[[], T], patience_s: float) -> T:
    """The answer of `check`. Its errors are logged, and it is tried again for `patience_s`, in a
    restart and where they pass by themselves; else they are the user's.

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
    kinds = (StorageThrottled, StorageFailing)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)
