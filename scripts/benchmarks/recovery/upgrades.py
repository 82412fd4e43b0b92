"""Checkpoints written by earlier commits' code, and what this code makes of them.

    python -m scripts.benchmarks.recovery.upgrades [COMMIT ...] [--keep DIRECTORY] [--out FILE.json]

Each commit is checked out by `git worktree` into a temporary directory; its own code writes two
small checkpoints and its journal (one generation). This code then lists, verifies, reads, copies
and loads them with stock PyTorch, claims the next generation, commits a further step behind them,
and applies retention. By default: the first that had a changelog, the last of version 3, three
landings about a day apart, and this one. `--keep` leaves each storage as
DIRECTORY/COMMIT.tar.xz, as `tests/recovery/checkpoints` has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recovery.checkpoint.commit import (
    CheckpointFacts,
    commit_checkpoint,
    find_newest,
    list_checkpoints,
    open_checkpoint,
)
from recovery.checkpoint.copy import copy_checkpoint
from recovery.checkpoint.journal import Journal
from recovery.checkpoint.read import read_shards, verify
from recovery.checkpoint.retention import apply_retention
from recovery.errors import RecoveryError
from recovery.state.ancestry import Descent
from recovery.storage.open import open_storage
from scripts.benchmarks.provenance import provenance
from tests.harness.checkpoint_cases import (
    MODEL_CONFIG,
    full_state,
    state_specs,
    two_worker_layout,
    write_all,
)

COMMITS = ("52faffa8", "8f28f9d4", "b11d842c", "657115db", "aaf2c178", "HEAD")
STEPS = (10, 20)
GENERATION = 2
WRITE = f"""
import sys
from recovery.checkpoint.journal import Journal
from recovery.state.ancestry import Descent
from recovery.storage.open import open_storage
from tests.harness.checkpoint_cases import make_checkpoint

storage = open_storage(sys.argv[1])
journal = Journal(storage, "driver")
try:
    entry = Descent(generation={GENERATION}, parent=None, first_step=0, driver="driver")
except TypeError:
    entry = Descent(generation={GENERATION}, parent=None, first_step=0)
journal.claim(entry)
for step in {STEPS}:
    make_checkpoint(storage, step, seed=step)
"""


def write_by(commit: str, target: Path) -> None:
    """Let the code of `commit` write its checkpoints to `target`."""
    root = Path(__file__).parents[3]
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), commit], check=True, timeout=120)
        try:
            subprocess.run(
                [sys.executable, "-c", WRITE, str(target)],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                check=True,
                timeout=600,
            )
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, timeout=120)


def _is_right(step: int, state: dict[Any, torch.Tensor]) -> bool:
    full = full_state(state_specs(), seed=step)
    specs = state_specs()
    return all(
        torch.equal(unit, full[shard.tensor][specs[shard.tensor].unit_slices(shard.unit)])
        for shard, unit in state.items()
    )


def _loads_in_stock_pytorch(directory: Path, step: int) -> bool:
    from torch.distributed.checkpoint import FileSystemReader, load

    full = full_state(state_specs(), seed=step)
    state = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    reader = FileSystemReader(str(directory / f"step-{step:08d}"))
    load(state, storage_reader=reader, no_dist=True)
    return all(torch.equal(state[name], full[name]) for name in full)


def read_by_this(directory: Path, elsewhere: Path) -> dict[str, Any]:
    """Do all that a user does with a storage; each action gives True, or the error's sentence."""
    storage = open_storage(str(directory))
    target = open_storage(str(elsewhere))
    first, last = STEPS

    def go_on() -> bool:
        descent = Descent(generation=3, parent=GENERATION, first_step=last, driver="next")
        Journal(storage, "next").claim(descent)
        specs = state_specs()
        layout = two_worker_layout(specs)
        receipts = write_all(storage, 30, layout, full_state(specs, seed=30))
        facts = CheckpointFacts({}, MODEL_CONFIG, job="job", generation=3)
        commit_checkpoint(storage, 30, layout, receipts, facts)
        newest = find_newest(storage, whole=True)
        return newest.info is not None and newest.info.step == 30 and not newest.damaged

    actions: dict[str, Callable[[], bool]] = {
        "listed": lambda: [info.step for info in list_checkpoints(storage)] == list(STEPS),
        "verified": lambda: all(verify(storage, step).ok for step in STEPS),
        "newest": lambda: find_newest(storage, whole=True).info.step == last,  # type: ignore[union-attr]
        "read": lambda: all(
            _is_right(step, dict(read_shards(storage, open_checkpoint(storage, step))))
            for step in STEPS
        ),
        "stock PyTorch": lambda: all(_loads_in_stock_pytorch(directory, step) for step in STEPS),
        "copied": lambda: (
            copy_checkpoint(storage, target, last) is not None and verify(target, last).ok
        ),
        "gone on from": go_on,
        "retention": lambda: apply_retention(storage, keep=2).removed_steps == (first,),
    }
    manifest = directory / f"step-{last:08d}" / "manifest.json"
    found: dict[str, Any] = {"version": json.loads(manifest.read_text())["version"]}
    for name, action in actions.items():
        try:
            found[name] = action()
        except (RecoveryError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def pack(directory: Path, archive: Path) -> None:
    """Keep the newest step and the journal."""
    with tarfile.open(archive, "w:xz") as tar:
        for name in ("generations", f"step-{STEPS[-1]:08d}"):
            tar.add(directory / name, arcname=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commits", nargs="*", default=COMMITS)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {}
    for commit in args.commits:
        with tempfile.TemporaryDirectory() as scratch:
            storage = Path(scratch) / "storage"
            write_by(commit, storage)
            if args.keep:
                pack(storage, args.keep / f"{commit}.tar.xz")
            rows[commit] = read_by_this(storage, Path(scratch) / "elsewhere")
        print(commit, json.dumps(rows[commit]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(provenance() | {"written_by": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
