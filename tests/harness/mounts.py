"""File systems of a test's own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[None]:
    """`mount ARGUMENTS path`, until the end of the block.

    Where one may not mount, the test is skipped.
    """
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", *arguments, str(path)]).returncode:
        pytest.skip("needs root, to mount a file system of its own")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
