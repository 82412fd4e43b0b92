"""Families derived from the library's own plans.

`base_model_pp_plan` names the parts of a decoder, and `base_model_tp_plan` the way to cut each. No
plan describes the operations of a decoder outside its blocks; the fields of a `Family` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autohet.runtime.models.family import PARTIAL, SPLIT_NORM, Family
from autohet.runtime.models.layers.experts import EXPERTS, ROUTERS
from autohet.runtime.models.layers.logits import LogitAdjustment
from planner.errors import ConfigError

CUT_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")
EMBEDDING_INPUTS = ["input_ids"]
HIDDEN_STATES = ["hidden_states"]


def auto_family(model_type: str, **fields: Any) -> Family:
    """Return the family of a transformers model type, from the plans of its config class.

    fields: those of `Family` that no plan has. Without any, the styles of the library's
    tensor-parallel plan are checked.

    Raises:
        ConfigError: the class has no such plans, or they are not those of a sequence of blocks.
    """
    config_class = CONFIG_MAPPING[model_type]
    stages = getattr(config_class, "base_model_pp_plan", None)
    styles = getattr(config_class, "base_model_tp_plan", None)
    if not stages or not styles:
        raise ConfigError(
            f"transformers has no pipeline and tensor-parallel plan for model_type '{model_type}',"
            " so its family cannot be derived; write one and name it with model.family"
        )
    # Each part has the names of its inputs and of its outputs.
    paths = list(stages)
    takes = [list(stages[path][0]) for path in paths]
    gives = [list(stages[path][1]) for path in paths]
    is_sequence = (
        len(paths) == 3
        and takes[0] == EMBEDDING_INPUTS
        and takes[1][:1] == HIDDEN_STATES
        and gives[1] == gives[2] == HIDDEN_STATES
    )
    if not is_sequence:
        raise ConfigError(
            f"the pipeline plan of model_type '{model_type}' ({', '.join(paths)}) is not that of an"
            " embedding, blocks from hidden states to hidden states, and a norm; write a family and"
            " name it with model.family"
        )
    if not fields:
        _check_styles(model_type, styles)
    embedding, layers, norm = (f"model.{path}" for path in paths)
    return Family(
        model_type,
        layers=layers,
        token_embedding=embedding,
        final_norm=norm,
        **fields,
    )


def _check_styles(model_type: str, plan: Mapping[str, str]) -> None:
    """Check the styles of a tensor-parallel plan.

    Raises:
        ConfigError: a module inside blocks needs a whole tensor that another module cuts.
    """
    for pattern, style in plan.items():
        if style not in CUT_STYLES:
            raise ConfigError(
                f"the tensor-parallel plan of model_type '{model_type}' has {pattern}: {style},"
                " which needs a hook; write a family and name it with model.family"
            )


def root_of_hidden_size(config: PreTrainedConfig, dtype: torch.dtype) -> float:
    """Return Gemma's factor of the embedding, rounded to the compute format as in the library."""
    return float(torch.tensor(config.hidden_size**0.5).to(dtype))


def gated_halves(config: PreTrainedConfig) -> tuple[int, ...]:
    return (int(config.intermediate_size),) * 2


def final_softcap(config: PreTrainedConfig) -> LogitAdjustment:
    return LogitAdjustment(softcap=config.final_logit_softcapping)


NORMS_OVER_ALL_HEADS = {
    "layers.*.self_attn.q_norm": SPLIT_NORM,
    "layers.*.self_attn.k_norm": SPLIT_NORM,
}
FUSED_MLP = {
    "layers.*.mlp.gate_up_proj": "packed_colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
ROUTED_EXPERTS = {
    "layers.*.mlp.experts": EXPERTS,
    **{f"layers.*.{router}": PARTIAL[0] for router in ROUTERS},
}
