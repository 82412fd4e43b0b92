"""Process groups on the CPU.

gloo has no abort. A receive that times out on the same context wakes its waiters (measured, torch
2.13: 15 ms): gloo then closes all connections of that context and fails its pending operations
("Application timeout caused pair closure"). The group is dropped afterwards; new ones work. A
message that is half transferred, on a slow link or from a peer that died meanwhile, is an
exception: nothing wakes its waiter before its own deadline. Waits therefore run in a separate
thread, which is abandoned then.
"""

import os
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
"""Seconds between two checks for closed connections during a wait that nothing wakes."""
# Members then read all addresses of a group in one query instead of three for each other member.
os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")


class GlooGroup(Group):
    """Group on the CPU, where every wait blocks the host.

    Its constructor connects all members. A failed operation raises its error at the wait for it.
    """

    in_stream_order = False

    def create(self, store: Store) -> Any:
        self.waiters: deque[Waiter] = deque()
        """Waiting threads that are free for the next wait."""
        self._closed = threading.Event()
        return ProcessGroupGloo(store, self.rank, self.size, self._limit())

    def connect(self) -> None:
        """Do nothing: the constructor has connected all members."""

    def wait_on_stream(self, work: Work | None) -> None:
        if work is not None:
            self._call(lambda: self._wait(work))

    def wait_on_host(self, work: Work | None) -> None:
        """Wait as `wait_on_stream` does; gloo's `Work.is_completed` is true only after a wait."""
        self.wait_on_stream(work)

    def error(self) -> str | None:
        return None

    def _wait(self, work: Work) -> None:
        waiter = self.waiters.pop() if self.waiters else Waiter(self.name)
        waiter.begin(work, self._limit())
        while True:
            try:
                error = waiter.outcomes.get(timeout=WAKE_S)
                break
            except queue.Empty:
                if self._closed.is_set():
                    waiter.end()
                    raise RuntimeError("connections were closed under it") from None
        self.waiters.append(waiter)
        if self._closed.is_set():
            self._end_waiters()
        if error is not None:
            raise error

    def _abort(self) -> None:
        try:
            close_connections(self.process_group, self.rank, self.size)
        finally:
            self._closed.set()
            self._end_waiters()

    def _end_waiters(self) -> None:
        while self.waiters:
            self.waiters.pop().end()


class Waiter:
    """Thread that waits for one operation after another and keeps their tensors alive."""

    def __init__(self, name: str) -> None:
        self.outcomes: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._works: queue.SimpleQueue[tuple[Work, timedelta] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"waiting on {name}", daemon=True).start()

    def begin(self, work: Work, limit: timedelta) -> None:
        self._works.put((work, limit))

    def end(self) -> None:
        """End the thread after its current wait."""
        self._works.put(None)

    def _run(self) -> None:
        while True:
            asked = self._works.get()
            if asked is None:
                return
            work, limit = asked
            # No reference to the work may stay while this thread waits for the next one.
            del asked
            try:
                work.wait(limit)
                outcome = None
            except RuntimeError as error:
                outcome = error
            del work
            self.outcomes.put(outcome)


def close_connections(group: Any, rank: int, size: int) -> None:
    """Make a receive time out, so that gloo closes all connections.

    If a peer's connection is closed already (it died first), gloo refuses the receive at once and
    closes nothing; the next peer is tried then.
    """
    for other in range(size):
        if other != rank:
            try:
                group.recv([torch.empty(1)], other, POISON_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    return
