"""Command R7B: layer norms, parallel attention and MLP, and a factor of the logits."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS

FAMILY = auto_family(
    "cohere2",
    config_keys=DECODER_KEYS - {"rms_norm_eps"}
    | {
        "attention_bias",
        "layer_norm_eps",
        "layer_types",
        "logit_scale",
        "sliding_window",
        "sliding_window_pattern",
    },
)
