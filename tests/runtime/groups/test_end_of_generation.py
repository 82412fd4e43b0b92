"""The end of a generation: the dead flag first, every abort at once, and a process whose abort
hangs is ended from outside.
"""

import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch.distributed import HashStore

from autohet.runtime.groups import GenerationGroups, GroupTimeouts, reconfigure
from tests.harness.deferred_group import DeferredGroup

CPU = torch.device("cpu")
HANGING = """
import ctypes, sys, threading, torch
from torch.distributed import HashStore
from autohet.runtime.groups import generation, GroupTimeouts
from tests.harness.deferred_group import DeferredGroup

generation.ABORT_LIMIT_S = float(sys.argv[1])

class Hanging(DeferredGroup):
    abort_may_hang = True
    def _abort(self):
        if sys.argv[2] == "hang":
            ctypes.PyDLL(None).usleep(int(60e6))  # with the interpreter's lock: no thread of this process runs any more

groups = generation.GenerationGroups(HashStore(), 1, "a", torch.device("cpu"), generation.GroupTimeouts(5.0, 5.0), Hanging)
groups.built["sync", ("a", "b")] = Hanging("pair", ("a", "b"), "a", HashStore(), torch.device("cpu"), 5.0)
groups.interrupt()
assert groups.aborted.wait(30)
print("went on", flush=True)
"""  # noqa: E501


@pytest.mark.parametrize(("limit_s", "abort", "ends"), [(1.0, "hang", True), (30.0, "end", False)])
def test_a_process_whose_abort_hangs_is_killed_and_another_is_not(
    limit_s: float, abort: str, ends: bool
) -> None:
    command = [sys.executable, "-c", HANGING, str(limit_s), abort]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (-signal.SIGKILL if ends else 0), done.stderr
    assert ("went on" in done.stdout) is not ends


class Watched(DeferredGroup):
    """Notes, when it is aborted, what the generation had written down by then; waits for its
    fellow's abort, as a stuck kernel may.
    """

    seen: list[tuple[bool, float]]
    met: list[int]
    barrier: threading.Barrier

    def _abort(self) -> None:
        self.seen.append((GROUPS.over.is_set(), float(GROUPS.alive)))
        self.met.append(self.barrier.wait(20))


GROUPS: GenerationGroups


def test_the_flags_come_first_and_aborts_wait_for_one_another() -> None:
    global GROUPS
    GROUPS = GenerationGroups(HashStore(), 1, "a", CPU, GroupTimeouts(5.0, 5.0), Watched)
    Watched.seen, Watched.met, Watched.barrier = [], [], threading.Barrier(2)
    for name in ("one", "other"):
        GROUPS.built[name, ("a", "b")] = Watched(name, ("a", "b"), "a", HashStore(), CPU, 5.0)
    GROUPS.interrupt()
    assert GROUPS.aborted.wait(60)
    assert len(Watched.met) == 2, "one abort was waited for before the other began"
    assert Watched.seen == [(True, 0.0)] * 2


def test_a_sick_device_ends_the_process_before_the_next_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os.kill", lambda process, number: ended.append(number))
    before = GenerationGroups(HashStore(), 1, "a", CPU, GroupTimeouts(5.0, 5.0), DeferredGroup)
    assert not reconfigure(before, 2, HashStore(), "a", CPU, GroupTimeouts(5.0, 5.0)).over.is_set()
    assert (before.over.is_set(), ended) == (True, [])
    monkeypatch.setattr(
        DeferredGroup, "is_healthy", classmethod(lambda cls, device, limit_s: False)
    )
    reconfigure(
        GenerationGroups(HashStore(), 1, "a", CPU, GroupTimeouts(5.0, 5.0), DeferredGroup),
        2,
        HashStore(),
        "a",
        CPU,
        GroupTimeouts(5.0, 5.0),
    )
    assert ended == [signal.SIGKILL]
