"""A small training state over two workers, cut in every way a unit can be cut, and its
checkpoint.
"""

from collections.abc import Mapping

import torch

from recovery.checkpoint.commit import CheckpointFacts, CheckpointPart, commit_checkpoint
from recovery.checkpoint.manifest import Manifest
from recovery.checkpoint.write import WorkerReceipt, write_shards
from recovery.state.layout import Layout, ShardId, TensorSpec, assign_writers
from recovery.storage.protocol import Storage

SHAPES: Mapping[str, tuple[tuple[int, ...], int | None, tuple[int, ...]]] = {
    "embed.weight": ((33, 8), 0, (0, 9, 20, 33)),  # uneven rows
    "layers.0.o_proj.weight": ((16, 24), 1, (0, 8, 24)),  # columns: strided units
    "layers.1.conv.weight": ((2, 10, 3), 1, (0, 4, 10)),  # neither first nor last dimension
    "layers.1.norm.weight": ((7,), None, (0, 1)),
    "scale": ((), None, (0, 1)),
}
MODEL_CONFIG = {"model_type": "llama", "hidden_size": 8, "rope_scaling": None}
KINDS = ("param", "exp_avg", "exp_avg_sq")


def state_specs(dtype: str = "float32") -> dict[str, TensorSpec]:
    names = [(f"{kind}/{name}", *SHAPES[name]) for kind in KINDS for name in SHAPES]
    return {
        name: TensorSpec(name, shape, dtype, split_dim, cuts)
        for name, shape, split_dim, cuts in names
    }


def full_state(specs: Mapping[str, TensorSpec], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}


def two_worker_layout(specs: Mapping[str, TensorSpec]) -> Layout:
    """Tensor parallel over two workers: even units here, odd units there, what is not cut on
    both.
    """
    held: dict[str, set[ShardId]] = {"a/0": set(), "b/0": set()}
    for spec in specs.values():
        for shard in spec.shards:
            for rank, worker in enumerate(held):
                if spec.split_dim is None or shard.unit % 2 == rank:
                    held[worker].add(shard)
    return Layout(specs, {worker: frozenset(shards) for worker, shards in held.items()})


def local_state(
    layout: Layout, worker: str, full: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The worker's local tensors, cut with plain slicing."""
    local = {}
    for name, units in layout.units_of(worker).items():
        spec = layout.tensors[name]
        pieces = [full[name][spec.unit_slices(unit)] for unit in units]
        local[name] = (
            torch.cat(pieces, spec.split_dim) if spec.split_dim is not None else pieces[0].clone()
        )
    return local


def write_all(
    storage: Storage, step: int, layout: Layout, full: Mapping[str, torch.Tensor]
) -> list[WorkerReceipt]:
    """Every worker's part, one after the other."""
    return [
        write_shards(
            CheckpointPart(storage, step, worker), local_state(layout, worker, full), layout, ids
        )
        for worker, ids in assign_writers(layout).items()
    ]


def commit(
    storage: Storage, step: int, layout: Layout, receipts: list[WorkerReceipt], job: str = "job"
) -> Manifest:
    scalars = {"seed": 7, "next_row": step * 16, "learning_rate": 1e-3}
    return commit_checkpoint(
        storage,
        step,
        layout,
        receipts,
        CheckpointFacts(scalars, MODEL_CONFIG, job=job, generation=2),
    )


def make_checkpoint(
    storage: Storage, step: int, seed: int = 0
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """A committed checkpoint and the full tensors in it."""
    specs = state_specs()
    layout = two_worker_layout(specs)
    full = full_state(specs, seed)
    return commit(storage, step, layout, write_all(storage, step, layout, full)), full
