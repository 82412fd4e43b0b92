"""Handling of Ctrl-C and SIGTERM before, during and after training.

In a thread other than the main one, signals are left alone.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger("autohet")


class Stoppable(Protocol):
    """Owner of a run's reason to stop, which a signal's handler may set."""

    stop_reason: str | None


@contextmanager
def unwind_on_sigterm() -> Iterator[None]:
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
def ignore_signals() -> Iterator[None]:
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
def stop_on_signals(run: Stoppable) -> Iterator[None]:
    """Stop with a committed checkpoint at Ctrl-C or SIGTERM; end at once at a second Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: object) -> None:
        if run.stop_reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop_reason = signal.Signals(number).name
        logger.info(
            "%s: stopping once the newest step is committed; Ctrl-C again ends at once",
            run.stop_reason,
        )

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
