"""Mistral: as Llama, with a sliding attention window; and the decoders that followed it."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS
from autohet.runtime.models.family import Family

_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 67,
    "sliding_window": 5,
}

FAMILY = Family(
    "mistral",
    config_keys=DECODER_KEYS | {"sliding_window"},
)

# Ministral 8B, with windows in layers of the config's choice.
MINISTRAL = auto_family(
    "ministral",
    config_keys=DECODER_KEYS | {"layer_types", "sliding_window"},
    example={
        **_TINY,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
)

# Ministral 3, alone and as the text part of Mistral 3: queries scaled by their positions.
MINISTRAL_3 = auto_family(
    "ministral3",
    config_keys=DECODER_KEYS | {"sliding_window"},
    example={
        **_TINY,
        "pad_token_id": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.7,
        },
    },
)
