"""What every test session leaves behind: nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.harness.host_memory import memory_directories


@pytest.fixture(scope="session", autouse=True)
def _no_host_memory_left() -> Iterator[None]:
    """A stopped run keeps its nodes' snapshots for the next one; a test's go with the session."""
    yield
    for directory in memory_directories():
        shutil.rmtree(directory, ignore_errors=True)
