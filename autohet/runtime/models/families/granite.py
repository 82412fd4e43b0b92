"""Granite: as Llama, with multipliers of embedding, residuals, scores and logits."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS
from autohet.runtime.models.layers.logits import LogitAdjustment

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
    embedding_scale=lambda config, _: float(config.embedding_multiplier),
    logit_adjustment=lambda config: LogitAdjustment(divisor=config.logits_scaling),
)
