"""Gemma 3's language model: norms of queries and keys, and a rotary table for each layer type."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import GEMMA_KEYS

FAMILY = auto_family(
    "gemma3_text", config_keys=GEMMA_KEYS | {"rope_local_base_freq", "sliding_window_pattern"}
)
