"""OLMo 2: norms over all heads of queries and keys."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS

FAMILY = auto_family("olmo2", config_keys=DECODER_KEYS | {"attention_bias"})
