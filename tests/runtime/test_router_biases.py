"""Routers' biases that counts of tokens move: a checkpoint holds them, and a restore goes on."""

from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import TCPStore

from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, Phase, WorkerPlace
from autohet.runtime.models.layers.experts import CORRECTION_BIAS
from autohet.runtime.worker import Worker
from recovery.checkpoint.commit import CheckpointFacts, commit_checkpoint
from recovery.state.holdings import Holding, Source
from recovery.storage.open import open_storage
from recovery.transfer.schedule import schedule
from tests.harness.tiny_models import AUTO
from tests.runtime.test_worker import ME, follow, order

STEPS, RESTORED = 5, 3


def job_at(root: Path) -> Job:
    """A job with a tiny deepseek_v3, whose checkpoints are below `root`."""
    text = root / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    config = {**AUTO["deepseek_v3"], "num_hidden_layers": 2, "vocab_size": 256}
    return Job.from_document(
        {
            "name": "one",
            "model": {"config": config},
            "training": {
                "global_batch_sequences": 4,
                "sequence_length": 16,
                "steps": STEPS,
                "precision": "fp32",
                "device": "cpu",
                "router_balance": "bias",
                "router_bias_speed": 0.01,
            },
            "data": {"source": str(text), "cache": str(root / "cache")},
            "checkpoint": {"storage": str(root / "checkpoints"), "every_steps": 100},
        }
    )


def biases_after(job: Job, given: GenerationOrder, node: Path) -> dict[str, torch.Tensor]:
    """Run a generation in a new worker to its last step, commit that step, return the biases."""
    worker = Worker(WorkerPlace(ME, "node", "CPU", str(node / "memory"), str(node / "disk")), job)
    try:
        worker.begin(given)
        report, _, receipts = follow(worker, Phase.FINISHED)
        assert report.step == given.end_step
        live = worker.live
        assert live is not None
        state = {
            name: tensor.clone()
            for name, tensor in live.state.items()
            if name.endswith(CORRECTION_BIAS)
        }
    finally:
        worker.close()
    storage = open_storage(job.checkpoint_storage)
    commit_checkpoint(
        storage, given.end_step, given.layout, [receipts[-1][2]], CheckpointFacts({}, {})
    )
    return state


def test_biases_go_on_from_a_checkpoint_as_without_one(tmp_path: Path) -> None:
    """Bit for bit, with the counts of the last step. Wrong: they begin again at 0."""
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = job_at(tmp_path / "whole")
    expected = biases_after(job, order(job, store, 1, 0), tmp_path / "whole" / "a")
    assert {name.partition("/")[0] for name in expected} >= {"param"}
    assert all(tensor.any() for name, tensor in expected.items() if name.startswith("param/"))

    job = job_at(tmp_path / "cut")
    first = replace(order(job, store, 1, 0), end_step=RESTORED)
    at_checkpoint = biases_after(job, first, tmp_path / "cut" / "a")
    assert any(not torch.equal(at_checkpoint[name], expected[name]) for name in expected)
    shards = first.layout.shards_by_worker[ME]
    holding = Holding(Source("s3", "", job.checkpoint_storage, RESTORED), shards)
    transfers = schedule(first.layout, {ME: "node"}, [holding], RESTORED)
    second = order(job, store, 2, RESTORED, transfers)
    found = biases_after(job, second, tmp_path / "cut" / "b")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
