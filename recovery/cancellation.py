"""Work that its caller may give up: it then ends soon, whatever it waits for."""

import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from recovery.errors import Cancelled

WAKE_S = 0.05
"""Seconds between two checks whether the caller has cancelled."""
T = TypeVar("T")


class ChildEvent(threading.Event):
    """Set by itself, or with any of its parents."""

    def __init__(self, *parents: threading.Event | None) -> None:
        super().__init__()
        self._parents = [parent for parent in parents if parent is not None]

    def is_set(self) -> bool:
        if super().is_set():
            return True
        return any(parent.is_set() for parent in self._parents)

    def wait(self, timeout: float | None = None) -> bool:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = until - time.monotonic()
            if left <= 0:
                break
            # A parent wakes nobody who waits here: it is looked at every WAKE_S seconds.
            super().wait(min(left, WAKE_S))
        return self.is_set()


def either(first: threading.Event | None, second: threading.Event) -> threading.Event:
    """Return an event that is set once either is."""
    if first is None:
        return second
    return ChildEvent(first, second)


def call_until(cancelled: threading.Event | None, call: Callable[[], T], what: str) -> T:
    """Call `call`; with `cancelled`, in a separate thread that is abandoned once the event is set.

    Nothing wakes a thread in a connect, a handshake or a silent file server. An abandoned thread
    therefore ends at the call's own deadline, and its result is dropped.

    Raises:
        Cancelled: cancelled before the end; `what` names the work. Also the errors of `call`.
    """
    if cancelled is None:
        return call()
    check(cancelled, what)
    return result_until(cancelled, in_thread(call, what), what)


def in_thread(call: Callable[[], T], what: str) -> Future[T]:
    """Run `call` in a daemon thread and return the future of its result.

    The thread delays nobody, not even the exit of the process.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001
            done.set_exception(error)

    threading.Thread(target=run, name=f"call {what}", daemon=True).start()
    return done


def result_until(cancelled: threading.Event | None, done: Future[T], what: str) -> T:
    """Return the future's result, or raise its error; raise Cancelled if the event comes first."""
    while not wait([done], WAKE_S).done:
        check(cancelled, what)
    return done.result()


def has_bytes(connection: socket.socket, within_s: float) -> bool:
    """Return True if the connection has bytes to read, or has ended, within `within_s` seconds."""
    # Decrypted with what came before: the kernel knows nothing of such bytes any more.
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return True
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


def await_bytes(connection: socket.socket, cancelled: threading.Event | None, what: str) -> None:
    """Wait until the connection has bytes to read or has ended, at most for its own timeout.

    Raises:
        Cancelled: `cancelled` was set. TimeoutError: nothing came.
    """
    patience = connection.gettimeout()
    if cancelled is None or patience is None:
        return
    until = time.monotonic() + patience
    while not has_bytes(connection, WAKE_S):
        check(cancelled, what)
        if time.monotonic() > until:
            raise TimeoutError(f"nothing came within {patience:.3g} s")


def pause(
    cancelled: threading.Event | None,
    seconds: float,
    what: str,
    sooner: threading.Event | None = None,
) -> None:
    """Sleep, until `sooner` is set at most; raise Cancelled once `cancelled` is set."""
    if sooner is not None:
        either(cancelled, sooner).wait(seconds)
        check(cancelled, what)
    elif cancelled is None:
        time.sleep(seconds)
    elif cancelled.wait(seconds):
        raise Cancelled(what)


def check(cancelled: threading.Event | None, what: str) -> None:
    """Raise Cancelled once the event is set."""
    if cancelled is not None and cancelled.is_set():
        raise Cancelled(what)
