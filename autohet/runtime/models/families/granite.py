"""Granite: as Llama, with multipliers of embedding, residuals, scores and logits."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS

FAMILY = auto_family(
    "granite",
    config_keys=DECODER_KEYS
    | {
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "mlp_bias",
        "residual_multiplier",
    },
)
