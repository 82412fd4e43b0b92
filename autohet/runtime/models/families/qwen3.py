"""Qwen 3 and 3.5, dense.

Qwen 3.5 has gated attention in every fourth block, and gated delta rules in the others.
"""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS, DELTA_KEYS, WINDOW_KEYS

FAMILY = auto_family("qwen3", config_keys=DECODER_KEYS | WINDOW_KEYS | {"attention_bias"})
QWEN_3_5 = auto_family(
    "qwen3_5_text", config_keys=DECODER_KEYS | DELTA_KEYS | {"attention_bias", "layer_types"}
)
