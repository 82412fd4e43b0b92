"""Ray's result reads the very place that the job wrote."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autohet.driver.job import result_files
from autohet.driver.job.result_files import filesystem_of
from recovery.storage.errors import StorageUnsupported
from recovery.storage.open import open_storage
from tests.harness.s3_server import S3Server, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        server.create_bucket("results")
        yield server


@pytest.mark.parametrize("prefix", ["", "/exp", "/exp#1", "/exp?x=2", "/a%20b", "/a b"])
def test_s3_prefix_is_the_same_place(s3: S3Server, prefix: str) -> None:
    with closing(open_storage(f"s3://results{prefix}")) as storage:
        storage.put("step-1/file", prefix.encode())
        filesystem, path = filesystem_of(storage)
        with filesystem.open_input_file(f"{path}/step-1/file") as file:
            assert file.read() == prefix.encode()


@pytest.mark.parametrize("name", ["plain", "a#b?c", "a%20b"])
def test_directory_is_the_same_place(tmp_path: Path, name: str) -> None:
    with closing(open_storage(str(tmp_path / name))) as storage:
        storage.put("file", b"1")
        filesystem, path = filesystem_of(storage)
        assert filesystem.get_file_info(f"{path}/file").is_file


def test_a_further_kind_of_storage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    address = SimpleNamespace(local_path=None)
    storage: Any = SimpleNamespace(uri="new://place")
    monkeypatch.setattr(result_files, "parse_address", lambda uri: address)
    with pytest.raises(StorageUnsupported, match=r"^new://place: .*Ray cannot read"):
        filesystem_of(storage)
