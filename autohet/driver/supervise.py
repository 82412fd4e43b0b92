"""A driver that dies is started again: by a parent process that does nothing else, on the head
node, within the same Ray job.

The parent imports neither Ray nor torch, so the kernel's out-of-memory killer passes it by. The new
driver finds the old one's lease dead (it was a process of the same machine) and goes on from what
the nodes keep in host memory.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from autohet.runtime.process.terminal import visible
from planner.errors import ConfigError

logger = logging.getLogger("autohet")
RESTARTS = 3
"""How often in a row by default: what kills a driver that often is not chance, nor memory that ran
short for a moment.
"""
WELL_S = 600.0
"""A driver that has lived for this long has not died of what killed the one before."""


_restarts: int | None = None
"""In a child: how many there were before it."""


def is_supervised() -> bool:
    """Whether a parent starts this process again where it is killed."""
    return _restarts is not None


def is_restart() -> bool:
    """Whether this process goes on with the run of one that was killed."""
    return bool(_restarts)


def supervised(restarts: int, work: Callable[[], int]) -> int:
    """The exit code of `work`, done in a child process that is started again, up to `restarts`
    times in a row, where a signal killed it that nobody sent through here. SIGTERM is passed on;
    Ctrl-C reaches a child by itself.
    """
    global _restarts
    left, _restarts = restarts, 0
    asked: list[int] = []
    while True:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _end(work)
        code = _follow(child, asked)
        if code >= 0 or asked:
            return code if code >= 0 else 128 - code
        _restarts += 1
        left = (restarts if time.monotonic() - started > WELL_S else left) - 1
        name = signal.Signals(-code).name
        if left < 0:
            logger.error(
                "The driver was killed by %s, and %d times before; it is not started again",
                name,
                restarts,
            )
            return 1
        logger.warning(
            "The driver was killed by %s; it is started again and goes on from its nodes' memory",
            name,
        )


def _end(work: Callable[[], int]) -> NoReturn:
    """The child's life: the program around it is its parent's."""
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
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _follow(child: int, asked: list[int]) -> int:
    """Wait for the child; its exit code, or minus the signal that killed it.

    `asked` takes the signals that ask for an end.
    """

    def on_term(number: int, _: object) -> None:
        asked.append(number)
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, on_term),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, _: asked.append(number)),
    }
    try:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
