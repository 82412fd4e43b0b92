"""Short searches of the driver's tests."""

from __future__ import annotations

import pytest

from planner.search import limits


@pytest.fixture(autouse=True)
def _few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk a tenth as far: tests/planner tests how good a plan is."""
    monkeypatch.setattr(limits, "MOST_TRIES", 120)
