"""A restore on a device that has no room for the old state beside the new one."""

import time
from dataclasses import replace

import pytest

from autohet.emulate.demo import reference_losses
from autohet.runtime.copies.memory_snapshots import MemorySnapshots
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.job import Job
from autohet.runtime.messages import Phase, WorkerPlace
from autohet.runtime.models.config import load_config
from autohet.runtime.state import host_memory
from autohet.runtime.state.live import Live
from autohet.runtime.worker import Worker
from recovery.local.agent_store import AgentStore
from recovery.transfer.schedule import schedule
from tests.harness.limited_memory import LimitedMemory
from tests.runtime.test_worker import DEADLINE_S, ME, follow, order, store

__all__ = ["store"]
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
}


class OnLimitedDevice(Worker):
    """A worker whose generations all allocate on one such device."""

    def __init__(self, place, job):
        self.memory = LimitedMemory()
        super().__init__(place, job)

    def _run(self, order, groups):
        with self.memory:
            super()._run(order, groups)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    training = {
        "global_batch_sequences": 4,
        "sequence_length": 16,
        "steps": 4,
        "precision": "fp32",
        "device": "cpu",
        "audit_every": 0,  # of more tokens than a row of this job
    }
    return Job.from_document(
        {
            "name": "one",
            "model": {"config": MODEL},
            "training": training,
            "data": {"source": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache")},
            "checkpoint": {"storage": str(tmp_path / "checkpoints"), "every_steps": 100},
        }
    )


@pytest.fixture
def worker(job, tmp_path):
    found = OnLimitedDevice(
        WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk")), job
    )
    yield found
    found.close()


def restored_from_its_node(worker, job, store, tmp_path):
    """Trains two steps; then comes a generation that brings all of the state anew, on a device with
    no more memory than training took.
    """
    worker.begin(replace(order(job, store, 1, 0), end_step=2))
    _, steps, _ = follow(worker, Phase.FINISHED)
    layout = layout_of_plan(order(job, store, 1, 0).plan, load_config(job.model, job.training))
    worker.memory.limit_bytes = worker.memory.peak_bytes
    assert layout.num_bytes > worker.memory.limit_bytes / 2
    agent = AgentStore(tmp_path / "memory", tmp_path / "disk", "node")
    kept = [
        holding
        for holding in agent.inventory()
        if holding.source.kind == "memory" and holding.source.step == 2
    ]
    agent.close()
    transfers = schedule(layout, {ME: "node"}, kept, 2)
    assert not transfers.parts[ME].keep
    worker.begin(order(job, store, 2, 2, transfers))
    return steps


def test_it_succeeds_and_training_goes_on(worker, job, store, tmp_path):
    steps = restored_from_its_node(worker, job, store, tmp_path)
    report, later, _ = follow(worker, Phase.FINISHED)
    assert (report.step, report.live_generation) == (4, 2)
    assert [record.loss for record in [*steps, *later]] == pytest.approx(
        reference_losses(job, 4), rel=1e-5
    )


def test_it_would_fail_if_the_old_state_stayed(worker, job, store, tmp_path, monkeypatch):
    monkeypatch.setattr(Live, "move_to_host", lambda *_: None)
    restored_from_its_node(worker, job, store, tmp_path)
    assert error_of(worker).startswith("OutOfMemoryError")


def error_of(worker):
    until = time.monotonic() + DEADLINE_S
    while (report := worker.report()).phase is not Phase.FAILED:
        assert time.monotonic() < until, report.phase
        time.sleep(0.02)
    return report.error


def test_a_worker_for_whose_state_the_host_has_no_room_fails_with_a_reason(
    worker, job, store, tmp_path, monkeypatch
):
    """Instead of taking memory until the kernel kills some process of the node."""
    monkeypatch.setattr(host_memory, "free_bytes", lambda: host_memory.RESERVE_BYTES)
    monkeypatch.setattr(MemorySnapshots, "lease", lambda *_: None)
    restored_from_its_node(worker, job, store, tmp_path)
    assert error_of(worker).startswith("OutOfMemoryError: no room in host memory")
