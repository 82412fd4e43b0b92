"""`.metadata` is that of the committed manifest, whoever dies when, and another program's stays."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from recovery.checkpoint.commit import list_checkpoints, open_checkpoint
from recovery.checkpoint.copy import copy_checkpoint
from recovery.checkpoint.dcp import METADATA_NAME, encode_dcp_metadata
from recovery.checkpoint.errors import CheckpointConflict
from recovery.checkpoint.manifest import MANIFEST_NAME
from recovery.checkpoint.read import verify
from recovery.checkpoint.retention import apply_retention, remove_orphans
from recovery.checkpoint.write import step_prefix
from recovery.storage.errors import ObjectExists
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import (
    commit,
    full_state,
    make_checkpoint,
    state_specs,
    two_worker_layout,
    write_all,
)
from tests.harness.faulty_storage import FaultyStorage

LAYOUT = two_worker_layout(state_specs())


class Killed(Exception):
    """The coordinator's process ends."""


def killed(name: str, call: Any) -> None:
    raise Killed


def killed_after(name: str, call: Any) -> None:
    with suppress(ObjectExists):
        call()
    raise Killed


@pytest.mark.parametrize(
    ("action", "suffix"),
    [
        (killed, METADATA_NAME),
        (killed_after, METADATA_NAME),
        (killed, MANIFEST_NAME),
        (killed_after, MANIFEST_NAME),
    ],
)
@pytest.mark.parametrize("is_committed", [False, True], ids=["first", "overtaken"])
def test_a_coordinator_that_is_killed_leaves_what_stock_pytorch_loads(
    directory: Storage, action: Any, suffix: str, is_committed: bool
) -> None:
    """Wrong: the loser's `.metadata`, which names its own files, lies beside the winner's manifest.

    The loser has looked for a manifest before the winner put it.
    """
    faulty = FaultyStorage(directory)

    def overtaken(name: str, call: Any) -> Any:
        make_checkpoint(directory, 8, seed=1)
        return call()

    if is_committed:
        faulty.fault("list", overtaken)
    faulty.fault("put", action, suffix=suffix)
    receipts = write_all(directory, 8, LAYOUT, full_state(LAYOUT.tensors, seed=2))
    with pytest.raises(Killed):
        commit(faulty, 8, LAYOUT, receipts)
    if list_checkpoints(directory):
        assert verify(directory, 8).problems == ()
    make_checkpoint(directory, 8, seed=3)
    assert verify(directory, 8).problems == ()


def test_a_manifest_that_is_read_implies_the_bytes_that_were_stored(directory: Storage) -> None:
    """Wrong: bytes that depend on which strings are one object, so that each check parses them."""
    make_checkpoint(directory, 8)
    stored = directory.get(step_prefix(8) + METADATA_NAME)
    assert stored == encode_dcp_metadata(open_checkpoint(directory, 8))


def test_a_driver_that_starts_corrects_what_a_killed_one_left(
    directory: Storage, tmp_path: Path
) -> None:
    """The old one was killed between its manifest and the correction of an older `.metadata`."""
    make_checkpoint(directory, 8, seed=1)
    name = step_prefix(8) + METADATA_NAME
    other = open_storage(str(tmp_path / "other"))
    make_checkpoint(other, 8, seed=2)
    for stale in (None, other.get(name)):
        directory.delete([name])
        if stale is not None:
            directory.put(name, stale)
        assert verify(directory, 8).problems != ()
        durable = Durable(directory, RunFacts("job", {}, {}), Retention(2))
        durable.load_newest()
        durable.close()
        directory = open_storage(directory.uri)
        assert verify(directory, 8).problems == ()


@pytest.fixture
def stock(directory: Storage) -> dict[str, bytes]:
    """Contents of stock PyTorch's own checkpoint in a step's directory."""
    folder = Path(directory.uri, step_prefix(8))
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=str(folder), no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_stock_checkpoint_in_the_directory_keeps_its_own(
    directory: Storage, tmp_path: Path, stock: dict[str, bytes]
) -> None:
    with pytest.raises(CheckpointConflict, match="of another program"):
        make_checkpoint(directory, 8)
    source = open_storage(str(tmp_path / "source"))
    make_checkpoint(source, 8)
    with pytest.raises(CheckpointConflict, match="of another program"):
        copy_checkpoint(source, directory)
    assert list_checkpoints(directory) == []
    remove_orphans(directory, min_age_s=-3600.0)
    folder = Path(directory.uri, step_prefix(8))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == stock


def test_retention_leaves_the_metadata_of_a_stock_checkpoint(directory: Storage) -> None:
    """Stock PyTorch wrote its checkpoint over `.metadata` of ours."""
    make_checkpoint(directory, 8)
    folder = Path(directory.uri, step_prefix(8))
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=str(folder), no_dist=True)
    stock = (folder / METADATA_NAME).read_bytes()
    make_checkpoint(directory, 16)
    assert apply_retention(directory, keep=1).removed_steps == (8,)
    assert (folder / METADATA_NAME).read_bytes() == stock
    state = {"weight": torch.zeros(3)}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    assert torch.equal(state["weight"], torch.ones(3))
