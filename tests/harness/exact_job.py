"""The exact model's job for runs that are struck, and what the same job gives in one undisturbed
process.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, Phase, WorkerPlace
from autohet.runtime.models.config import load_config
from autohet.runtime.worker import Worker
from planner.inputs.fleet import NodeType
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.checkpoint.commit import open_checkpoint
from recovery.checkpoint.read import read_shards
from recovery.state.layout import Layout
from recovery.storage.open import open_storage
from tests.harness import toy_model
from tests.harness.history import MARK, unlike_histories
from tests.harness.waits import HANG_S, PATIENT_ELASTIC

BATCH = 8
LENGTH = 8
STEPS = 16
"""A strike at step 6 or 8, a change, and two checkpoints after it."""

LONG: Mapping[str, Any] = {"steps": 32, "decay_steps": 32}
"""Training of runs in which something has to happen by itself before the end."""

LAYERS = 2
EVERY = 4
TEXT = "".join(f"line {i}: {i * i % 97} foxes, {i * 7919 % 1009} dogs\n" for i in range(400))


def node_type(num_gpus: int) -> NodeType:
    return NodeType(
        f"of{num_gpus}",
        "A10G",
        num_gpus,
        16 << 30,
        32e9,
        3e9,
        usd_per_hour=1.0,
        spot=True,
        max_nodes=8,
    )


NODES: Mapping[str, int] = {"a": 2, "b": 1, "c": 1, "d": 1}
"""GPUs of each node.

In `PLAN` node a is a pipeline (TP 2), b and c are one of two stages, d is one of one stage.
"""
PLAN: dict[str, Any] = {
    "version": 1,
    "model": "exact",
    "global_batch_sequences": BATCH,
    "microbatch_sequences": 1,
    "sequence_length": LENGTH,
    "pipelines": [
        {
            # Few microbatches: each costs eleven sums over TP. Faults strike in the second.
            "num_microbatches": 2,
            "microbatch_sequences": 2,
            "last_microbatch_sequences": 1,
            "stages": [{"first_layer": 0, "num_layers": LAYERS, "workers": ["a/0", "a/1"]}],
        },
        {
            "num_microbatches": 3,
            "stages": [
                {"first_layer": 0, "num_layers": 1, "workers": ["b/0"]},
                {"first_layer": 1, "num_layers": 1, "workers": ["c/0"]},
            ],
        },
        {
            "num_microbatches": 2,
            "stages": [{"first_layer": 0, "num_layers": LAYERS, "workers": ["d/0"]}],
        },
    ],
}


MODEL = {**toy_model.TOY_CONFIG, "vocab_size": 256, "num_hidden_layers": LAYERS}

CHAIN: dict[str, Any] = {
    "version": 1,
    "model": "exact",
    "global_batch_sequences": BATCH,
    "microbatch_sequences": 1,
    "sequence_length": LENGTH,
    "pipelines": [
        {
            "num_microbatches": 8,
            "stages": [
                {"first_layer": 0, "num_layers": 1, "workers": ["b/0"]},
                {"first_layer": 1, "num_layers": 1, "workers": ["c/0"]},
            ],
        }
    ],
}
"""One pipeline over two nodes: what one holds, the other does not."""


def exact_job(
    directory: Path,
    shared: Path,
    memory: Path,
    plan: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Job:
    """`directory` is the run's own; `shared` holds text and tokens for all; `sections` are merged
    into the document.
    """
    (directory / "plan.json").write_text(json.dumps(plan or PLAN))
    text = shared / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    document: dict[str, Any] = {
        "name": "exact",
        "model": {"config": dict(MODEL)},
        "training": {
            "global_batch_sequences": BATCH,
            "sequence_length": LENGTH,
            "steps": STEPS,
            "precision": "fp32",
            "seed": 3,
            "learning_rate": 5e-2,
            "warmup_steps": 2,
            "decay_steps": STEPS,
            "clip_norm": 0.5,
            "device": "cpu",
        },
        "data": {"source": str(text), "tokenizer": "bytes", "cache": str(shared / "cache")},
        "checkpoint": {
            "storage": str(directory / "checkpoints"),
            "every_steps": EVERY,
            "keep": 3,
            "memory_directory": str(memory),
            "local_directory": str(directory / "disk"),
        },
        "elastic": {
            **PATIENT_ELASTIC,
            "min_workers": 1,
            "heartbeat_timeout_s": 10,
            "debounce_s": 0.3,
            "wait_for_fleet_s": HANG_S,
            "notice_sources": ["script"],
            "slow_ratio": 0,
        },
        "parallelism": {
            "microbatch_sequences": 1,
            "max_tp_degree": 2,
            "memory_reserve_bytes": 0,
            "plan": str(directory / "plan.json"),
            "search_time_limit_s": 1.0,
        },
        "emulation": {"relative_speed_by_gpu_type": {"A10G": 1.0}, "block_forward_s": 0.002},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    if document["training"]["device"] != "cpu":
        del document["emulation"]  # only a CPU's speed is emulated
    return Job.from_document(document)


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: loss by step, and the whole state after the last."""

    losses: tuple[float, ...]
    state: Mapping[str, Tensor]
    layout: Layout


def train_alone(directory: Path, shared: Path, **sections: Mapping[str, Any]) -> Reference:
    """The job on one worker, in this process, from its first step to its last."""
    torch.set_num_threads(1)  # two would spin against each other on a busy machine
    job = exact_job(directory, shared, directory / "memory", **sections)
    steps = job.training.steps
    assert steps is not None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plan = Plan("exact", BATCH, 1, LENGTH, (Pipeline((Stage(0, LAYERS, ("one/0",)),), BATCH, 1),))
    layout = layout_of_plan(plan, load_config(job.model, job.training))
    worker = Worker(
        WorkerPlace("one/0", "one", "CPU", str(directory / "memory"), str(directory / "ssd")), job
    )
    losses: list[float] = []
    try:
        worker.begin(
            GenerationOrder(
                1,
                plan,
                layout,
                0,
                steps,
                "127.0.0.1",
                store.port,
                ("one/0",),
                None,
                {},
                frozenset(),
            )
        )
        deadline = time.monotonic() + HANG_S
        while (report := worker.report()).phase is not Phase.FINISHED or report.steps:
            assert report.phase is not Phase.FAILED, report.error
            assert time.monotonic() < deadline, report
            losses += [record.loss for record in report.steps]
            time.sleep(0.02)
        assert worker.live is not None
        return Reference(
            tuple(losses), {name: t.clone() for name, t in worker.live.state.items()}, layout
        )
    finally:
        worker.close()


def differing_shards(
    storage_uri: str, reference: Reference, history: int | None = None
) -> list[str]:
    """Shards of the last step's committed checkpoint whose bits are not the reference's (parameters
    and both moments), and layers whose history is not `history` (None: not that of all others).
    """
    storage = open_storage(storage_uri)
    try:
        manifest = open_checkpoint(storage, len(reference.losses))
        assert frozenset(manifest.shards) == reference.layout.shards
        differing = []
        histories = {}
        for shard, data in read_shards(storage, manifest, manifest.shards):
            spec = reference.layout.tensors[shard.tensor]
            whole = reference.state[shard.tensor]
            if MARK in shard.tensor and shard.tensor.startswith("param/"):
                histories[str(shard)] = data
                continue
            wanted = whole if spec.split_dim is None else whole[spec.unit_slices(shard.unit)]
            if not torch.equal(data.view(wanted.shape), wanted):
                differing.append(str(shard))
        return differing + unlike_histories(histories, history)
    finally:
        storage.close()
