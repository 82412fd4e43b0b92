"""A worker that trains adapters keeps, copies and restores these alone; what is frozen comes from
the run's origin, once a process.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from autohet.driver.checkpoints.resumption import found_checkpoint
from autohet.runtime.data import prepare_dataset
from autohet.runtime.facts.layout import frozen_layout, frozen_units
from autohet.runtime.job import AdapterSection, Job
from autohet.runtime.messages import Phase, WorkerPlace
from autohet.runtime.models.config import load_config, saved_document
from autohet.runtime.models.pretrained import weights_identity
from autohet.runtime.models.registry import family_of
from autohet.runtime.state.frozen import FrozenWeights, first_weights
from autohet.runtime.step.batches import Batches
from autohet.runtime.step.reference import train_reference
from autohet.runtime.step.replica_check import Comparison, ReplicaCheck
from autohet.runtime.worker import Worker
from planner.errors import ConfigError
from planner.plans.plan import Plan
from recovery.checkpoint.commit import CheckpointFacts, CheckpointPart, commit_checkpoint
from recovery.checkpoint.write import write_shards
from recovery.errors import Cancelled
from recovery.state.holdings import Holding, Source
from recovery.storage.open import open_storage
from recovery.transfer.schedule import schedule
from tests.harness.parity import ADAM_EPS
from tests.harness.peft_reference import train_peft
from tests.runtime.test_worker import ME, follow, order

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
}
CPU = torch.device("cpu")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    torch.manual_seed(0)
    config = load_config(Job.from_document(document(tmp_path, {"config": MODEL})).model)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return Job.from_document(document(tmp_path, {"pretrained": str(tmp_path / "base")}))


def document(root: Path, model: dict[str, Any]) -> dict[str, Any]:
    training = {
        "global_batch_sequences": 4,
        "sequence_length": 16,
        "steps": 3,
        "precision": "fp32",
        "device": "cpu",
        "learning_rate": 1e-2,
        "eps": ADAM_EPS,
    }
    return {
        "name": "one",
        "model": {**model, "adapter": {"rank": 4, "alpha": 8}},
        "training": training,
        "data": {"source": str(root / "text.txt"), "cache": str(root / "cache")},
        "checkpoint": {"storage": str(root / "checkpoints"), "every_steps": 100},
    }


@pytest.fixture
def worker(job: Job, tmp_path: Path) -> Iterator[Worker]:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    found = Worker(WorkerPlace(ME, "node", "CPU", memory, disk), job)
    yield found
    found.close()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def base_bytes(job: Job) -> int:
    config = load_config(job.model, job.training)
    specs = family_of(config).parameter_specs(config).values()
    return sum(4 * torch.Size(spec.shape).numel() for spec in specs if not spec.trainable)


def reference(job: Job) -> list[float]:
    config = load_config(job.model, job.training)
    names = list(family_of(config).parameter_specs(config))
    first = dict(first_weights(job.model, config, names, job.training.seed))
    assert job.data is not None
    dataset = prepare_dataset(job.data, job.training.sequence_length)
    rows = Batches(dataset, job.training.seed, job.training.global_batch_sequences, CPU)
    losses, _ = train_peft(config, first, job.training, rows, 3)
    return losses


def test_a_worker_trains_as_peft_and_keeps_adapters_alone(
    worker: Worker, job: Job, store: TCPStore
) -> None:
    layout = order(job, store, 1, 0).layout
    worker.begin(order(job, store, 1, 0))
    report, steps, receipts = follow(worker, Phase.FINISHED)
    assert [record.loss for record in steps] == pytest.approx(reference(job), rel=2e-5)
    assert report.restore.bytes_by_tier["origin"] == base_bytes(job)
    # What every copy holds (snapshots, the disk, checkpoints) is the layout's.
    assert all(".lora_" in name for name in layout.tensors)
    assert layout.num_bytes < base_bytes(job)
    assert receipts[0][2].shards == layout.shards_by_worker[ME]
    live = [Holding(Source("worker", "node", ME, 3, 1), layout.shards_by_worker[ME])]
    worker.begin(order(job, store, 2, 3, schedule(layout, {ME: "node"}, live, 3)))
    report, _, _ = follow(worker, Phase.FINISHED)
    assert sum(report.restore.bytes_by_tier.values()) == 0, "all was there already"


def test_a_worker_goes_on_with_an_adapter_that_peft_wrote(
    job: Job, store: TCPStore, tmp_path: Path
) -> None:
    """With a module that is trained whole, and from row 5 of the order on.

    Wrong: first matrices are drawn, or of the base; rows are those of a run that begins at row 0.
    """
    settings = LoraConfig(
        r=3, task_type="CAUSAL_LM", target_modules=["v_proj"], modules_to_save=["lm_head"]
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(str(job.model.pretrained)), settings
    )
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path / "adapter")
    section = AdapterSection(from_=str(tmp_path / "adapter"))
    training = replace(job.training, row_offset=5)
    job = replace(job, model=replace(job.model, adapter=section), training=training)
    place = WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    worker = Worker(place, job)
    try:
        worker.begin(order(job, store, 1, 0))
        _, steps, _ = follow(worker, Phase.FINISHED)
    finally:
        worker.close()
    config = load_config(job.model, job.training)
    assert job.data is not None
    dataset = prepare_dataset(job.data, job.training.sequence_length)
    batch = job.training.global_batch_sequences
    rows = Batches(dataset, job.training.seed, batch, CPU, first_row=lambda step: 5 + step * batch)
    stock: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(str(job.model.pretrained)),
        tmp_path / "adapter",
        is_trainable=True,
    )
    stock.config = config  # from which the reference takes the optimizer's groups
    expected = list(train_reference(stock, job.training, rows, 3))
    assert [record.loss for record in steps] == pytest.approx(expected, rel=2e-5)


def test_a_new_process_takes_adapters_from_the_checkpoint_and_the_rest_from_the_origin(
    worker: Worker, job: Job, store: TCPStore
) -> None:
    layout = order(job, store, 1, 0).layout
    shards = layout.shards_by_worker[ME]
    uri = job.checkpoint_storage
    state = {name: torch.ones(layout.tensors[name].shape) for name in layout.units_of(ME)}
    storage = open_storage(uri)
    receipt = write_shards(CheckpointPart(storage, 2, ME), state, layout, shards)
    scalars = job.identity(weights_identity(str(job.model.pretrained)))
    commit_checkpoint(
        storage, 2, layout, [receipt], CheckpointFacts(scalars, saved_document(job.model))
    )
    holding = Holding(Source("s3", "", uri, 2), shards)
    worker.begin(order(job, store, 2, 2, schedule(layout, {ME: "node"}, [holding], 2)))
    report, _, _ = follow(worker, Phase.FINISHED)
    assert report.restore.bytes_by_tier["s3"] == layout.num_bytes
    assert report.restore.bytes_by_tier["origin"] == base_bytes(job)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules_to_save": ("lm_head",)}, "model.adapter.modules_to_save"),
        ({"rank": 8}, "model.adapter.rank was 4 in the run of .* and is 8 in the job"),
        ({"alpha": 4.0}, r"model.adapter.alpha was 8.0 in the run of .* and is 4.0 in the job"),
        (None, "model.adapter.kind was lora in the run of .* and is none"),
    ],
)
def test_an_adapter_of_another_kind_is_not_gone_on_from(
    job: Job, store: TCPStore, change: dict[str, Any] | None, message: str
) -> None:
    layout = order(job, store, 1, 0).layout
    state = {name: torch.ones(spec.shape) for name, spec in layout.tensors.items()}
    storage = open_storage(job.checkpoint_storage)
    receipt = write_shards(
        CheckpointPart(storage, 2, ME), state, layout, layout.shards_by_worker[ME]
    )
    scalars = job.identity(weights_identity(str(job.model.pretrained)))
    manifest_config = saved_document(job.model)
    commit_checkpoint(
        storage, 2, layout, [receipt], CheckpointFacts(scalars, manifest_config, job=job.name)
    )
    adapter = None if change is None else replace(job.model.adapter, **change)  # type: ignore[type-var]
    other = replace(job, model=replace(job.model, adapter=adapter))
    with pytest.raises(ConfigError, match=message):
        found_checkpoint(other, load_config(other.model), storage)
    assert found_checkpoint(job, load_config(job.model, job.training), storage) is not None


def test_a_worker_that_lacks_nothing_does_not_ask_the_origin(job: Job) -> None:
    """Wrong: each generation of each job reads the origin's index, and fails where it is gone."""
    config = load_config(job.model, job.training)
    gone = replace(job.model, config=None, pretrained="/nowhere")
    frozen = FrozenWeights(gone, config, 0, CPU, torch.float32)
    assert frozen.hold({}, threading.Event()) == 0


def test_frozen_weights_are_kept_narrowed_and_read_again(job: Job) -> None:
    config = load_config(job.model, job.training)
    frozen = FrozenWeights(job.model, config, 0, CPU, torch.float32)
    specs = family_of(config).parameter_specs(config)
    name, other = "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"
    whole = dict(first_weights(job.model, config, [name, other], 0))
    alive = threading.Event()
    assert specs[name].num_units == 2
    assert frozen.hold({name: (0, 1), other: (0,)}, alive) == 4 * (32 * 32 + 32)
    assert torch.equal(frozen.tensors[name], whole[name])
    assert frozen.hold({name: (1,)}, alive) == 0, "a part of what is held is not read again"
    assert torch.equal(frozen.tensors[name], whole[name][:, 16:])
    assert set(frozen.tensors) == {name}
    assert frozen.hold({name: (0,), other: (0,)}, alive) == 4 * (32 * 16 + 32)
    assert torch.equal(frozen.tensors[name], whole[name][:, :16])
    alive.set()
    with pytest.raises(Cancelled):
        frozen.hold({name: (0, 1)}, alive)


def test_a_flipped_bit_of_a_frozen_weight_shows_in_the_vote_and_is_read_again(job: Job) -> None:
    """In 16 bits, of two workers that hold all layers."""
    config, alive = load_config(job.model, job.training), threading.Event()
    stage = {"first_layer": 0, "num_layers": int(config.num_hidden_layers)}
    pipelines = [
        {"num_microbatches": 1, "stages": [{**stage, "workers": [worker]}]}
        for worker in ("a/0", "b/0")
    ]
    batch = {"global_batch_sequences": 2, "microbatch_sequences": 1, "sequence_length": 4}
    plan = Plan.from_document({"version": 1, "model": "m", **batch, "pipelines": pipelines})
    layout = frozen_layout(plan, config, torch.bfloat16)
    held = {}
    for worker in plan.workers:
        held[worker] = FrozenWeights(job.model, config, 0, CPU, torch.bfloat16)
        held[worker].hold(frozen_units(plan, config, worker), alive)
    world: Any = None

    def vote() -> float:
        total = 0.0
        for worker, frozen in held.items():
            tensors = {f"frozen/{name}": tensor for name, tensor in frozen.tensors.items()}
            total += ReplicaCheck(
                partial(Comparison, worker, layout), tensors, world, 1
            ).contribution(0)
        return total

    name = "model.layers.0.self_attn.o_proj.weight"
    assert vote() == 0
    weight = held["a/0"].tensors[name]
    weight.view(-1).view(torch.int16)[3] ^= 1 << 9
    assert vote() != 0
    held["a/0"].reload([name])
    assert vote() == 0
    assert held["a/0"].tensors[name] is weight
