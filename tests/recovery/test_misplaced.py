"""Files, manifests, journals and directories of another step, run, version or place: every reader
refuses them by name, or is right.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autohet.cli.main import main
from recovery.checkpoint.commit import (
    CheckpointFacts,
    commit_checkpoint,
    find_newest,
    list_checkpoints,
    open_checkpoint,
)
from recovery.checkpoint.copy import copy_checkpoint
from recovery.checkpoint.errors import CheckpointError
from recovery.checkpoint.journal import Journal, entry_name, read_ancestry
from recovery.checkpoint.manifest import MANIFEST_NAME
from recovery.checkpoint.read import read_shards, verify
from recovery.checkpoint.retention import apply_retention, reading_checkpoint, remove_orphans
from recovery.checkpoint.write import step_prefix
from recovery.state.ancestry import Descent
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from tests.harness.checkpoint_cases import full_state, state_specs, two_worker_layout, write_all

LAYOUT = two_worker_layout(state_specs())
STEPS = (10, 20, 30)
STRAY = 35
"""A step that no driver of the run has reached."""


def train(folder: Path, driver: str, generation: int, steps: tuple[int, ...], first: int) -> None:
    """Commit `steps` as a driver does: with its journal, and state that only it has."""
    storage = open_storage(str(folder))
    journal = Journal(storage, driver)
    parent = generation - 1 or None
    journal.read()
    journal.claim(Descent(generation=generation, parent=parent, first_step=first, driver=driver))
    for step in steps:
        recommit(storage, driver, generation, step)


def recommit(storage: Storage, driver: str, generation: int, step: int) -> None:
    state = {name: tensor + len(driver) for name, tensor in state_of(step).items()}
    commit_checkpoint(
        storage,
        step,
        LAYOUT,
        write_all(storage, step, LAYOUT, state),
        CheckpointFacts({}, {}, generation=generation),
        ancestry=read_ancestry(storage),
    )


def state_of(step: int) -> dict[str, torch.Tensor]:
    return full_state(LAYOUT.tensors, seed=step)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ours`; `fork`, its copy at step 10 that another driver trained on; `theirs`, another run."""
    root = tmp_path_factory.mktemp("runs")
    train(root / "ours", "us", 1, (10,), 0)
    shutil.copytree(root / "ours", root / "fork")
    train(root / "ours", "us", 2, (20, 30), 10)
    train(root / "fork", "fork", 2, (20, 30, STRAY), 10)
    train(root / "theirs", "they", 1, (10,), 0)
    train(root / "theirs", "they", 2, (20, 30, STRAY), 10)
    train(root / "theirs", "they", 3, (), 30)
    return root


def directory(root: Path, run: str, step: int) -> Path:
    return root / run / step_prefix(step)


def replace_directory(run: str, source: int, target: int) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        shutil.rmtree(directory(root, "ours", target), ignore_errors=True)
        shutil.copytree(directory(root, run, source), directory(root, "ours", target))

    return change


def replace_manifest(run: str, source: int, target: int) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        manifest = directory(root, run, source) / MANIFEST_NAME
        shutil.copy(manifest, directory(root, "ours", target) / MANIFEST_NAME)

    return change


def rename_directory(root: Path) -> None:
    directory(root, "ours", 30).rename(directory(root, "ours", STRAY))


def without_entry(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """The journal forgot the generation, as retention lets it, or an operator."""

    def changed(root: Path) -> None:
        change(root)
        (root / "ours" / entry_name(2)).unlink()

    return changed


MISPLACED: dict[str, tuple[int, Callable[[Path], None], str]] = {
    "directory of another step": (STRAY, replace_directory("ours", 20, STRAY), "is of step 20"),
    "directory of another step over one": (30, replace_directory("ours", 20, 30), "is of step 20"),
    "directory renamed": (STRAY, rename_directory, "is of step 30"),
    "directory of another run": (STRAY, replace_directory("theirs", STRAY, STRAY), "another run"),
    "directory of another run over one": (30, replace_directory("theirs", 30, 30), "another run"),
    "directory of a fork": (STRAY, replace_directory("fork", STRAY, STRAY), "another run"),
    "directory of a fork over one": (30, replace_directory("fork", 30, 30), "another run"),
    "directory of another run, entry lost": (
        STRAY,
        without_entry(replace_directory("theirs", STRAY, STRAY)),
        "is of run",
    ),
    "manifest of another step": (30, replace_manifest("ours", 20, 30), "is of step 20"),
    "manifest of another run": (30, replace_manifest("theirs", 30, 30), "another run"),
    "manifest of a fork": (30, replace_manifest("fork", 30, 30), "another run"),
}


@pytest.fixture
def root(runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def storage(root: Path) -> Storage:
    return open_storage(str(root / "ours"))


def holds_ours(storage: Storage, step: int) -> bool:
    """The checkpoint is intact, and what our driver trained."""
    if not verify(storage, step).ok:
        return False
    manifest = open_checkpoint(storage, step)
    for shard, tensor in read_shards(storage, manifest):
        whole = state_of(step)[shard.tensor] + len("us")
        if not torch.equal(tensor, whole[manifest.specs[shard.tensor].unit_slices(shard.unit)]):
            return False
    return True


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("case", MISPLACED)
def test_what_is_misplaced_is_named_by_every_reader(
    case: str, root: Path, storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong: the weights of step 20 verify as those of step 35, or those of a fork as ours."""
    step, change, says = MISPLACED[case]
    change(root)
    command = ["checkpoint", "list", "--json", "--storage", storage.uri]
    assert main(command) == 1
    listed = json.loads(capsys.readouterr().out)
    assert step not in [row["step"] for row in listed["checkpoints"]]
    assert [item["step"] for item in listed["damaged"] if says in item["problem"]] == [step]
    for reader in (
        lambda: open_checkpoint(storage, step),
        lambda: open_checkpoint(storage),
        lambda: verify(storage, step),
        lambda: copy_checkpoint(storage, open_storage(str(root / "copy")), step),
        lambda: reading_checkpoint(storage, step).__enter__(),
    ):
        with pytest.raises(CheckpointError, match=says):
            reader()
    newest = find_newest(storage, whole=True)
    assert newest.info is not None
    assert holds_ours(storage, newest.info.step)
    assert any(says in str(error) for error in newest.damaged)


@pytest.mark.parametrize("case", MISPLACED)
def test_what_is_misplaced_is_no_reason_to_remove_anything(
    case: str, root: Path, storage: Storage
) -> None:
    """Wrong: the only intact checkpoint is removed, or what somebody else may still need."""
    step, change, says = MISPLACED[case]
    change(root)
    before = contents(directory(root, "ours", step))
    removal = apply_retention(storage, keep=1)
    remove_orphans(storage, min_age_s=-3600.0)
    assert contents(directory(root, "ours", step)) == before
    assert step not in removal.removed_steps
    assert removal.unknown or any(says in reason for _, reason in removal.kept)
    newest = find_newest(storage, whole=True).info
    assert newest is not None
    assert holds_ours(storage, newest.step)


@pytest.mark.parametrize("case", MISPLACED)
def test_a_step_that_is_trained_is_committed_or_refused(
    case: str, root: Path, storage: Storage
) -> None:
    """Wrong: the commit stores nothing and reports success."""
    step, change, says = MISPLACED[case]
    change(root)
    before = contents(directory(root, "ours", step))
    if "step" not in says:
        with pytest.raises(CheckpointError, match=says):
            recommit(storage, "us", 2, step)
        assert before.items() <= contents(directory(root, "ours", step)).items()
        return
    recommit(storage, "us", 2, step)
    assert holds_ours(storage, step)
    assert before[MANIFEST_NAME] in contents(directory(root, "ours", step)).values(), "kept"


def entry_of(run: str, source: int, target: int) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        shutil.copy(root / run / entry_name(source), root / "ours" / entry_name(target))

    return change


@pytest.mark.parametrize(
    ("change", "generation"),
    [
        (entry_of("ours", 1, 3), 3),
        (entry_of("ours", 1, 2), 2),
        (entry_of("theirs", 3, 3), 3),
        (entry_of("theirs", 2, 2), 2),
        (entry_of("theirs", 1, 1), 1),
    ],
    ids=["another number", "over one", "another run", "another run's over one", "the oldest"],
)
def test_a_misplaced_journal_entry_is_unknown(
    change: Callable[[Path], None], generation: int, root: Path, storage: Storage
) -> None:
    """Wrong: history is that of another run, and step 30 an abandoned one."""
    change(root)
    known = read_ancestry(storage).entries[generation]
    assert known.driver in ("", "they")
    assert apply_retention(storage, keep=1).unknown
    newest = find_newest(storage, whole=True)
    if known.driver:
        # Of two entries each is as good as the other, and the older one counts.
        assert newest.info is None
        assert all("is of " in str(error) for error in newest.damaged)
    else:
        assert newest.info is not None
        assert holds_ours(storage, newest.info.step)
    assert [info.step for info in list_checkpoints(storage)] == list(STEPS)


def test_a_storage_that_was_moved_is_the_same(root: Path) -> None:
    (root / "ours").rename(root / "elsewhere")
    moved = open_storage(str(root / "elsewhere"))
    train(root / "elsewhere", "us", 3, (40,), 30)
    assert all(holds_ours(moved, step) for step in (*STEPS, 40))
    assert apply_retention(moved, keep=2).removed_steps == (10, 20)


def test_files_of_another_step_are_found_and_replaced(root: Path, storage: Storage) -> None:
    older, newer = (open_checkpoint(storage, step) for step in (20, 30))
    for one, other in zip(older.files, newer.files, strict=True):
        source = directory(root, "ours", 20) / one.name
        shutil.copy(source, directory(root, "ours", 30) / other.name)
    assert not verify(storage, 30).ok
    recommit(storage, "us", 2, 30)
    assert holds_ours(storage, 30)


def test_a_committed_step_whose_file_is_lost_is_committed_again(
    root: Path, storage: Storage
) -> None:
    """Wrong: the commit finds its manifest and stores nothing. The new bytes are others."""
    lost = open_checkpoint(storage, 30).files[0]
    (directory(root, "ours", 30) / lost.name).unlink()
    recommit(storage, "another", 2, 30)
    assert verify(storage, 30).ok
