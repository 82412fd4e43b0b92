"""Names of the parameters of a run and of a stage."""

from __future__ import annotations

from transformers import PreTrainedConfig

from autohet.runtime.models.parameter_spec import (
    EMBEDDING,
    HEAD,
)
from autohet.runtime.models.registry import family_of


def trainable_names(config: PreTrainedConfig) -> list[str]:
    """Return the names of the parameters that a run trains: all, or its adapters."""
    specs = family_of(config).parameter_specs(config)
    return [name for name, spec in specs.items() if spec.trainable]


def stage_parameter_names(config: PreTrainedConfig, first_layer: int, num_layers: int) -> list[str]:
    """Return the names of a stage's parameters.

    The first stage has the embedding, the last the final norm and the head; both have a tied
    embedding.
    """
    family = family_of(config)
    total = family.num_layers(config)
    is_first = first_layer == 0
    is_last = first_layer + num_layers == total
    tied = f"{family.token_embedding}.weight" if family.tied_head(config) else None
    names = []
    for name, spec in family.parameter_specs(config).items():
        in_blocks = first_layer <= spec.layer < first_layer + num_layers
        before_blocks = is_first and spec.layer == EMBEDDING
        after_blocks = is_last and (spec.layer == HEAD or name == tied)
        if in_blocks or before_blocks or after_blocks:
            names.append(name)
    return names
