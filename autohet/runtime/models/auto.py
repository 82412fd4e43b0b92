"""Families derived from the library's own plans.

`base_model_pp_plan` names the parts of a decoder, and `base_model_tp_plan` the way to cut each. No
plan describes the operations of a decoder outside its blocks; the entries of `HOOKS` do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autohet.runtime.models.experts import (
    EXPERTS,
    ROUTERS,
    SHARED_COLUMN,
    SHARED_ROW,
    ExpertNames,
)
from autohet.runtime.models.family import ATTENTION, EMBEDDED, PARTIAL, SPLIT_NORM, Family
from autohet.runtime.models.logits import LogitAdjustment
from planner.errors import ConfigError
from planner.plan import TensorShare

CUT_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")
EMBEDDING_INPUTS, HIDDEN_STATES = ["input_ids"], ["hidden_states"]


def auto_family(model_type: str, hooks: Mapping[str, Any] | None = None) -> Family:
    """Return the family of a transformers model type, from the plans of its config class.

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
    if hooks is None and model_type not in HOOKS:
        _check_styles(model_type, styles)
    embedding, layers, norm = (f"model.{path}" for path in paths)
    return Family(
        model_type,
        layers=layers,
        token_embedding=embedding,
        final_norm=norm,
        **(HOOKS.get(model_type, {}) if hooks is None else hooks),
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


def _root_of_hidden_size(config: PreTrainedConfig, dtype: torch.dtype) -> float:
    """Return Gemma's factor of the embedding, rounded to the compute format as in the library."""
    return float(torch.tensor(config.hidden_size**0.5).to(dtype))


def _gated_halves(config: PreTrainedConfig) -> tuple[int, ...]:
    return (int(config.intermediate_size),) * 2


def _query_key_value(config: PreTrainedConfig) -> tuple[int, ...]:
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", config.hidden_size // heads))
    key_heads = int(config.num_key_value_heads)
    return heads * size, key_heads * size, key_heads * size


def _divide_fused_attention(module: nn.Module, share: TensorShare) -> None:
    """Set the numbers of heads by which Phi 3 slices its fused projection, in config and module."""
    if not hasattr(module, "qkv_proj"):
        return
    part = share.end - share.first
    config: Any = copy.copy(module.config)
    config.num_attention_heads = int(config.num_attention_heads) * part // share.of
    module.config = config
    module.num_key_value_heads = int(module.num_key_value_heads) * part // share.of  # type: ignore[arg-type, assignment]


def _final_softcap(config: PreTrainedConfig) -> LogitAdjustment:
    return LogitAdjustment(softcap=config.final_logit_softcapping)


NORMS_OVER_ALL_HEADS = {
    "layers.*.self_attn.q_norm": SPLIT_NORM,
    "layers.*.self_attn.k_norm": SPLIT_NORM,
}
_FUSED_MLP = {
    "layers.*.mlp.gate_up_proj": "packed_colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
ROUTED_EXPERTS = {
    "layers.*.mlp.experts": EXPERTS,
    **{f"layers.*.{router}": PARTIAL[0] for router in ROUTERS},
}
_LATENT_ATTENTION = {
    **dict.fromkeys(
        (
            "layers.*.self_attn.q_a_proj",
            "layers.*.self_attn.q_a_layernorm",
            "layers.*.self_attn.kv_a_proj_with_mqa",
            "layers.*.self_attn.kv_a_layernorm",
        ),
        PARTIAL[0],
    ),
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
"""Styles of multi-head latent attention: latents are whole on each rank, their heads are cut."""
_SHARED_EXPERTS = {
    "layers.*.mlp.shared_experts.gate_proj": SHARED_COLUMN,
    "layers.*.mlp.shared_experts.up_proj": SHARED_COLUMN,
    "layers.*.mlp.shared_experts.down_proj": SHARED_ROW,
}


def _check_latent_attention(config: PreTrainedConfig) -> None:
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    if heads != key_heads:
        raise ConfigError(
            f"num_key_value_heads is {key_heads}, but latent attention has keys and values for"
            f" each of {heads} heads; give {heads}"
        )
    if config.head_dim != config.qk_rope_head_dim:
        raise ConfigError(
            f"head_dim is {config.head_dim}, but latent attention rotates qk_rope_head_dim,"
            f" {config.qk_rope_head_dim}; leave head_dim out"
        )


HOOKS: Mapping[str, Mapping[str, Any]] = {
    "cohere2": {
        "logit_adjustment": lambda config: LogitAdjustment(factor=config.logit_scale),
    },
    "deepseek_v3": {
        "changed_styles": {**_LATENT_ATTENTION, **ROUTED_EXPERTS, **_SHARED_EXPERTS},
        "expert_names": ExpertNames(),
        "check": _check_latent_attention,
    },
    "gemma2": {
        "embedding_scale": _root_of_hidden_size,
        "logit_adjustment": _final_softcap,
        "attention_softcap": lambda config: config.attn_logit_softcapping,
        "stock_attention": "eager",
    },
    "gemma3_text": {
        "embedding_scale": _root_of_hidden_size,
        "logit_adjustment": _final_softcap,
    },
    "glm4": {
        "changed_styles": _FUSED_MLP,
        "packed": {"mlp.gate_up_proj": _gated_halves},
    },
    "granite": {
        "embedding_scale": lambda config, _: float(config.embedding_multiplier),
        "logit_adjustment": lambda config: LogitAdjustment(divisor=config.logits_scaling),
    },
    "mixtral": {
        "changed_styles": ROUTED_EXPERTS,
        "expert_names": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    },
    "olmo2": {
        "changed_styles": NORMS_OVER_ALL_HEADS,
        "shares_key_heads": False,
    },
    "phi3": {
        "changed_styles": {
            **_FUSED_MLP,
            "layers.*.self_attn.qkv_proj": "packed_colwise",
            "layers.*.self_attn.o_proj": "rowwise",
        },
        "packed": {
            "self_attn.qkv_proj": _query_key_value,
            "mlp.gate_up_proj": _gated_halves,
        },
        "shares_key_heads": False,
        "divide_attention": _divide_fused_attention,
        "dropouts": {
            "attention_dropout": (ATTENTION,),
            "resid_pdrop": ("self_attn.o_proj", "mlp.down_proj"),
            "embd_pdrop": (),
        },
    },
    "qwen3_moe": {"changed_styles": ROUTED_EXPERTS, "expert_names": ExpertNames()},
    "smollm3": {},
    "starcoder2": {
        "dropouts": {
            "attention_dropout": (ATTENTION,),
            "residual_dropout": ("self_attn.o_proj", "mlp.c_proj"),
            "embedding_dropout": (EMBEDDED,),
        },
    },
}
"""Fields of a `Family` that no plan has, by model type.

Each family is compared with the library's model, cut at every place.
"""
FAMILIES: Mapping[str, Family] = {model_type: auto_family(model_type) for model_type in HOOKS}
