"""What several of these tests share."""

from collections.abc import Iterator

import pytest

from tests.harness.worker_pool import WorkerPool, pool_and_store


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[WorkerPool, int]]:
    """Eight processes for a module's cases, and the port of the store at which they meet."""
    with pool_and_store(8) as made:
        yield made
