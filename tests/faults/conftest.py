"""What all runs that are struck share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from autohet.driver.emulate.namespaces import NamespaceNetwork, namespace_network, why_no_namespaces
from tests.harness.exact_job import Reference, train_alone
from tests.harness.fork_server import server_address
from tests.harness.host_memory import memory_directory


@dataclass(frozen=True)
class Scene:
    """Where runs take place: what they share, and what an undisturbed one gives."""

    shared: Path
    reference: Reference


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    shared, alone = tmp_path_factory.mktemp("shared"), tmp_path_factory.mktemp("alone")
    server_address()
    return Scene(shared, train_alone(alone, shared))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Host memory for this test's snapshots."""
    path = memory_directory(tmp_path)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def network() -> Iterator[NamespaceNetwork]:
    """A namespace a node, where they can be made."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with namespace_network() as made:
        yield made
