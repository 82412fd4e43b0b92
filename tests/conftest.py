"""What every test session leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.host_memory import owned_memory


@pytest.fixture(scope="session", autouse=True)
def _no_host_memory_left() -> Iterator[None]:
    """A stopped run keeps its nodes' snapshots for the next one; a test's go with the session, killed or not."""
    with owned_memory():
        yield
