"""A file that is there already is taken for a checkpoint only if it has the content."""

from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
import torch

from recovery.checkpoint.copy import copy_checkpoint
from recovery.checkpoint.manifest import DataFile
from recovery.checkpoint.read import verify
from recovery.checkpoint.write import step_prefix
from recovery.state.layout import Layout, TensorSpec
from recovery.storage.contents import holds
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import (
    commit,
    make_checkpoint,
    state_specs,
    two_worker_layout,
    write_all,
)

PLACES: dict[str, Callable[[DataFile], int]] = {
    "elements": lambda file: file.shards[0].offset,
    "zip header": lambda file: file.shards[0].item_offset + 1,
    "directory of the zip": lambda file: file.shards[0].item_end - 1,
    "trailer": lambda file: file.num_bytes - 1,
}


def flip(storage: Storage, name: str, at: int) -> None:
    """Change one bit of an object as a disk would, or another program."""
    data = bytearray(storage.get(name))
    data[at] ^= 1
    storage.put(name, data)


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_is_trained_again_replaces_what_is_damaged(
    storage: Storage, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, full = make_checkpoint(storage, 20)
    damaged, intact = manifest.files
    name = step_prefix(20) + damaged.name
    flip(storage, name, PLACES[place](damaged))
    layout = two_worker_layout(state_specs())
    receipts = write_all(storage, 20, layout, full)
    assert sum(receipt.bytes_sent for receipt in receipts) == damaged.num_bytes
    assert sum(receipt.bytes_present for receipt in receipts) == intact.num_bytes
    commit(storage, 20, layout, receipts)
    assert verify(storage, 20).problems == ()
    assert damaged.name in caplog.text
    assert "replaced" in caplog.text


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_replaces_what_is_damaged_at_its_target(
    storage: Storage, tmp_path: Path, place: str
) -> None:
    source = open_storage(str(tmp_path / "source"))
    manifest, _ = make_checkpoint(source, 20)
    copy_checkpoint(source, storage)
    damaged, intact = manifest.files
    name = step_prefix(20) + damaged.name
    flip(storage, name, PLACES[place](damaged))
    before = {info.name: info.modified_s for info in storage.list("step-")}
    copy_checkpoint(source, storage)
    assert storage.get(name) == source.get(name)
    kept = step_prefix(20) + intact.name
    assert {info.name: info.modified_s for info in storage.list("step-")}[kept] == before[kept]


def test_an_object_without_a_recorded_checksum_is_read(s3_uri: str) -> None:
    """Another program's upload: boto3's own default is a CRC-32."""
    storage = open_storage(s3_uri)
    bucket, _, prefix = s3_uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    client.put_object(Bucket=bucket, Key=f"{prefix}/object", Body=b"abc")
    client.close()
    assert holds(storage, "object", b"abc")
    assert not holds(storage, "object", b"abd")


def test_an_empty_object_is_held(storage: Storage) -> None:
    storage.put("empty", b"")
    assert holds(storage, "empty", b"")


def test_a_damaged_file_of_several_is_the_only_one_sent(storage: Storage) -> None:
    spec = TensorSpec("param/w", (4, 2), "float32", 0, (0, 1, 2, 3, 4))
    layout = Layout({spec.name: spec}, {"a/0": frozenset(spec.shards)})
    state = {spec.name: torch.arange(8.0).reshape(4, 2)}
    (receipt,) = write_all(storage, 1, layout, state)
    flip(storage, step_prefix(1) + receipt.files[0].name, 0)
    (again,) = write_all(storage, 1, layout, state)
    assert again.files == receipt.files
    assert again.bytes_sent == receipt.files[0].num_bytes
