"""GLM 4: gate and up projection in one matrix, and norms after each part of a block."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS

FAMILY = auto_family("glm4", config_keys=DECODER_KEYS | {"attention_bias"})
