"""Groups on the CPU.

gloo has no abort. What wakes its waiters (measured, torch 2.13: 15 ms) is a receive that times out
on the same context: gloo then closes all connections of that context and fails its pending
operations ("Application timeout caused pair closure"). The group is dropped afterwards; new ones
work. A message that is half through, on a slow link or from a peer that died in it, is not among
those: nothing wakes who waits for it before its own deadline. So waits are in a thread of their
own, which is left behind.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from autohet.runtime.groups.group import Group

POISON_TAG = 1 << 30
WAKE_S = 0.05
"""Between two looks whether connections were closed under an operation that nothing wakes."""


class GlooGroup(Group):
    """A group whose waits are all the host's: its constructor connects everybody, and an error ends
    the wait that meets it.
    """

    in_stream_order = False

    def _create(self, store: Store) -> Any:
        self._waiters: deque[_Waiter] = deque()
        self._closed = threading.Event()
        return ProcessGroupGloo(store, self.rank, self.size, self._limit())

    def connect(self) -> None:
        """The constructor has done it."""

    def wait_on_stream(self, work: Work | None) -> None:
        if work is not None:
            self._call(lambda: self._wait(work))

    def wait_on_host(self, work: Work | None) -> None:
        """The same; `Work.is_completed` of gloo is true only once somebody waits."""
        self.wait_on_stream(work)

    def error(self) -> str | None:
        return None

    def _wait(self, work: Work) -> None:
        waiter = self._waiters.pop() if self._waiters else _Waiter(self.name)
        waiter.begin(work, self._limit())
        while True:
            try:
                error = waiter.outcomes.get(timeout=WAKE_S)
                break
            except queue.Empty:
                if self._closed.is_set():
                    waiter.end()
                    raise RuntimeError("connections were closed under it") from None
        self._waiters.append(waiter)
        if self._closed.is_set():
            self._end_waiters()
        if error is not None:
            raise error

    def _abort(self) -> None:
        try:
            close_connections(self._group, self.rank, self.size)
        finally:
            self._closed.set()
            self._end_waiters()

    def _end_waiters(self) -> None:
        while self._waiters:
            self._waiters.pop().end()


class _Waiter:
    """A thread that waits for one operation after the other, and keeps their tensors as long."""

    def __init__(self, name: str) -> None:
        self.outcomes: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._works: queue.SimpleQueue[tuple[Work, timedelta] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"waiting on {name}", daemon=True).start()

    def begin(self, work: Work, limit: timedelta) -> None:
        self._works.put((work, limit))

    def end(self) -> None:
        """After what it waits for now."""
        self._works.put(None)

    def _run(self) -> None:
        while (asked := self._works.get()) is not None:
            work, limit = asked
            del asked
            try:
                work.wait(limit)
                outcome = None
            except RuntimeError as error:
                outcome = error
            del work
            self.outcomes.put(outcome)


def close_connections(group: Any, rank: int, size: int) -> None:
    """Let a receive time out. Where a peer's connection is closed already (it died first), gloo
    refuses at once and closes nothing: then the next peer's.
    """
    for other in range(size):
        if other != rank:
            try:
                group.recv([torch.empty(1)], other, POISON_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    return
