"""Directories in host memory, where the nodes of a test's fleet keep their snapshots. They go with
the process that owns them, SIGKILL included: host memory that nobody owns is lost until the machine
starts again.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST_MEMORY = Path("/dev/shm")
# Reads until its owner is gone; and more than once, since the owner's children may still be
# writing.
GUARD = 'cat > /dev/null; for again in 1 2 3; do rm -rf -- "$0"*; sleep 1; done'


def memory_directory(test_directory: Path) -> Path:
    """Of one test, by the name of its own directory: so that a left-over is seen."""
    return Path(f"{_prefix()}{test_directory.name}")


@contextmanager
def owned_memory() -> Iterator[None]:
    """What `memory_directory` names is removed at the end of the block, or of this process,
    whichever comes first.
    """
    with subprocess.Popen(
        ["sh", "-c", GUARD, _prefix()], stdin=subprocess.PIPE, start_new_session=True
    ) as guard:
        try:
            yield
        finally:
            for directory in HOST_MEMORY.glob(f"{Path(_prefix()).name}*"):
                shutil.rmtree(directory, ignore_errors=True)
            guard.kill()


def _prefix() -> str:
    return f"{HOST_MEMORY}/autohet-test-{os.getpid()}-"
