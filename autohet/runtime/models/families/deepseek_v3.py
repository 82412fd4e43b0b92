"""DeepSeek V3: latent attention, routed experts with a correction bias, and shared experts."""

from transformers import PreTrainedConfig

from autohet.runtime.models.auto import auto_family, latent_styles
from autohet.runtime.models.config_keys import DECODER_KEYS, ROUTED_KEYS
from planner.errors import ConfigError


def _check_latent_attention(config: PreTrainedConfig) -> None:
    heads = config.num_attention_heads
    key_heads = config.num_key_value_heads
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


FAMILY = auto_family(
    "deepseek_v3",
    config_keys=DECODER_KEYS
    | ROUTED_KEYS - {"num_experts"}
    | {
        "attention_bias",
        "first_k_dense_replace",
        "kv_lora_rank",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_interleave",
        "routed_scaling_factor",
        "topk_group",
        "v_head_dim",
    },
    changed_styles=latent_styles("layers.*.self_attn"),
    check=_check_latent_attention,
)
