"""What every test session leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.host_memory import owned_memory


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ray finds a cluster that runs on the machine: tests that start one go one after the other (`--dist loadgroup`)."""
    if item.get_closest_marker("cluster") is not None:
        item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="session", autouse=True)
def _no_host_memory_left() -> Iterator[None]:
    """A stopped run keeps its nodes' snapshots for the next one; a test's go with the session, killed or not."""
    with owned_memory():
        yield
