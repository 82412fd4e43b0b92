"""The driver's side of durable storage: what earlier runs left goes when a job starts, and every commit is told."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

from autohet.driver.control.durable import Durable
from autohet.driver.control.events import EventLog
from autohet.driver.control.ledger import Ledger
from autohet.driver.control.observation import Observation
from recovery.storage.open import open_storage
from tests.harness.checkpoint_cases import full_state, state_specs, two_worker_layout, write_all
from tests.harness.fake_job import fake_job


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
    durable, events = Durable(directory, "job", {}, {}, keep=5), EventLog(None)
    ledger, controller = Ledger(fake_job(), events), SimpleNamespace(generation=1, members=())
    for step in (4, 8):
        durable.commit(step, 1, layout, write_all(directory, step, layout, full_state(layout.tensors)))
    durable.refresh()
    durable.close()  # all that was asked for is done
    for _ in range(2):
        ledger.take(Observation(10.0, {}, checkpoint=durable.state()), controller)
    assert [event["step"] for event in events.records if event["kind"] == "checkpoint"] == [4, 8]
    assert ledger.checkpoint_step == 8
