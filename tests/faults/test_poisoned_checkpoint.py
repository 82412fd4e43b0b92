"""A newest checkpoint with finite but huge moments, whose every checksum is right: the run goes on
from the one before.
"""

import shutil
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from recovery.checkpoint.commit import list_checkpoints, open_checkpoint
from recovery.checkpoint.manifest import MANIFEST_NAME, encode_manifest
from recovery.checkpoint.read import read_shards
from recovery.state.checksum import checksum
from recovery.storage.open import open_storage
from tests.faults.conftest import Scene
from tests.harness.exact_job import CHAIN, LAYERS, exact_job
from tests.harness.local_fleet import Interference, trains_at
from tests.harness.struck_run import StruckRun, losses_by_step

pytestmark = pytest.mark.faults
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
NODES = {"b": 1, "c": 1}


def poison_newest(uri: Path) -> tuple[int, int]:
    """Make each first moment of the newest checkpoint huge, with checksums that are right; return
    its step and that of the checkpoint before.
    """
    storage = open_storage(str(uri))
    before, newest = (info.step for info in list_checkpoints(storage)[-2:])
    manifest = open_checkpoint(storage, newest)
    directory = uri / f"step-{newest:08d}"
    files = []
    for file in manifest.files:
        shards = []
        for stored in file.shards:
            if stored.tensor.startswith("exp_avg/"):
                data = np.full(stored.num_bytes // 4, 1e30, np.float32).tobytes()
                with open(directory / file.name, "r+b") as opened:
                    opened.seek(stored.offset)
                    opened.write(data)
                sums = {"crc32": zlib.crc32(data), "checksum": checksum(memoryview(data))}
                stored = msgspec.structs.replace(stored, **sums)
            shards.append(stored)
        files.append(msgspec.structs.replace(file, shards=tuple(shards)))
    changed = msgspec.structs.replace(manifest, files=tuple(files))
    (directory / MANIFEST_NAME).write_bytes(encode_manifest(changed))
    moments = dict(read_shards(storage, open_checkpoint(storage, newest)))
    assert any(name.tensor.startswith("exp_avg/") for name in moments)
    storage.close()
    return newest, before


def test_a_run_goes_back_behind_a_poisoned_checkpoint_and_ends_as_if_there_had_been_none(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    def run_in(directory: Path, hold: int | None = None) -> StruckRun:
        directory.mkdir(exist_ok=True)
        given = {"model": {"config": LLAMA}, "training": {"max_skipped_steps": 2}}
        job = exact_job(directory, scene.shared, memory, CHAIN, **given)
        return StruckRun(job, directory, nodes=NODES, hold=hold)

    undisturbed = run_in(tmp_path / "undisturbed").run()
    assert undisturbed.ok, undisturbed.reason

    root = tmp_path / "poisoned"
    events = Interference().when(trains_at(10), lambda run, seen: run.stop())
    first = run_in(root, hold=11).run(events)
    shutil.rmtree(memory)
    shutil.rmtree(root / "disk")
    newest, older = poison_newest(root / "checkpoints")
    result = run_in(root).run()
    assert result.ok, result.reason
    restores = [event["step"] for event in result.events if event["kind"] == "restore"]
    assert restores == [newest, older]
    losses = losses_by_step(first.events + result.events)
    assert losses == losses_by_step(undisturbed.events)
