"""Host memory that holds only a part of a node's snapshots: what is kept is what no other node has,
and it is said.
"""

import logging
import subprocess
import time

import pytest
import torch

from autohet.runtime.copies import memory_snapshots
from autohet.runtime.copies.preservation import Preservation
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, WorkerPlace
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.local.agent_store import AgentStore
from recovery.state.holdings import Holding, Source, require_restorable_step
from recovery.state.layout import Layout, TensorSpec
from recovery.storage.open import open_storage

MB = 1 << 20
SPECS = {name: TensorSpec(name, (MB // 4,), "float32") for name in ("param/shared", "param/alone")}
SHARED, ALONE = (frozenset(SPECS[name].shards) for name in ("param/shared", "param/alone"))
LAYOUT = Layout(SPECS, {"a/0": SHARED, "a/1": ALONE, "b/0": SHARED})
PLAN = Plan("one", 4, 2, 16, (Pipeline((Stage(0, 1, ("a/0",)), Stage(1, 1, ("a/1",))), 2, 2),))
ORDER = GenerationOrder(1, PLAN, LAYOUT, 0, 100, "here", 1, PLAN.workers, None, {}, frozenset())


@pytest.fixture
def small_memory(tmp_path):
    """A memory file system that holds the snapshots of one of two workers of 1 MiB."""
    place = tmp_path / "memory"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def preservation(tmp_path, worker):
    job = Job.from_document(
        {
            "name": "one",
            "model": {"config": {"model_type": "llama"}},
            "training": {"global_batch_sequences": 4, "sequence_length": 16, "steps": 3},
            "data": {"source": "unused"},
            "checkpoint": {"storage": str(tmp_path / "checkpoints"), "every_steps": 100},
        }
    )
    place = WorkerPlace(worker, "a", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    return Preservation(place, job, open_storage(job.checkpoint_storage))


def step_of(kept, step, state):
    """As a trainer does it: nothing is waited for but what the preservation itself waits for."""
    kept.before_update()
    for tensor in state.values():
        tensor.mul_(2)
    kept.keep(step, state, durable=step == 2)
    time.sleep(0.05)


def test_what_no_other_node_has_is_kept_first_and_a_death_costs_nothing(
    tmp_path, small_memory, caplog
):
    states = {
        "a/0": {"param/shared": torch.ones(MB // 4)},
        "a/1": {"param/alone": torch.ones(MB // 4)},
    }
    workers = {name: preservation(tmp_path, name) for name in states}
    with caplog.at_level(logging.WARNING):
        for worker in workers.values():
            worker.begin(ORDER)
    (said,) = [
        record.getMessage() for record in caplog.records if "host memory" in record.getMessage()
    ]
    assert "a/0 keeps NOTHING of its state (0 MB)" in said
    assert "a/1 keeps all of its state (2 MB)" in said
    assert f"mount -o remount,size=1G {small_memory}" in said
    assert [worker.snapshots.shortage for worker in workers.values()] == [said, None], (
        "one reports it"
    )
    deadline, step = time.monotonic() + 20, 0
    while step < 3 or workers["a/1"].snapshots.newest(1) is None:
        assert time.monotonic() < deadline
        step += 1
        for name, worker in workers.items():
            step_of(worker, step, states[name])
    for worker in workers.values():
        worker.close()  # which ends what was begun
    store = AgentStore(small_memory, tmp_path / "none", "a")
    kept = store.inventory()
    store.close()
    assert {holding.source.name for holding in kept} == {"a/1"}
    live = Holding(Source("worker", "b", "b/0", step, 1), SHARED)
    assert require_restorable_step(LAYOUT.shards, [*kept, live]) == step, (
        "node a's processes die: nothing is lost"
    )


def test_snapshots_are_tried_again_once_there_is_room(tmp_path, small_memory, monkeypatch):
    """What another program, or an older generation, has left there is gone after a while."""
    monkeypatch.setattr(memory_snapshots, "TRY_AGAIN_AFTER", 2)
    worker, state = preservation(tmp_path, "a/1"), {"param/alone": torch.ones(MB // 4)}
    others = small_memory / "others"
    others.write_bytes(bytes(2 * MB))
    worker.begin(ORDER)
    for step in range(1, 6):
        step_of(worker, step, state)
    assert worker.snapshots.newest(1) is None
    others.unlink()
    deadline = time.monotonic() + 20
    while worker.snapshots.newest(1) is None:
        assert time.monotonic() < deadline
        step += 1
        step_of(worker, step, state)
    worker.close()
