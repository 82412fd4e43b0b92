"""StarCoder 2: layer norms, biases, and an MLP without a gate."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS
from autohet.runtime.models.family import ATTENTION, EMBEDDED

FAMILY = auto_family(
    "starcoder2",
    config_keys=DECODER_KEYS - {"rms_norm_eps"}
    | {"embedding_dropout", "norm_epsilon", "residual_dropout", "sliding_window", "use_bias"},
    dropouts={
        "attention_dropout": (ATTENTION,),
        "residual_dropout": ("self_attn.o_proj", "mlp.c_proj"),
        "embedding_dropout": (EMBEDDED,),
    },
)
