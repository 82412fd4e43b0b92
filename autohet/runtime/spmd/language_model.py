"""Graph of a job's model as the runtime trains it.

It is the one stage that holds all layers, captured with the sum of its losses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from autohet.runtime.job import Job
from autohet.runtime.models import (
    COMPUTE_DTYPES,
    StageModel,
    build_stage,
    family_of,
    load_config,
)
from autohet.runtime.models.attention import whole_mask
from autohet.runtime.models.dropout import dropout_of, without_dropout
from autohet.runtime.spmd.capture import Captured, capture
from planner.errors import ConfigError
from planner.spmd.decoders import FAMILIES, WHOLE, Decoder


class _Loss(nn.Module):
    def __init__(self, stage: StageModel) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            self.stage(ids).float().flatten(0, 1), targets.flatten(), reduction="sum"
        )


def split_dims_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return the dimension along which each parameter's state may be cut, as for pipelines.

    WHOLE: it is not cut.
    """
    specs = family_of(config).parameter_specs(config)
    return {
        name: WHOLE if spec.split_dim is None else spec.split_dim for name, spec in specs.items()
    }


def decoder_from(job: Job, microbatch: int) -> Decoder | None:
    """Return the graph of a job's model; None if the planner does not know the family's graph.

    Raises:
        ConfigError: the graph cannot be captured.
    """
    if job.model.config is not None and job.model.config.get("model_type") not in FAMILIES:
        return None
    config, training = load_config(job.model), job.training
    if config.model_type not in FAMILIES:
        return None
    dtype = COMPUTE_DTYPES[training.precision]
    plain = without_dropout(config)  # that a program cannot train is no matter of its costs
    captured = capture_language_model(plain, microbatch, training.sequence_length, dtype)
    return Decoder(captured.graph, split_dims_of(config))


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
    stage = build_stage(config, 0, family.num_layers(config), None, torch.device("cpu"), dtype)
    stage.load_parameters(
        {name: torch.empty(spec.shape) for name, spec in stage.specs.items()}
    )  # never touched
    stage.prepare((batch, sequence_length), whole_mask)
    ids = torch.zeros(batch, sequence_length, dtype=torch.int64)
    names = {f"stage.{ours}.": f"{theirs}." for ours, theirs in reversed(stage.paths.items())}
    return capture(
        _Loss(stage), (ids, ids.clone()), most_units=family.key_value_units(config), prefixes=names
    )
