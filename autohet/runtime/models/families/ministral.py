"""Ministral 8B: as Mistral, with windows in layers of the config's choice."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS

FAMILY = auto_family(
    "ministral",
    config_keys=DECODER_KEYS | {"layer_types", "sliding_window"},
    example={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 67,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
)
