"""Conformance on S3 servers that are not ours, and a checkpoint on each of them, with no region
configured, as on a new EC2 node.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from autohet.cli.main import main
from recovery.checkpoint.commit import newest_checkpoint
from recovery.checkpoint.read import verify
from recovery.storage.conformance import check_conformance
from recovery.storage.contents import holds
from recovery.storage.open import open_storage
from recovery.storage.protocol import StorageOptions
from tests.harness.checkpoint_cases import make_checkpoint
from tests.harness.s3_stores import (
    S3Store,
    environment_of,
    moto_store,
    rclone_store,
    seaweedfs_store,
)

DRIVER = ["worker-policy.json", "driver-policy.json"]
"""The shipped policies of the driver's node that are about storage."""


@contextmanager
def _store(kind: str, folder: Path) -> Iterator[S3Store]:
    if kind == "rclone":
        with rclone_store(folder) as store:
            yield store
    elif kind == "seaweedfs":
        with seaweedfs_store(folder) as store:
            yield store
    else:
        with moto_store(DRIVER) as store:
            yield store


@pytest.fixture(scope="module", params=["rclone", "seaweedfs", "moto"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    with _store(request.param, folder) as running, environment_of(running):
        yield running


def test_every_check_passes_and_leaves_nothing(
    store: S3Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "check", "--storage", store.uri, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["problem"] for each in document["checks"] if not each["ok"]} == {}
    assert document["ok"]
    assert document["storage"] == store.uri
    assert document["endpoint"] == store.endpoint
    names = {check["name"] for check in document["checks"]}
    assert {"put", "parts", "ranges", "conditional-put", "list", "abort", "delete"} <= names
    with closing(open_storage(store.uri)) as storage:
        assert [info.name for info in storage.list("check-")] == []


def test_checkpoint_is_committed_and_verified(store: S3Store) -> None:
    options = StorageOptions(part_bytes=5 << 20)
    with closing(open_storage(f"{store.uri}/run", options)) as storage:
        make_checkpoint(storage, 3)
        newest = newest_checkpoint(storage)
        assert newest is not None
        assert newest.step == 3
        assert verify(storage, 3).ok


def test_ranged_reads_and_parts_are_signed_like_all_requests(store: S3Store) -> None:
    """Through the path without copies: rclone and moto refuse a wrong signature."""
    content = bytes(range(256)) * (12 << 12)
    with closing(open_storage(store.uri, StorageOptions(part_bytes=5 << 20))) as storage:
        storage.put("large", content)
        memory = bytearray(1000)
        storage.get_into("large", (5 << 20) - 500, memoryview(memory))
        assert memory == content[(5 << 20) - 500 : (5 << 20) + 500]
        assert storage.get("large") == content
        storage.delete(["large"])


@pytest.mark.parametrize("num_bytes", [100, (5 << 20) + 3, 11 << 20])
def test_a_recorded_checksum_spares_the_read(
    store: S3Store,
    num_bytes: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an object in one piece, in two parts and in three. Where none is recorded, it is read."""
    content = (bytes(range(256)) * (1 + num_bytes // 256))[:num_bytes]
    reads = []
    with closing(open_storage(store.uri, StorageOptions(part_bytes=5 << 20))) as storage:
        get_into = storage.get_into

        def read(name: str, start: int, buffer: memoryview) -> None:
            reads.append(name)
            get_into(name, start, buffer)

        monkeypatch.setattr(storage, "get_into", read)
        storage.put("recorded", content)
        assert holds(storage, "recorded", content)
        # As S3 does. rclone records it of objects in one piece, moto in answers to GET alone.
        assert not reads or request.node.callspec.params["store"] != "seaweedfs"
        assert not holds(storage, "recorded", content[:-1] + b"?")
        assert not holds(storage, "absent", content)
        storage.delete(["recorded"])


def test_wrong_secret_is_said_and_nothing_else_tried(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with closing(open_storage(store.uri)) as storage:
        report = check_conformance(storage)
    assert not report.ok
    assert report.refusal is not None
    assert "secret key does not belong to the access key" in str(report.refusal)
    assert "not tried, since 'reach' failed" in str(report.results[1].problem)
