"""Documents of other releases: a later one's are refused by name and touched by nobody, an older
one's are read.
"""

import json
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autohet.cli.main import main
from recovery.checkpoint.commit import find_newest, open_checkpoint
from recovery.checkpoint.copy import copy_checkpoint
from recovery.checkpoint.errors import VERSION, LaterRelease
from recovery.checkpoint.journal import Journal, entry_name, read_ancestry
from recovery.checkpoint.manifest import MANIFEST_NAME
from recovery.checkpoint.read import read_shards, verify
from recovery.checkpoint.retention import apply_retention, remove_orphans
from recovery.checkpoint.write import step_prefix
from recovery.errors import RecoveryError
from recovery.release import RELEASE
from recovery.state.ancestry import Descent
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import full_state, make_checkpoint, state_specs

CHECKPOINTS = Path(__file__).parent / "checkpoints"
LATER = {"version": VERSION + 1, "created_by": "autohet 9.9.0, torch 3.0", "release": "9.9.0"}


@pytest.fixture
def storage(directory: Storage) -> Storage:
    Journal(directory, "driver").claim(
        Descent(generation=2, parent=None, first_step=0, driver="driver")
    )
    for step in (10, 20, 30):
        make_checkpoint(directory, step, seed=step)
    return directory


def rewrite(storage: Storage, name: str, **changed: Any) -> None:
    """Change a document as another release would have written it, with the checksum of its rule."""
    document = json.loads(storage.get(name)) | changed
    storage.put(name, json.dumps(document, separators=(",", ":")).encode())


def objects(storage: Storage) -> dict[str, bytes]:
    names = [info.name for info in storage.list() if not info.name.endswith(".lease")]
    return {name: storage.get(name) for name in names}


@pytest.mark.parametrize("name", [step_prefix(30) + MANIFEST_NAME, entry_name(2)])
def test_what_a_later_release_wrote_is_refused_by_name_and_left(
    storage: Storage, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong: it is damaged, an older step is gone on from, and its manifest is renamed."""
    rewrite(storage, name, **LATER, unheard_of=[1])
    before = objects(storage)
    target = open_storage(str(tmp_path / "target"))
    readers: list[Callable[[], object]] = [
        lambda: find_newest(storage, whole=True),
        lambda: open_checkpoint(storage),
        lambda: verify(storage, 30),
        lambda: copy_checkpoint(storage, target, 30),
        lambda: make_checkpoint(storage, 30, seed=30),
    ]
    for reader in readers:
        with pytest.raises(LaterRelease, match=rf"9\.9\.0.* this is autohet {RELEASE}"):
            reader()
    for remover in (
        lambda: apply_retention(storage, keep=1),
        lambda: remove_orphans(storage, (), -9),
    ):
        try:
            assert "9.9.0" in remover().unknown
        except LaterRelease:
            continue
    assert objects(storage) == before
    assert objects(target) == {}
    assert main(["checkpoint", "verify", "--storage", storage.uri, "--step", "30"]) == 2
    assert "9.9.0" in capsys.readouterr().err
    is_journal = name == entry_name(2)
    code = main(["checkpoint", "verify", "--storage", storage.uri, "--json"])
    captured = capsys.readouterr()
    if is_journal:
        assert code == 2
        assert "9.9.0" in captured.err
        return
    assert code == 1
    document = json.loads(captured.out)
    assert [(each["step"], each["ok"]) for each in document["checkpoints"]] == [
        (10, True),
        (20, True),
    ]
    assert "9.9.0" in document["not_verified"]["30"]


def test_a_later_release_s_step_hides_no_damage_after_it(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(storage, step_prefix(10) + MANIFEST_NAME, **LATER)
    assert main(["checkpoint", "verify", "--storage", storage.uri]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 20", "step 30", "step 10"]
    assert "not verified" in lines[-1]


def older_manifest(storage: Storage, step: int) -> None:
    """Rewrite the manifest as autohet 0.1.0 did: version 2, without run and driver."""
    name = step_prefix(step) + MANIFEST_NAME
    document = json.loads(storage.get(name))
    del document["run"]
    del document["driver"]
    document |= {"version": 2, "created_by": "autohet, torch 2.13.0", "checksum": 0}
    text = json.dumps(document, separators=(",", ":"))
    document["checksum"] = zlib.crc32(text.encode())
    storage.put(name, json.dumps(document, separators=(",", ":")).encode())


def older_entry(storage: Storage, generation: int) -> None:
    """Rewrite the journal's entry as autohet 0.1.0 did."""
    document = json.loads(storage.get(entry_name(generation)))
    fields = {key: document[key] for key in ("generation", "parent", "first_step", "driver")}
    text = json.dumps(fields, separators=(",", ":"))
    fields["checksum"] = zlib.crc32(text.encode())
    storage.put(entry_name(generation), json.dumps(fields, separators=(",", ":")).encode())


def test_what_the_release_before_wrote_is_read_and_gone_on_from(
    storage: Storage, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        older_manifest(storage, step)
    older_entry(storage, 2)
    assert read_ancestry(storage).unknown == frozenset()
    assert all(verify(storage, step).ok for step in (10, 20, 30))
    target = open_storage(str(tmp_path / "target"))
    copy_checkpoint(storage, target)
    name = step_prefix(30) + MANIFEST_NAME
    assert target.get(name) == storage.get(name)
    Journal(storage, "next").claim(Descent(generation=3, parent=2, first_step=30, driver="next"))
    newest = find_newest(storage, whole=True)
    assert newest.info is not None
    assert (newest.info.step, newest.damaged, newest.unknown) == (30, (), "")
    assert apply_retention(storage, keep=2).removed_steps == (10,)


@pytest.mark.parametrize(("commit", "version"), [("c4727522", 2), ("8f28f9d4", 3)])
def test_what_commits_before_have_written_is_read(
    tmp_path: Path, commit: str, version: int
) -> None:
    """Their own code wrote it (`scripts/benchmarks/recovery/upgrades.py --keep`)."""
    with tarfile.open(CHECKPOINTS / f"{commit}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    storage = open_storage(str(tmp_path))
    manifest = open_checkpoint(storage)
    assert (manifest.step, manifest.version) == (20, version)
    assert verify(storage).ok
    full = full_state(state_specs(), seed=20)
    for shard, unit in read_shards(storage, manifest):
        slices = manifest.specs[shard.tensor].unit_slices(shard.unit)
        assert torch.equal(unit, full[shard.tensor][slices])
    assert read_ancestry(storage).contains(2, 2, 20)


def test_a_version_before_0_1_0_is_named(storage: Storage) -> None:
    rewrite(storage, step_prefix(30) + MANIFEST_NAME, version=1)
    with pytest.raises(RecoveryError, match=r"version 1 is older than autohet 0\.1\.0"):
        open_checkpoint(storage, 30)
