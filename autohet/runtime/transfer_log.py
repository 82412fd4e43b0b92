"""Log of a worker's copies that have ended: uploads, replication rounds and spills to disk."""

from __future__ import annotations

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
        self._ended.append((time.monotonic() if ended_at is None else ended_at, transfer))

    def take(self) -> tuple[StateTransfer, ...]:
        """Return the copies that have ended since the last call."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        now = time.monotonic()
        return tuple(replace(transfer, ended_ago_s=max(0.0, now - at)) for at, transfer in ended)
