"""OLMoE: experts in every block, and norms over all heads; the library has no pipeline plan."""

from autohet.runtime.models.auto import NORMS_OVER_ALL_HEADS, ROUTED_EXPERTS
from autohet.runtime.models.experts import ExpertNames
from autohet.runtime.models.family import Family

FAMILY = Family(
    "olmoe",
    changed_styles={**NORMS_OVER_ALL_HEADS, **ROUTED_EXPERTS},
    shares_key_heads=False,
    expert_names=ExpertNames(),
)
