"""Handling of Ctrl-C and SIGTERM before, during and after training.

In a thread other than the main one, signals are left alone.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autohet.driver.ray.observer import RayObserver

logger = logging.getLogger("autohet")


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Unwind at the first SIGTERM as at Ctrl-C, so that all that was started is ended.

    Before training there is nothing to commit. Further SIGTERMs do not interrupt the unwinding
    (`ray job stop` sends one to every process of a job, and a supervising parent passes its own
    on).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep signals from interrupting the cleanup, whose work is bounded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals(observer: RayObserver) -> Iterator[None]:
    """Stop with a committed checkpoint at Ctrl-C or SIGTERM; end at once at a second Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: object) -> None:
        if observer.stop_reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        observer.stop_reason = signal.Signals(number).name
        logger.info(
            "%s: stopping once the newest step is committed; Ctrl-C again ends at once",
            observer.stop_reason,
        )

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
