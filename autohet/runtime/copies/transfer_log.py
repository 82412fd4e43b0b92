"""Log of a worker's copies that have ended: uploads, replication rounds and spills to disk."""

import time
from collections import deque
from dataclasses import replace

from autohet.runtime.messages import StateTransfer


class TransferLog:
    """Copies that have ended and are not reported yet. Several threads add to it."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, StateTransfer]] = deque()
        """Transfers with the moment of each one's end."""

    def add(self, transfer: StateTransfer, ended_at: float | None = None) -> None:
        """Record a copy that ended now, or at `ended_at` by the monotonic clock."""
        if ended_at is None:
            ended_at = time.monotonic()
        self._ended.append((ended_at, transfer))

    def take(self) -> tuple[StateTransfer, ...]:
        """Return the copies that have ended since the last call."""
        # As many as there are now: other threads may add more meanwhile.
        taken = [self._ended.popleft() for _ in range(len(self._ended))]
        now = time.monotonic()
        reported = []
        for ended_at, transfer in taken:
            ago_s = max(0.0, now - ended_at)
            reported.append(replace(transfer, ended_ago_s=ago_s))
        return tuple(reported)
