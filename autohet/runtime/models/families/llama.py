"""Llama 1 to 3 and whatever shares its architecture."""

from autohet.runtime.models.config_keys import DECODER_KEYS
from autohet.runtime.models.family import Family

FAMILY = Family(
    "llama",
    config_keys=DECODER_KEYS | {"attention_bias", "mlp_bias"},
)
