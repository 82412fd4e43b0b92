"""A checkpoint whose files all arrived is committed, also if the driver ended before its manifest:
by the next one, from the receipts that lie beside the files.
"""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.runtime.copies.durable_uploads import DurableUploads
from autohet.runtime.copies.transfer_log import TransferLog
from recovery.checkpoint.commit import (
    CheckpointFacts,
    commit_checkpoint,
    list_checkpoints,
    open_checkpoint,
)
from recovery.checkpoint.read import verify
from recovery.checkpoint.receipts import read_uploads
from recovery.checkpoint.unattended import HeldSteps, choose_step, commit_stored
from recovery.state.ancestry import Descent
from recovery.state.layout import assign_writers
from recovery.storage.open import open_storage
from tests.harness.checkpoint_cases import full_state, local_state, state_specs, two_worker_layout
from tests.harness.fake_job import fake_job
from tests.harness.waits import HANG_S

LAYOUT = two_worker_layout(state_specs())


def upload(path: Path, step: int, generation: int, workers: tuple[str, ...]) -> None:
    """Write the parts of these workers, as they do while they train."""
    storage = open_storage(str(path))
    writers = assign_writers(LAYOUT)
    for worker in workers:
        uploads = DurableUploads(worker, storage, fake_job().elastic.timeouts(), TransferLog())
        order = SimpleNamespace(
            generation=generation,
            layout=LAYOUT,
            checkpoint_shards=writers[worker],
            is_claimed=False,
        )
        state = local_state(LAYOUT, worker, full_state(LAYOUT.tensors))
        uploads.start(order, step, state)  # type: ignore[arg-type]
        until = time.monotonic() + HANG_S
        while not uploads.take_receipts():
            assert time.monotonic() < until
            time.sleep(0.01)
        uploads.close()


def driver(path: Path) -> Durable:
    facts = RunFacts("job", {}, {"seed": 1})
    return Durable(open_storage(str(path)), facts, Retention(None))


def claim(durable: Durable, generation: int, first_step: int) -> None:
    """Begin a generation in the journal, which goes on from the one before."""
    entry = Descent(
        generation=generation,
        parent=generation - 1 or None,
        first_step=first_step,
        driver=durable.lease.driver,
    )
    durable.claim(entry)
    durable.claim_pool.submit(lambda: None).result()


@pytest.mark.parametrize(
    ("uploads", "committed"),
    [
        ([(4, 1, LAYOUT.workers)], [4]),
        ([(4, 1, LAYOUT.workers[:1])], []),
        ([(4, 1, LAYOUT.workers[:1]), (4, 2, LAYOUT.workers[1:])], []),
        ([(12, 1, LAYOUT.workers), (10, 2, LAYOUT.workers)], [10]),
    ],
    ids=["all parts", "a part is missing", "parts of two generations", "an abandoned history"],
)
def test_the_next_driver_commits_what_arrived_whole(
    tmp_path: Path, uploads: list[tuple[int, int, tuple[str, ...]]], committed: list[int]
) -> None:
    first = driver(tmp_path)
    first.take_lease()
    for generation, first_step in ((1, 0), (2, 8)):
        if any(each[1] == generation for each in uploads):
            claim(first, generation, first_step)
    for each in uploads:
        upload(tmp_path, *each)
    first.close()

    second = driver(tmp_path)
    found = second.load_newest()
    second.close()
    storage = open_storage(str(tmp_path))
    assert [info.step for info in list_checkpoints(storage)] == committed
    assert found.step == (committed[-1] if committed else None)
    for step in committed:
        manifest = open_checkpoint(storage, step)
        verify(storage, step)
        assert (manifest.run, manifest.scalars["seed"]) != ("", 2)
        assert not [each for each in read_uploads(storage) if each.step == step]


def test_a_damaged_receipt_is_no_part(tmp_path: Path) -> None:
    upload(tmp_path, 4, 1, LAYOUT.workers)
    (path, *_) = tmp_path.glob("step-*/*.receipt")
    path.write_bytes(path.read_bytes().replace(b'"generation":1', b'"generation":2'))
    assert not any(each.is_complete for each in read_uploads(open_storage(str(tmp_path))))


@pytest.mark.parametrize("is_of_present_history", [True, False])
def test_workers_commit_without_a_driver_what_counts(
    tmp_path: Path, is_of_present_history: bool
) -> None:
    """With the facts of the checkpoint before; a second upload of the step, by fewer workers, is
    one of its own.
    """
    first = driver(tmp_path)
    first.take_lease()
    for generation, first_step in ((1, 0), (2, 4 if is_of_present_history else 2)):
        claim(first, generation, first_step)
    storage = open_storage(str(tmp_path))
    upload(tmp_path, 4, 1, LAYOUT.workers)
    assert commit_stored(storage) is None, "the facts of the run are not known"
    first.close()
    (tmp_path / "other").mkdir()
    upload(tmp_path, 2, 1, LAYOUT.workers)
    (receipts, _) = read_uploads(storage)
    facts = CheckpointFacts({"seed": 7, "step": 2}, {}, "job", 1)
    commit_checkpoint(storage, 2, receipts.layout, receipts.receipts.values(), facts)
    upload(tmp_path, 6, 2, LAYOUT.workers[:1])
    wanted = 4 if is_of_present_history else 2
    assert commit_stored(storage) == commit_stored(storage) == wanted
    manifest = open_checkpoint(storage)
    assert (manifest.step, manifest.scalars["seed"], manifest.scalars["step"]) == (
        wanted,
        7,
        wanted,
    )
    verify(storage, wanted)


def test_the_step_is_one_of_which_every_shard_is_held() -> None:
    left, right = LAYOUT.workers
    alone = {shard: None for shard in LAYOUT.shards if LAYOUT.holders(shard) != (left, right)}
    assert alone, "some shards have one holder"

    def held(**steps: tuple[int, ...]) -> dict[str, HeldSteps]:
        names = dict(zip(("left", "right"), (left, right), strict=True))
        return {
            names[key]: HeldSteps(worker=names[key], generation=1, steps=each)
            for key, each in steps.items()
        }

    found = choose_step(held(left=(6, 7), right=(5, 6)), LAYOUT)
    assert found is not None
    assert (found[0], set(found[1].workers)) == (6, {left, right})
    assert choose_step(held(left=(6, 7)), LAYOUT) is None
