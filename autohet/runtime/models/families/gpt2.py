"""GPT-2: learned positions, tied embedding, and query, key and value in one Conv1D.

The library has no TP plan for it; this module defines one.
"""

from autohet.runtime.models.config_keys import COMMON_KEYS
from autohet.runtime.models.family import ATTENTION, EMBEDDED, Family

FAMILY = Family(
    "gpt2",
    config_keys=COMMON_KEYS
    | {
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "hidden_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "activation_function",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "layer_norm_epsilon",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "tie_word_embeddings",
    },
    base="transformer",
    layers="transformer.h",
    token_embedding="transformer.wte",
    position_embedding="transformer.wpe",
    rotary=None,
    final_norm="transformer.ln_f",
    tp_plan={
        "transformer.h.*.attn.c_attn": "packed_colwise",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    packed={"attn.c_attn": lambda config: (int(config.n_embd),) * 3},
    key_value_projections=(),
    attention="attn",
    dropouts={
        "attn_pdrop": (ATTENTION,),
        "resid_pdrop": ("attn.c_proj", "mlp.c_proj"),
        "embd_pdrop": (EMBEDDED,),
    },
)
