"""Qwen3 (dense): as Llama, with a norm on each head's query and key."""

from autohet.runtime.models.config_keys import DECODER_KEYS, WINDOW_KEYS
from autohet.runtime.models.family import Family

FAMILY = Family(
    "qwen3",
    config_keys=DECODER_KEYS | WINDOW_KEYS | {"attention_bias"},
)
