"""A function in a Python process of its own, while this one goes on: the planner's bound beside its search."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

LONGEST_S = 300.0
_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
work, argument = pickle.load(sys.stdin.buffer)
pickle.dump(work(argument), sys.stdout.buffer)
"""


def beside(work: Callable[[_Argument], _Result], argument: _Argument) -> Callable[[], _Result | None]:
    """Begins `work(argument)` in a fresh interpreter (no fork: this process may have threads and devices) and returns what waits for
    it. That returns None where there is no second core, the argument cannot travel or the process fails: do it yourself then.

    work: a function of a module, which the other process imports.
    """
    try:
        sent = pickle.dumps(sys.path) + pickle.dumps((work, argument))
    except (pickle.PicklingError, AttributeError, TypeError):
        return lambda: None
    if len(os.sched_getaffinity(0)) < 2:
        return lambda: None
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    found: list[_Result] = []

    def talk() -> None:
        try:
            answer, _ = child.communicate(sent, timeout=LONGEST_S)
            if child.returncode == 0:
                found.append(pickle.loads(answer))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    talker = threading.Thread(target=talk, name="beside", daemon=True)  # at our end nobody waits for it
    talker.start()

    def wait() -> _Result | None:
        talker.join()
        return found[0] if found else None

    return wait
