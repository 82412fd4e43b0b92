"""A test's thread is a stream of the group with CUDA's semantics for that test alone."""

from collections.abc import Iterator

import pytest

from tests.harness.deferred_group import leave_stream


@pytest.fixture(autouse=True)
def _no_stream_afterwards() -> Iterator[None]:
    yield
    leave_stream()
