"""Requests for data in S3.

They share the client configuration of checkpoints, wait while the storage throttles or fails, and
raise errors that say what to do.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from planner.errors import ConfigError

PATIENCE_S = 300.0
"""Seconds during which a request is retried after transient errors."""
T = TypeVar("T")


def s3_client() -> Any:
    """Create an S3 client like that of checkpoints, from boto3's standard chain."""
    from botocore.config import Config

    from recovery.storage.s3_client import make_client

    config = Config(
        connect_timeout=10, read_timeout=60, retries={"max_attempts": 5, "mode": "standard"}
    )
    return make_client(config=config)


def from_s3(uri: str, request: Callable[[], T], *, reached: bool = True) -> T:
    """Return the answer of `request`, retrying transient errors.

    `request` must be safe to repeat. Throttling and server errors are retried for `PATIENCE_S`,
    which is logged once. An unreachable storage is retried only if it was `reached` before.

    Raises:
        ConfigError: the request was refused, or kept failing; the message is that of checkpoints.
    """
    from s3transfer.exceptions import RetriesExceededError

    from recovery.storage.errors import PASSING, ObjectMissing
    from recovery.storage.protocol import StorageOptions
    from recovery.storage.retry import Patience, RetrySchedule
    from recovery.storage.s3_errors import S3_FAILURES, translate

    patience = Patience(PATIENCE_S)
    schedule = RetrySchedule(StorageOptions(attempts=1), PATIENCE_S, time.monotonic())
    while True:
        try:
            answer = request()
        except (*S3_FAILURES, RetriesExceededError) as error:
            is_network_error = isinstance(error, ConnectionError | TimeoutError)
            if isinstance(error, OSError) and not is_network_error:
                # The disk failed that the object is written to.
                raise
            # s3transfer wraps the error of its last attempt.
            last: Any = getattr(error, "last_exception", error)
            found, again = translate(uri, last)
            passes = again and (reached or isinstance(found, PASSING))
            pause_s = None
            if passes:
                pause_s = schedule.next_pause_s(time.monotonic())
            if pause_s is None:
                reason = str(found)
                if isinstance(found, ObjectMissing):
                    reason = f"{uri}: the object is gone; the source changed while it was read"
                raise ConfigError(f"data.source {reason}") from error
        else:
            patience.note_answer(uri, time.monotonic())
            return answer
        patience.note_wait(found, time.monotonic())
        time.sleep(pause_s)
