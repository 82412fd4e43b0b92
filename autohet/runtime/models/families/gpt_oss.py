"""gpt-oss: experts with biases, windows in every other block, and a learned sink in each head.

The library has no tensor-parallel plan for it.
"""

from autohet.runtime.models.auto import routed_styles
from autohet.runtime.models.config_keys import DECODER_KEYS, EXPERT_KEYS
from autohet.runtime.models.family import SPLIT_HEADS, Family
from autohet.runtime.models.layers.experts import ExpertNames

FAMILY = Family(
    "gpt_oss",
    config_keys=DECODER_KEYS
    | EXPERT_KEYS
    | {"attention_bias", "layer_types", "sliding_window", "swiglu_alpha", "swiglu_limit"},
    changed_styles={
        "layers.*.self_attn": SPLIT_HEADS,
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        **routed_styles("layers.*.mlp"),
    },
    expert_names=ExpertNames(are_stacked=True),
    has_sinks=True,
    changes_products=lambda _: True,  # it adds its experts' biases to grouped products in place
    loops_over_own_experts=False,
    stock_attention="eager",
)
