"""VaultGemma: as Gemma 2, with one norm before each part of a block and none after it."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import GEMMA_KEYS

FAMILY = auto_family(
    "vaultgemma",
    config_keys=GEMMA_KEYS,
    stock_attention="eager",
    example={
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
        "pad_token_id": 3,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
)
