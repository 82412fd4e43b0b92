"""Qwen2 and 2.5: as Llama, with biases on query, key and value."""

from autohet.runtime.models.config_keys import DECODER_KEYS, WINDOW_KEYS
from autohet.runtime.models.family import Family

FAMILY = Family(
    "qwen2",
    config_keys=DECODER_KEYS | WINDOW_KEYS,
)
