"""OLMoE: experts in every block, and norms over all heads; the library has no pipeline plan."""

from autohet.runtime.models.auto import norms_over_all_heads, routed_styles
from autohet.runtime.models.config_keys import DECODER_KEYS, ROUTED_KEYS
from autohet.runtime.models.family import Family
from autohet.runtime.models.layers.experts import ExpertNames

FAMILY = Family(
    "olmoe",
    config_keys=DECODER_KEYS | ROUTED_KEYS | {"attention_bias", "clip_qkv"},
    changed_styles={**norms_over_all_heads("layers.*.self_attn"), **routed_styles("layers.*.mlp")},
    shares_key_heads=False,
    expert_names=ExpertNames(),
)
