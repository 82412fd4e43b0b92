"""Mixtral: routed experts in every block."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS, EXPERT_KEYS

FAMILY = auto_family(
    "mixtral",
    config_keys=DECODER_KEYS | EXPERT_KEYS | {"sliding_window"},
)
