"""Phi 3: query, key and value in one matrix, as gate and up projection are."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS
from autohet.runtime.models.family import ATTENTION

FAMILY = auto_family(
    "phi3",
    config_keys=DECODER_KEYS | {"embd_pdrop", "resid_pdrop", "sliding_window"},
    dropouts={
        "attention_dropout": (ATTENTION,),
        "resid_pdrop": ("self_attn.o_proj", "mlp.down_proj"),
        "embd_pdrop": (),
    },
)
