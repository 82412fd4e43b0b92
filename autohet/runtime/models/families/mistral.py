"""Mistral: as Llama, with a sliding attention window."""

from autohet.runtime.models.config_keys import DECODER_KEYS
from autohet.runtime.models.family import Family

FAMILY = Family(
    "mistral",
    config_keys=DECODER_KEYS | {"sliding_window"},
)
