"""Phi 3: query, key and value in one matrix, as gate and up projection are."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from autohet.runtime.models.auto import FUSED_MLP, auto_family, gated_halves
from autohet.runtime.models.config_keys import DECODER_KEYS
from autohet.runtime.models.family import ATTENTION
from planner.plans.plan import TensorShare


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


FAMILY = auto_family(
    "phi3",
    config_keys=DECODER_KEYS | {"embd_pdrop", "resid_pdrop", "sliding_window"},
    changed_styles={
        **FUSED_MLP,
        "layers.*.self_attn.qkv_proj": "packed_colwise",
        "layers.*.self_attn.o_proj": "rowwise",
    },
    packed={
        "self_attn.qkv_proj": _query_key_value,
        "mlp.gate_up_proj": gated_halves,
    },
    shares_key_heads=False,
    divide_attention=_divide_fused_attention,
    dropouts={
        "attention_dropout": (ATTENTION,),
        "resid_pdrop": ("self_attn.o_proj", "mlp.down_proj"),
        "embd_pdrop": (),
    },
)
