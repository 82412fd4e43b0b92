"""Loads of a model's experts, from its own routing of the job's data.

The model runs block by block, each with its first weights, so that one block is in memory at a
time. A model that is trained from scratch has untrained routers, whose loads say nothing of later
steps: they are not measured.
"""

from typing import Any

import torch
from torch import Tensor

from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import Job
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.layers.experts import ROUTERS, is_dense, num_experts
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.stage import StageModel, build_stage
from autohet.runtime.state.frozen import held_weights
from autohet.runtime.step.batches import Batches
from planner.cost.layers.experts import load_spread

SEQUENCES = 8
"""Sequences whose tokens are routed."""


def why_unmeasured(job: Job, config: Any) -> str | None:
    """Return why the loads of experts cannot be measured; None: they can be."""
    if num_experts(config) is None:
        return "the model is dense"
    if job.model.pretrained is None:
        return "the model is trained from scratch, and its routers are untrained"
    if job.data is None:
        return "the job names no data"
    return None


def measure_load_spread(job: Job, config: Any, device: torch.device) -> float:
    """Return the mean over the blocks of the spread of their experts' loads.

    The spread is that of the tokens of SEQUENCES sequences
    (`planner.cost.layers.experts.load_spread`). `why_unmeasured` must be None.
    """
    assert job.data is not None
    dataset = prepare_dataset(job.data, job.training.sequence_length)
    dataset.check(vocab_size=int(config.vocab_size), global_batch_sequences=1)
    batches = Batches(dataset, job.training.seed, SEQUENCES, device)
    try:
        tokens, _ = batches(0, range(SEQUENCES))
    finally:
        batches.close()
    spreads = []
    with torch.no_grad():
        hidden: Tensor = _stage(job, config, range(0), device)(tokens)
        for layer in range(family_of(config).num_layers(config)):
            stage = _stage(job, config, range(layer, layer + 1), device)
            chosen = _record_choices(stage)
            hidden = stage.block_output(0, hidden)
            if not is_dense(config, layer):
                counts = torch.bincount(chosen[0].flatten(), minlength=num_experts(config) or 0)
                spreads.append(load_spread(counts.tolist()))
            del stage
    return sum(spreads) / len(spreads)


def _stage(job: Job, config: Any, layers: range, device: torch.device) -> StageModel:
    """Build a stage with its first weights."""
    dtype = COMPUTE_DTYPES[job.training.precision]
    stage = build_stage(config, layers, None, device, dtype)
    like = torch.empty(0, dtype=dtype, device=device)
    names = list(stage.weights.local_shapes())
    weights = dict(held_weights(job.model, config, names, job.training.seed, like))
    stage.weights.load(weights)
    return stage


def _record_choices(stage: StageModel) -> list[Tensor]:
    """Return a list that gets the experts that the router of the stage's block chooses."""
    chosen: list[Tensor] = []

    def record(_: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen.append(out[2])

    for path, module in stage.blocks[0].named_modules():
        if path in ROUTERS:
            module.register_forward_hook(record)
    return chosen
