"""Fixtures of restores and of the durable tier: one S3 server for each module, and every storage
that the conformance suite runs on.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.peers import server as shard_server
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage, StorageOptions
from tests.harness.restore_fleet import Fleet, restore_fleet
from tests.harness.s3_server import S3Server, s3_server

SMALL = StorageOptions(
    concurrency=4, part_bytes=5 << 20, attempts=3, backoff_s=0.001, request_timeout_s=20
)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3_uri(s3: S3Server) -> str:
    """A new bucket's URI with a prefix in it."""
    return s3.create_bucket(f"test-{uuid.uuid4().hex[:12]}") + "/jobs/one"


@pytest.fixture(params=["directory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """The same suite on every kind of storage."""
    is_directory = request.param == "directory"
    opened = open_storage(
        str(tmp_path / "durable") if is_directory else request.getfixturevalue("s3_uri"), SMALL
    )
    yield opened
    opened.close()


@pytest.fixture
def directory(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "durable"), SMALL)


@pytest.fixture
def greetings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets one more with each connection on which a peer shows its token to a shard server of this
    process.
    """
    seen: list[str] = []
    greet = shard_server._Handler._greet

    def counted(handler: shard_server._Handler) -> bool:
        seen.append(str(handler.client_address))
        return greet(handler)

    monkeypatch.setattr(shard_server._Handler, "_greet", counted)
    return seen


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with restore_fleet(tmp_path) as nodes:
        yield nodes
