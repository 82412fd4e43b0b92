"""Dispatch of events to callbacks on a thread of its own.

A slow tracker never holds up a tick, and a failing one never ends a run.
"""

import logging
import queue
import threading
from collections.abc import Sequence

from autohet.driver.callbacks.protocol import Callback
from planner.inputs.documents import Json

logger = logging.getLogger("autohet")
MOST_WAITING = 10_000
"""Events that may wait: more than those of an hour with steps of a third of a second."""
CLOSE_S = 10.0


class EventDispatch:
    """Passes events to callbacks on its own thread; owned by the driver.

    Call it with each event; `close` waits at most `CLOSE_S` for events in flight.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        *,
        most_waiting: int = MOST_WAITING,
        close_s: float = CLOSE_S,
    ) -> None:
        self._callbacks = list(callbacks)
        self._waiting: queue.Queue[Json | None] = queue.Queue(most_waiting)
        self._close_s = close_s
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="autohet-callbacks", daemon=True)
        if self._callbacks:
            self._thread.start()

    def __call__(self, event: Json) -> None:
        """Queue an event and return at once.

        If callbacks are too slow, the newest events are dropped and counted.
        """
        if not self._callbacks:
            return
        try:
            # A tick must not wait for a tracker's server.
            self._waiting.put_nowait(event)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Hand over the waiting events and close the callbacks; warn of events that are lost."""
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put(None, timeout=self._close_s)
            self._thread.join(self._close_s)
        except queue.Full:
            pass

        problems = []
        if self._thread.is_alive():
            num_left = self._waiting.qsize()
            problems.append(f"{num_left} events were not handed over in {self._close_s:g} s")
        if self._dropped:
            problems.append(f"{self._dropped} were left out before")
        if problems:
            logger.warning("Callbacks are too slow: %s", "; ".join(problems))

    def _run(self) -> None:
        while True:
            event = self._waiting.get()
            if event is None:
                break
            # A copy, since a callback that fails is removed.
            for callback in tuple(self._callbacks):
                self._tell(callback, event)

        for callback in self._callbacks:
            try:
                callback.close()
            except Exception:
                # A user's code: whatever it raises, the run has ended as it has.
                logger.exception("Closing callback %s failed", type(callback).__name__)

    def _tell(self, callback: Callback, event: Json) -> None:
        try:
            callback.on_event(event)
        except Exception:
            # A user's code: the run does not depend on it.
            logger.exception("Callback %s failed and is told nothing more", type(callback).__name__)
            self._callbacks.remove(callback)
