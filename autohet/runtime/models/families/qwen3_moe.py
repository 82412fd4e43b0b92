"""Qwen3 with routed experts."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS, ROUTED_KEYS

FAMILY = auto_family(
    "qwen3_moe",
    config_keys=DECODER_KEYS
    | ROUTED_KEYS
    | {
        "attention_bias",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "sliding_window",
        "use_sliding_window",
    },
)
