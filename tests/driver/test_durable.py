"""The driver's side of durable storage: what earlier runs left goes when a job starts, and every
commit is told.
"""

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from autohet.driver.control.decisions import Untold
from autohet.driver.control.durable import Durable
from autohet.driver.control.ledger import Ledger
from autohet.driver.control.observation import Observation
from recovery.checkpoint.commit import list_checkpoints, open_checkpoint
from recovery.checkpoint.journal import read_ancestry
from recovery.checkpoint.read import verify
from recovery.state.ancestry import Descent
from recovery.storage.open import open_storage
from tests.harness.checkpoint_cases import full_state, state_specs, two_worker_layout, write_all
from tests.harness.fake_job import fake_job
from tests.harness.s3_server import s3_server


def make_old(root, step):
    """Make everything of a step look a day old."""
    for path in Path(root, f"step-{step:08d}").iterdir():
        stamp = path.stat().st_mtime - 86400
        os.utime(path, (stamp, stamp))


def test_a_job_clears_up_when_it_starts_and_once(tmp_path):
    directory, layout = open_storage(str(tmp_path)), two_worker_layout(state_specs())
    for step in (1, 2):
        write_all(directory, step, layout, full_state(layout.tensors))
    make_old(tmp_path, 1)
    durable = Durable(directory, "job", {}, {}, keep=2)
    assert durable.load_newest().step is None
    until = time.monotonic() + 20
    while any(True for _ in directory.list("step-00000001/")):
        assert time.monotonic() < until
        time.sleep(0.01)
    make_old(tmp_path, 2)
    durable.load_newest()
    durable.close()
    assert any(True for _ in directory.list("step-00000002/")), "another's upload, begun meanwhile"


def test_checkpoints_committed_between_two_looks_are_all_told(tmp_path):
    directory, layout = open_storage(str(tmp_path)), two_worker_layout(state_specs())
    durable, untold = Durable(directory, "job", {}, {}, keep=5), Untold()
    ledger, controller = Ledger(fake_job(), untold), SimpleNamespace(generation=1, members=())
    for step in (4, 8):
        durable.commit(
            step, 1, layout, write_all(directory, step, layout, full_state(layout.tensors))
        )
    durable.refresh()
    durable.close()  # all that was asked for is done
    for _ in range(2):
        ledger.take(Observation(10.0, {}, checkpoint=durable.state()), controller)
    assert [each.fields["step"] for each in untold if each.kind == "checkpoint"] == [4, 8]
    assert ledger.checkpoint_step == 8


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URI of a storage."""
    if request.param == "directory":
        yield str(tmp_path)
        return
    with s3_server() as server:
        yield f"{server.create_bucket(uuid.uuid4().hex)}/job"


@pytest.mark.parametrize(("keep", "kept"), [(None, [2, 4, 6, 8, 10]), (2, [8, 10])])
def test_all_checkpoints_are_kept_where_that_is_asked_for(
    place: str, keep: int | None, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation 2 goes back to step 4, so its predecessor's steps 6 and 12 are of a history that
    was left.
    """
    storage, layout = open_storage(place), two_worker_layout(state_specs())
    durable = Durable(open_storage(place), "job", {}, {}, keep=keep)

    def commit(step: int, generation: int) -> None:
        durable.commit(
            step, generation, layout, write_all(storage, step, layout, full_state(layout.tensors))
        )

    driver, read = durable.lease.driver, Mock(wraps=open_checkpoint)
    monkeypatch.setattr("autohet.driver.control.durable.open_checkpoint", read)
    durable.claim(Descent(generation=1, parent=None, first_step=0, driver=driver))
    for step in (2, 4, 6, 12):
        commit(step, 1)
    durable._pool.submit(int).result(20)
    durable.claim(Descent(generation=2, parent=1, first_step=4, driver=driver))
    durable._claims.submit(int).result(20)
    for step in (6, 8, 10):
        commit(step, 2)
    durable.close()
    assert (durable.state().error, durable.state().superseded) == (None, None)
    assert [info.step for info in list_checkpoints(storage)] == kept
    assert {info.name.split("/")[0] for info in storage.list("step-")} == {
        f"step-{step:08d}" for step in kept
    }
    assert all(verify(storage, step).ok for step in kept)
    assert set(read_ancestry(storage).entries) == ({1, 2} if keep is None else {2})
    assert read.called is (keep is not None), (
        "who keeps thousands does not read them all with each commit"
    )
    storage.close()


def test_whatever_fails_in_a_commit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the last checkpoint would wait for its whole deadline."""
    storage, layout = open_storage(str(tmp_path)), two_worker_layout(state_specs())
    durable = Durable(storage, "job", {}, {}, keep=2)
    receipts = write_all(storage, 4, layout, full_state(layout.tensors))
    monkeypatch.setattr(
        storage, "put", Mock(side_effect=AttributeError("nobody has thought of this"))
    )
    durable.commit(4, 1, layout, receipts)
    durable.close()
    state = durable.state()
    assert (state.error, state.error_step, state.error_generation) == (
        "nobody has thought of this",
        4,
        1,
    )


def test_a_generation_whose_claim_fails_in_any_way_is_known_to_be_unclaimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    durable = Durable(storage, "job", {}, {}, keep=2)
    monkeypatch.setattr(
        storage, "put", Mock(side_effect=AttributeError("nobody has thought of this"))
    )
    durable.claim(Descent(generation=3, parent=None, first_step=0))
    durable.close()
    assert (durable.state().claimed, durable.state().unclaimed) == (3, 3)
