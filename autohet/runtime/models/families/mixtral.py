"""Mixtral: routed experts in every block."""

from autohet.runtime.models.auto import ROUTED_EXPERTS, auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS, EXPERT_KEYS
from autohet.runtime.models.layers.experts import ExpertNames

FAMILY = auto_family(
    "mixtral",
    config_keys=DECODER_KEYS | EXPERT_KEYS | {"sliding_window"},
    changed_styles=ROUTED_EXPERTS,
    expert_names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
)
