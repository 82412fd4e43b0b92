"""Poll that is repeated in a thread of its own, answered or not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger("autohet.sources")
T = TypeVar("T")
LEAST_PAUSE = 0.1
"""Part of the interval that is left between a slow poll's end and the next one."""
SELDOM = 6
"""Factor by which a poll that has never been answered is slower: off EC2 none ever is."""


def pause_after(interval_s: float, took_s: float) -> float:
    """Return the seconds until the next poll, which begins `interval_s` after the one before."""
    return max(interval_s * LEAST_PAUSE, interval_s - took_s)


class Watch(Generic[T]):
    """Repeats a poll in a thread that it owns, every `poll_s` however long an answer takes.

    `answer` is the newest one, None before the first. A poll that fails is retried, whatever it
    raised; the same failure is logged once.
    """

    def __init__(self, name: str, ask: Callable[[], T], poll_s: float) -> None:
        self.answer: T | None = None
        self.trouble = ""
        """Error of the last poll; empty if it succeeded."""
        self._name = name
        self._ask = ask
        self._poll_s = poll_s
        self._wake = threading.Event()
        self._asked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"watch-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = 0.0
        said = ""
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            if self._closed:
                return
            began_at = time.monotonic()
            try:
                self.answer = self._ask()
                self.trouble = ""
                pause = self._poll_s
            except Exception as error:  # noqa: BLE001
                self.trouble = f"{type(error).__name__}: {str(error)[:300]}"
                if self.trouble != said:
                    said = self.trouble
                    logger.info("%s does not answer: %s", self._name, said)
                pause = self._poll_s if self.answer is not None else self._poll_s * SELDOM
            pause = pause_after(pause, time.monotonic() - began_at)
            self._asked.set()

    def wait_for_first(self, timeout_s: float) -> None:
        """Block until the first poll is answered or has failed, or `timeout_s` is over."""
        self._asked.wait(timeout_s)

    def ask_now(self) -> None:
        """Poll again without waiting for the next turn."""
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=timeout_s)
