"""Searches count their work and nothing here waits for anything, so a busy machine takes longer and
ends alike: the limit that catches tests which hang is an hour for these.
"""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def _few_tries() -> None:
    """Search as far as the product does."""


HERE = str(Path(__file__).parent) + os.sep


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3600))
