"""What ends this process from outside when an abort does not end: inside, nothing may run any more.

An abort can hang in the driver or in a library, with the interpreter's lock held. Whoever is told
of the loss of this process then starts a new one in its place, as a newcomer.
"""

from __future__ import annotations

import os
import subprocess
import sys

_CHILD = """
import os, select, signal, sys
process, limit_s = int(sys.argv[1]), float(sys.argv[2])
told, _, _ = select.select([0], [], [], limit_s)  # told, or its end is closed: that process has gone on, or is no more
if not told:
    os.kill(process, signal.SIGKILL)
"""  # noqa: E501


class AbortGuard:
    """Kills this process `limit_s` from now unless it is disarmed."""

    def __init__(self, limit_s: float) -> None:
        command = [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid()), str(limit_s)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE)

    def disarm(self) -> None:
        """All is well; waits until the guard has gone."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()
