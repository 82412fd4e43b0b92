"""Short searches of the driver's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planner.search.problem import limits

WHOLE = limits.MOST_TRIES


@pytest.fixture(autouse=True, scope="module")
def _few_tries() -> Iterator[None]:
    """Walk a tenth as far, in fixtures of a module too: tests/planner tests how good a plan is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MOST_TRIES", 120)
        yield


@pytest.fixture
def _whole_search(_few_tries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search as far as the product does: what is bought and what is used are two searches."""
    monkeypatch.setattr(limits, "MOST_TRIES", WHOLE)
