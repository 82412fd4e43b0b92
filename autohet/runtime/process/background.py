"""Run a function in a Python process of its own: for example a search during training."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

LONGEST_S = 300.0
# A search makes millions of objects, few of them in circles (see `autohet plan`).
_CHILD = """
import gc, pickle, sys
gc.set_threshold(300_000)
sys.path[:] = pickle.load(sys.stdin.buffer)
work, argument = pickle.load(sys.stdin.buffer)
pickle.dump(work(argument), sys.stdout.buffer)
"""


class BackgroundCall(Generic[_Result]):
    """Call that runs in another process; calling this object waits for its result.

    The result is None if there was no second core, the argument cannot be pickled or the process
    failed: the caller then does the work itself.
    """

    def __init__(self, sent: bytes | None) -> None:
        self._found: list[_Result] = []
        self._talker: threading.Thread | None = None
        if sent is None:
            return
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _CHILD]
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        """The other process; absent if there is none."""
        talker = threading.Thread(
            target=self._talk, args=(sent,), name="background-call", daemon=True
        )
        self._talker = talker  # at our end nobody waits for it
        talker.start()

    @property
    def ended(self) -> bool:
        return self._talker is None or not self._talker.is_alive()

    def __call__(self) -> _Result | None:
        if self._talker is not None:
            self._talker.join()
        return self._found[0] if self._found else None

    def drop(self) -> None:
        """Kill the process, if it still runs; its result is not needed."""
        if not self.ended:
            self.child.kill()

    def _talk(self, sent: bytes) -> None:
        try:
            answer, _ = self.child.communicate(sent, timeout=LONGEST_S)
            if self.child.returncode == 0:
                self._found.append(pickle.loads(answer))
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def run_in_background(
    work: Callable[[_Argument], _Result], argument: _Argument
) -> BackgroundCall[_Result]:
    """Start `work(argument)` in a fresh interpreter.

    It does not fork, since this process may have threads and devices. work: a function of a module,
    which the other process imports.
    """
    try:
        sent = pickle.dumps(sys.path) + pickle.dumps((work, argument))
    except (pickle.PicklingError, AttributeError, TypeError):
        return BackgroundCall(None)
    return BackgroundCall(sent if len(os.sched_getaffinity(0)) >= 2 else None)
