"""Guard process that kills this process if an abort hangs.

An abort can hang in the driver or in a library, with the interpreter's lock held, so no thread of
this process could end it. The driver of the job then sees the loss and starts a new process, which
joins as a newcomer.
"""

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
    """Guard that kills this process `limit_s` from now unless it is disarmed."""

    def __init__(self, limit_s: float) -> None:
        command = [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid()), str(limit_s)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE)

    def disarm(self) -> None:
        """Stop the guard and wait until its process has ended."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()
