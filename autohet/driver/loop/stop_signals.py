"""Handling of Ctrl-C and SIGTERM before, during and after training.

In a thread other than the main one, signals are left alone.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

logger = logging.getLogger("autohet")
SignalHandler = Callable[[int, Any], None] | signal.Handlers


class Stoppable(Protocol):
    """Owner of a run's reason to stop, which a signal's handler may set."""

    stop_reason: str | None


def unwind_on_sigterm() -> AbstractContextManager[None]:
    """Unwind at the first SIGTERM as at Ctrl-C, so that all that was started is ended.

    Before training there is nothing to commit. Further SIGTERMs do not interrupt the unwinding
    (`ray job stop` sends one to every process of a job, and a supervising parent passes its own
    on).
    """

    def on_signal(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    return _handle(on_signal, signal.SIGTERM)


def ignore_signals() -> AbstractContextManager[None]:
    """Keep signals from interrupting the cleanup, whose work is bounded."""
    return _handle(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)


def stop_on_signals(run: Stoppable) -> AbstractContextManager[None]:
    """Stop with a committed checkpoint at Ctrl-C or SIGTERM; end at once at a second Ctrl-C."""

    def on_signal(number: int, _: object) -> None:
        if run.stop_reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop_reason = signal.Signals(number).name
        logger.info(
            "%s: stopping once the newest step is committed; Ctrl-C again ends at once",
            run.stop_reason,
        )

    return _handle(on_signal, signal.SIGINT, signal.SIGTERM)


@contextmanager
def _handle(handler: SignalHandler, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals; no-op in a thread other than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
