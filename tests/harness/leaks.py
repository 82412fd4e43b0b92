"""What a run may not leave behind in the process that drove it: threads, open files and sockets,
shared memory.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_files() -> Counter[str]:
    """What this process holds open: listening ports and connections are sockets."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{entry}").split(":")[0]] += 1
        except OSError:
            continue
    return found


def thread_names() -> set[str]:
    return {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}


@contextmanager
def nothing_left(memory: Path, settle_s: float = 30.0) -> Iterator[None]:
    """Fails when the block leaves a thread, an open file, a socket, or anything under `memory`;
    what ends by itself gets `settle_s`.
    """
    files = open_files()
    threads = thread_names()
    yield
    deadline = time.monotonic() + settle_s
    while True:
        left = [f"file {name}" for name in open_files() - files] + [
            f"thread {n}" for n in thread_names() - threads
        ]
        left += [str(path) for path in memory.rglob("*") if path.is_file()]
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
