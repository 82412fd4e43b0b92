"""Qwen 3.5's language model: gated attention in every fourth block, gated delta rules in others."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS, DELTA_KEYS

FAMILY = auto_family(
    "qwen3_5_text", config_keys=DECODER_KEYS | DELTA_KEYS | {"attention_bias", "layer_types"}
)
