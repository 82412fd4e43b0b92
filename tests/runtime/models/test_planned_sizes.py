"""The planner's parameters of each layer are those that the runtime's ranks hold, for every family
and TP degree.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.parameter_spec import (
    EMBEDDING,
    HEAD,
    ParameterSpec,
    local_shape,
    local_units,
)
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.specs.model_spec import model_spec_from_config
from planner.cost.memory.training_bytes import TokensOnRank, memory_terms
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Stage, TensorShare

HEADS = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 500,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 8,
        "n_positions": 32,
        "vocab_size": 500,
    },
    "gpt2-untied": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 8,
        "n_positions": 32,
        "vocab_size": 500,
        "tie_word_embeddings": False,
    },
    "llama": {"model_type": "llama", **HEADS, "num_key_value_heads": 8},
    "llama-biases": {
        "model_type": "llama",
        **HEADS,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-tied": {
        "model_type": "llama",
        **HEADS,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", **HEADS, "num_key_value_heads": 1},
    "qwen2": {"model_type": "qwen2", **HEADS, "num_key_value_heads": 8},
    "qwen2-few": {"model_type": "qwen2", **HEADS, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", **HEADS, "num_key_value_heads": 8, "head_dim": 16},
    "qwen3-few": {
        "model_type": "qwen3",
        **HEADS,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-wide": {"model_type": "qwen3", **HEADS, "num_key_value_heads": 8, "head_dim": 64},
}


def shares_of(*shares: int) -> list[TensorShare]:
    stage = Stage(0, 1, ("w",) * len(shares), tp_shares=shares)
    return [stage.share(rank) for rank in range(len(shares))]


def held(spec: ParameterSpec, shares: Sequence[TensorShare]) -> list[int]:
    """Scalars that each rank holds."""
    return [math.prod(local_shape(spec, local_units(spec, share))) for share in shares]


def runtime_scalars(config: Any, shares: Sequence[TensorShare]) -> np.ndarray:
    """(embedding, blocks, head; ranks): what each rank of the runtime holds, the head with a tied
    weight.
    """
    family, blocks = family_of(config), int(config.num_hidden_layers)
    found = np.zeros((blocks + 2, len(shares)))
    for name, spec in family.parameter_specs(config).items():
        found[{EMBEDDING: 0, HEAD: -1}.get(spec.layer, spec.layer + 1)] += held(spec, shares)
        if family.tied_head(config) and name == f"{family.token_embedding}.weight":
            found[-1] += held(spec, shares)
    return found


def planned_scalars(spec: ModelSpec, degree: float) -> np.ndarray:
    """(embedding, blocks, head): by the bytes of state that the planner counts for each worker."""
    parameters = framework_parameters(OURS, CostParameters())
    terms = memory_terms(spec, TokensOnRank(32, 32, "bf16", degree), "none", parameters)
    return terms.state_bytes / 18  # weight, master, gradient, two moments


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_planner_counts_the_bytes_that_each_rank_holds(name: str) -> None:
    """With a padded vocabulary all ranks hold the same."""
    source, degrees = CONFIGS[name], (1, 2, 4, 8)
    config = load_config(ModelSection(config=source, vocabulary_multiple=64))
    spec = model_spec_from_config(name, source, rows=(None, 64))
    assert spec.max_tp_degree == max(degrees)
    for degree in degrees:
        for rank, found in enumerate(runtime_scalars(config, shares_of(*[1] * degree)).T):
            assert planned_scalars(spec, degree) == pytest.approx(found, rel=1e-12), (degree, rank)
    for several in ((3, 1), (2, 1, 1), (3, 3, 2), (1, 5, 2), (3, 2, 1, 1, 1)):
        shares = shares_of(*several)
        for share, found in zip(shares, runtime_scalars(config, shares).T, strict=True):
            planned = planned_scalars(spec.with_share(share), 1 / share.fraction)
            assert planned == pytest.approx(found, rel=1e-12), (several, share)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-tied", "mistral", "qwen3-few"])
def test_where_sizes_do_not_divide_it_counts_the_mean_of_the_ranks(name: str) -> None:
    source = CONFIGS[name] | {
        "n_inner" if name == "gpt2" else "intermediate_size": 173,
        "vocab_size": 501,
    }
    config = load_config(ModelSection(config=source))
    spec = model_spec_from_config(name, source)
    for degree in (2, 8):
        assert planned_scalars(spec, degree) == pytest.approx(
            runtime_scalars(config, shares_of(*[1] * degree)).mean(axis=1), rel=1e-12
        )
