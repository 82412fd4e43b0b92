"""Gemma 2: soft-caps of attention scores and logits, windows in every other block."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import GEMMA_KEYS

FAMILY = auto_family("gemma2", config_keys=GEMMA_KEYS, stock_attention="eager")
