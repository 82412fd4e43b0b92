"""Restarts of a driver that dies, or that ends for a cause that may pass.

A parent process that does nothing else restarts it, on the head node, within the same Ray job. The
parent imports neither Ray nor torch, so the kernel's out-of-memory killer spares it. The new driver
finds the old one's lease dead (it was a process of the same machine) and adopts the workers, which
trained on meanwhile.
"""

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

from autohet.runtime.process.terminal import visible
from planner.errors import ConfigError

logger = logging.getLogger("autohet")
RESTARTS = 3
"""Default limit of restarts in a row.

A cause that kills a driver so often is not chance, nor memory that ran short for a moment.
"""
WELL_S = 600.0
"""Seconds of life after which a driver has not died of the previous driver's cause."""


MAY_PASS = 75
"""Exit code of a child that has failed for a cause that may pass (EX_TEMPFAIL of sysexits.h).

The parent starts it again, or ends with 1.
"""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask for an end."""
restart_count: int | None = None
"""Number of restarts before this child; None in a process that is no child."""
_left = 0
"""Number of restarts that may follow this child."""
_began_at = 0.0
_has_begun = False
"""True in a child whose run has begun, so that the user's inputs are not at fault."""


def is_supervised() -> bool:
    """Return true if a parent restarts this process after it is killed."""
    return restart_count is not None


def is_restart() -> bool:
    """Return true if this process resumes the run of one that was killed."""
    return bool(restart_count)


def will_restart() -> bool:
    """Return true if a parent restarts this process after it exits with `MAY_PASS`."""
    return is_supervised() and (_left > 0 or time.monotonic() - _began_at > WELL_S)


def note_begun() -> None:
    """Record that the run has begun: a later exception is no mistake of the user's."""
    global _has_begun
    _has_begun = True


def supervise_child(restarts: int, work: Callable[[], int]) -> int:
    """Run `work` in a child process, with restarts, and return its exit code.

    The child is restarted, up to `restarts` times in a row, if it is killed by a signal that was
    not sent through this process, or ends with `MAY_PASS`. SIGTERM is passed on; Ctrl-C reaches a
    child by itself.
    """
    global restart_count, _left, _began_at
    _left = restarts
    restart_count = 0
    asked: list[int] = []
    while True:
        _began_at = time.monotonic()
        # A signal that comes before the parent has its handlers would end it and leave the child.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            _end(work)
        code = _follow(child, asked, unblocked)
        if asked or (code >= 0 and code != MAY_PASS):
            # The exit code that the caller of `autohet train` sees.
            if code == MAY_PASS:
                return 1
            return code if code >= 0 else 128 - code
        restart_count += 1
        if time.monotonic() - _began_at > WELL_S:
            _left = restarts
        _left -= 1
        what = "failed" if code == MAY_PASS else f"was killed by {signal.Signals(-code).name}"
        if _left < 0:
            logger.error(
                "The driver %s, and %d times before; it is not started again", what, restarts
            )
            return 1
        logger.warning("The driver %s; it is started again and takes over its living workers", what)


def _end(work: Callable[[], int]) -> NoReturn:
    """Run the child and exit; it never returns to its parent's code."""
    code = 1
    try:
        code = work()
    except ConfigError as error:
        print(visible(f"autohet train: {error}"), file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = MAY_PASS if _has_begun else 1
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _follow(child: int, asked: list[int], unblocked: Collection[int]) -> int:
    """Wait for the child; return its exit code, or minus the signal that killed it.

    asked: collects the signals that ask for an end. unblocked: signal mask once they are handled.
    """

    def on_term(number: int, _: object) -> None:
        asked.append(number)
        # It may have ended just now.
        with suppress(ProcessLookupError):
            os.kill(child, number)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, on_term),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, _: asked.append(number)),
    }
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    try:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
