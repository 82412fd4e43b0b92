"""Where the nodes of a test's fleet keep their snapshots: host memory, a directory for each test of this process."""

from __future__ import annotations

import os
from pathlib import Path

HOST_MEMORY = Path("/dev/shm")


def memory_directory(test_directory: Path) -> Path:
    """Of one test, by the name of its own directory: so that a left-over is seen."""
    return HOST_MEMORY / f"autohet-test-{os.getpid()}-{test_directory.name}"


def memory_directories() -> list[Path]:
    """Of all tests of this process."""
    return sorted(HOST_MEMORY.glob(f"autohet-test-{os.getpid()}-*"))
