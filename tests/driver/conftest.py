"""Short searches of the driver's tests."""

from __future__ import annotations

import pytest

from planner.search.problem import limits

WHOLE = limits.MOST_TRIES


@pytest.fixture(autouse=True)
def _few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk a tenth as far: tests/planner tests how good a plan is."""
    monkeypatch.setattr(limits, "MOST_TRIES", 120)


@pytest.fixture
def _whole_search(_few_tries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search as far as the product does: what is bought and what is used are two searches."""
    monkeypatch.setattr(limits, "MOST_TRIES", WHOLE)
