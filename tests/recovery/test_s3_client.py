"""Clients of one process share botocore's descriptions of services, and nothing else."""

import gzip
import json
import shutil
from pathlib import Path

import botocore
import pytest
from botocore.loaders import JSONFileLoader

from recovery.storage.s3_client import make_client

DATA = Path(botocore.__file__).parent / "data"


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")


def test_a_second_client_parses_no_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: each storage that a process opens costs a tenth of a second."""
    make_client()
    parsed: list[str] = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda self, path: parsed.append(path))
    make_client()
    assert parsed == []


def test_a_second_client_reads_keys_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [make_client()]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    clients.append(make_client())
    signers = [client._request_signer._credentials.access_key for client in clients]
    assert signers == ["first", "second"]


def test_descriptions_of_the_users_own_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: those of another path, which a client read before, serve for all."""
    make_client()
    own = tmp_path / "s3" / "2099-01-01"
    shutil.copytree(DATA / "s3" / "2006-03-01", own)
    packed = own / "service-2.json.gz"
    description = json.loads(gzip.decompress(packed.read_bytes()))
    description["metadata"]["apiVersion"] = "2099-01-01"
    (own / "service-2.json").write_text(json.dumps(description))
    packed.unlink()
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))
    assert make_client().meta.service_model.api_version == "2099-01-01"
    monkeypatch.delenv("AWS_DATA_PATH")
    assert make_client().meta.service_model.api_version == "2006-03-01"
