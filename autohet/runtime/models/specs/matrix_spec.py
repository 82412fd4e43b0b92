"""Matrices of a model spec that Muon updates."""

import math
from dataclasses import replace

from transformers import PreTrainedConfig

from autohet.runtime.models.registry import family_of
from planner.plans.model_spec import ModelSpec
from planner.plans.muon import Matrices, orthogonalization_flops


def with_matrices(spec: ModelSpec, config: PreTrainedConfig) -> ModelSpec:
    """Return the spec with the matrices of each block; the config says which they are."""
    found = [Matrices(0, 0, 0.0)] * spec.num_layers
    for each in family_of(config).parameter_specs(config).values():
        if each.uses_muon:
            *stacked, rows, columns = each.shape
            number = math.prod(stacked)
            had = found[each.layer]
            found[each.layer] = Matrices(
                had.parameters + number * rows * columns,
                max(had.largest, rows * columns),
                had.flops + number * orthogonalization_flops(rows, columns),
            )
    blocks = zip(spec.blocks, found, strict=True)
    return replace(spec, blocks=tuple(replace(block, matrices=each) for block, each in blocks))
