"""Graph of a job's model as the runtime trains it.

It is the one stage that holds all layers, captured with the sum of its losses.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from autohet.runtime.models.config_keys import entries_by_layer, with_layers
from autohet.runtime.models.layers.attention import whole_mask
from autohet.runtime.models.layers.dropout import dropout_of, without_dropout
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.stage import StageModel, build_stage
from autohet.runtime.spmd.capture import Captured, capture
from autohet.runtime.spmd.repeated_blocks import ShortModel
from planner.errors import ConfigError
from planner.spmd.graph import WHOLE, Decoder


class _Loss(nn.Module):
    def __init__(self, stage: StageModel) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.stage(ids).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def split_dims_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return the dimension along which each parameter's state may be cut, as for pipelines.

    WHOLE: it is not cut.
    """
    dims: dict[str, int] = {}
    for name, spec in family_of(config).parameter_specs(config).items():
        dims[name] = WHOLE if spec.split_dim is None else spec.split_dim
    return dims


def capture_decoder(
    config: PreTrainedConfig, batch: int, sequence_length: int, dtype: torch.dtype
) -> Decoder:
    """Return the graph of a model for a microbatch of `batch` sequences, and its cuts.

    One block of each kind is captured; all others are copies. Dropout is left out: that a program
    cannot train with it is no matter of its costs.

    Raises:
        ConfigError: the graph cannot be captured.
    """
    plain = without_dropout(config)
    family = family_of(plain)
    kinds = _kinds_of_blocks(plain)
    known = list(dict.fromkeys(kinds))
    firsts = [kinds.index(kind) for kind in known]
    short = capture_language_model(with_layers(plain, firsts), batch, sequence_length, dtype)

    block_of: dict[str, int] = {}
    for name, path in short.modules.items():
        block = _block_of(path)
        if block is not None:
            block_of[name] = block

    model = ShortModel(short.graph, block_of, f"{family.layers}.")
    blocks = [known.index(kind) for kind in kinds]
    graph = model.with_blocks(blocks, family.key_value_units(plain))
    if graph is None:
        graph = capture_language_model(plain, batch, sequence_length, dtype).graph
    return Decoder(graph, split_dims_of(plain))


def _kinds_of_blocks(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each block: blocks of one kind compute alike, from shapes alike."""
    family = family_of(config)
    facts: list[list[Any]] = [[] for _ in range(family.num_layers(config))]
    for key, entries in entries_by_layer(config).items():
        for layer, entry in enumerate(entries):
            facts[layer].append((key, entry))
    for name, spec in family.parameter_specs(config).items():
        if spec.layer >= 0:
            inner = name.removeprefix(f"{family.layers}.{spec.layer}.")
            facts[spec.layer].append((inner, spec.shape))
    return [repr(each) for each in facts]


def _block_of(module_path: str) -> int | None:
    """Return the block of the captured stage that a module is in; None: it is in none."""
    start = "stage.blocks."
    if not module_path.startswith(start):
        return None
    number, _, _ = module_path.removeprefix(start).partition(".")
    return int(number) if number else None


def check_without_dropout(config: PreTrainedConfig) -> None:
    """Raise ConfigError if a model drops elements in training, which no program does."""
    if dropout_of(config):
        raise ConfigError(
            "parallelism.spmd is true, but its programs have no dropout, and the"
            f" {config.model_type} config has one; set model.dropout: false, or leave spmd out"
        )


def capture_language_model(
    config: PreTrainedConfig, batch: int, sequence_length: int, dtype: torch.dtype
) -> Captured:
    """Capture the model for a microbatch of `batch` sequences, on the CPU for any device.

    Parameters have their names in a checkpoint, without values.

    Raises:
        ConfigError: the model has dropout, or its graph cannot be captured.
    """
    check_without_dropout(config)
    family = family_of(config)
    layers = range(family.num_layers(config))
    stage = build_stage(config, layers, None, torch.device("cpu"), dtype)
    weights: dict[str, Tensor] = {}
    for name, spec in stage.spec.parameters.items():
        # Of full shape, but of one element's memory: a matrix may be larger than the host's memory.
        element = torch.empty(1, dtype=spec.compute_dtype(dtype))
        weights[name] = element.expand(spec.shape)
    stage.weights.load(weights)
    stage.inputs.prepare((batch, sequence_length), whole_mask)

    # Targets of their own, since a tensor that is passed twice would be one input of the graph.
    ids = torch.zeros(batch, sequence_length, dtype=torch.int64)
    targets = ids.clone()
    names = {f"stage.{ours}.": f"{theirs}." for ours, theirs in reversed(stage.paths.items())}
    units = family.key_value_units(config)
    return capture(_Loss(stage), (ids, targets), most_units=units, prefixes=names)
