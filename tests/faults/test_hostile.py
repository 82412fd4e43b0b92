"""A hostile user of the machine beside a run: mutated, truncated and replayed frames and idle
sockets against the store, the report channel and peers; directories; damaged documents.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autohet.driver.ray import report_server, store_server
from recovery.peers import server as peers_server
from tests.harness.besieged import besiege


def judge(found: dict[str, Any]) -> None:
    assert found["members"]["failures"] == []
    assert found["members"]["rounds_of_work"] > 0
    assert found["attack"]["leaks"] == 0
    assert found["attack"]["directory_successes"] == []
    assert found["documents"]["other_errors"] == []
    assert found["memory_grown_kb"] < 200_000
    strangers = (
        store_server.MAX_STRANGERS + report_server.MOST_STRANGERS + peers_server.MAX_STRANGERS
    )
    assert found["descriptors_at_most"] <= strangers + 100


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory whose parents another user may pass, as those of /dev/shm and /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.timeout(200)
def test_a_short_siege(reachable: Path) -> None:
    judge(besiege(reachable, num_frames=400, num_idle=300))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_siege(reachable: Path) -> None:
    """scripts/benchmarks/hostile.py records its figures."""
    judge(besiege(reachable, num_frames=10_000, num_idle=2_000))
