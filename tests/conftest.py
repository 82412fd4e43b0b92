"""What every test session leaves behind: nothing."""

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from planner.search.problem import limits
from tests.harness.host_memory import owned_memory

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
"""Where it is unset, `ray.init` of a new cluster leaves a token in the home, with which the next
`ray start` wants it of everybody, and `ray.init` with an address does not bring it
(ray/_private/authentication/authentication_token_setup.py): tests would disturb each other.
"""

if "AUTOHET_MODEL_CACHE" not in os.environ:
    # facts about models that the processes of one session share, and no other session
    facts = tempfile.TemporaryDirectory(prefix="autohet-models-")
    os.environ["AUTOHET_MODEL_CACHE"] = facts.name

settings.register_profile("work", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("work")
"""No example fails by the seconds that a busy machine takes."""

WAITING = ("multiprocess", "faults")
WHOLE = limits.MOST_TRIES


@pytest.fixture(scope="session", autouse=True)
def _no_host_memory_left() -> Iterator[None]:
    """A stopped run keeps its nodes' snapshots for the next one; a test's go with the session,
    killed or not.
    """
    with owned_memory():
        yield


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


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap() -> Iterator[None]:
    """Exempt what a module's tests have imported and cached from garbage collection."""
    yield
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits for other processes: the session's end is then of short files."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in WAITING))


def pytest_collection_finish() -> None:
    """Exempt what imports have made from garbage collection, which would look through it often."""
    gc.collect()
    gc.freeze()
