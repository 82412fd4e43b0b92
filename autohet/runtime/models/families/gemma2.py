"""Gemma 2: soft-caps of attention scores and logits, windows in every other block."""

from autohet.runtime.models.auto import auto_family, final_softcap, root_of_hidden_size
from autohet.runtime.models.config_keys import GEMMA_KEYS

FAMILY = auto_family(
    "gemma2",
    config_keys=GEMMA_KEYS,
    embedding_scale=root_of_hidden_size,
    logit_adjustment=final_softcap,
    attention_softcap=lambda config: config.attn_logit_softcapping,
    stock_attention="eager",
)
