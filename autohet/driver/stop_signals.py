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
    from autohet.driver.ray.workforce import RayWorkforce

logger = logging.getLogger("autohet")


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """The first SIGTERM unwinds as Ctrl-C does, so that what was started is ended: before training
    there is nothing to commit. More of them (`ray job stop` tells every process of a job, and a
    supervising parent passes its own on) do not break the unwinding off.
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
    """No signal ends the clearing up half-way; what runs inside is bounded."""
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
def signals(workforce: RayWorkforce) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask for a stop with a committed checkpoint; a second Ctrl-C ends at
    once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: object) -> None:
        if workforce.stop_reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        workforce.stop_reason = signal.Signals(number).name
        logger.info(
            "%s: stopping once the newest step is committed; Ctrl-C again ends at once",
            workforce.stop_reason,
        )

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
