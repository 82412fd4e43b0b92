"""Families derived from the library's own plans.

`base_model_pp_plan` names the parts of a decoder, and `base_model_tp_plan` the way to cut each. No
plan describes the operations of a decoder outside its blocks; the fields of a `Family` do.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autohet.runtime.models.family import (
    COLUMN,
    PARTIAL,
    ROW,
    SPLIT_HEADS,
    SPLIT_NORM,
    WHOLE,
    WHOLE_MIXER,
    Family,
)
from autohet.runtime.models.layers.experts import (
    EXPERTS,
    ROUTERS,
    SHARED_COLUMN,
    SHARED_ROW,
    STACKS,
    ExpertNames,
)
from planner.errors import ConfigError
from planner.plans.plan import TensorShare

EMBEDDING_INPUTS = ["input_ids"]
HIDDEN_STATES = ["hidden_states"]
GATHERED = "colwise_gather_output"
"""The library's style of a map that each rank computes in part, and of which it has the whole."""
QUERIES = ("layers.*.self_attn.q_proj", "layers.*.self_attn.qkv_proj")
SHARED_EXPERTS = ("shared_expert", "shared_experts")
"""Names of the experts that every token uses, beside the stack of the routed ones."""


def auto_family(model_type: str, **fields: Any) -> Family:
    """Return the family of a transformers model type, from the plans of its config class.

    fields: those of `Family` that no rule below derives, or that replace what it derives.

    Raises:
        ConfigError: the class has no such plans, or they are not those of a sequence of blocks.
    """
    config_class = CONFIG_MAPPING[model_type]
    stages = getattr(config_class, "base_model_pp_plan", None)
    styles = getattr(config_class, "base_model_tp_plan", None)
    if not stages or not styles:
        raise ConfigError(
            f"transformers has no pipeline and tensor-parallel plan for model_type '{model_type}',"
            " so its family cannot be derived; write one and name it with model.family"
        )
    # Each part has the names of its inputs and of its outputs.
    paths = list(stages)
    takes = [list(stages[path][0]) for path in paths]
    gives = [list(stages[path][1]) for path in paths]
    is_sequence = (
        len(paths) == 3
        and takes[0] == EMBEDDING_INPUTS
        and takes[1][:1] == HIDDEN_STATES
        and gives[1] == gives[2] == HIDDEN_STATES
    )
    if not is_sequence:
        raise ConfigError(
            f"the pipeline plan of model_type '{model_type}' ({', '.join(paths)}) is not that of an"
            " embedding, blocks from hidden states to hidden states, and a norm; write a family and"
            " name it with model.family"
        )
    embedding, layers, norm = (f"model.{path}" for path in paths)
    has_sinks = "layers.*.self_attn.sinks" in styles
    given = fields.pop("changed_styles", {})
    derived = {
        "changed_styles": _derived_styles(model_type, styles, given) | given,
        "expert_names": _expert_names(model_type) if EXPERTS in styles.values() else None,
        "has_sinks": has_sinks,
        "stock_attention": "eager" if has_sinks else "sdpa",
        "shares_key_heads": GATHERED not in (styles.get(each) for each in QUERIES),
        "packed": {"mlp.gate_up_proj": _gated_halves, "self_attn.qkv_proj": _query_key_value},
        "divide_attention": _divide_fused_attention,
    }
    return Family(
        model_type,
        layers=layers,
        token_embedding=embedding,
        final_norm=norm,
        **{**derived, **fields},
    )


def _derived_styles(
    model_type: str, plan: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the styles by path pattern that replace those of a library's plan, or complete it.

    given: styles that a family names itself, which cut its attention where the plan says nothing.

    Raises:
        ConfigError: a style is unknown.
    """
    changed: dict[str, str] = {}
    if not any(pattern.startswith("layers.*.self_attn") for pattern in {**plan, **given}):
        changed["layers.*.self_attn"] = WHOLE_MIXER
    for pattern, style in plan.items():
        parent, _, name = pattern.rpartition(".")
        if ".experts." in f".{pattern}":
            continue  # a parameter of a stack, which is cut by experts
        if style == EXPERTS:
            changed |= routed_styles(parent)
        elif style == "mla_kv_a_proj":
            changed |= latent_styles(parent)
        elif style == GATHERED:
            changed |= _gathered_styles(parent, name)
        elif style == "local_params":
            changed[pattern] = SPLIT_HEADS
        elif style not in (*COLUMN, *ROW, *PARTIAL, "embedding_rowwise"):
            raise ConfigError(
                f"the tensor-parallel plan of model_type '{model_type}' has {pattern}: {style},"
                " which needs a hook; write a family and name it with model.family"
            )
    return changed


def routed_styles(block: str) -> dict[str, str]:
    """Return the styles of a block of routed experts, its routers and its shared experts."""
    styles = {f"{block}.experts": EXPERTS, f"{block}.shared_expert_gate": PARTIAL[0]}
    for router in ROUTERS:
        name = router.rpartition(".")[2]
        styles |= {f"{block}.{name}": PARTIAL[0], f"{block}.{name}.*": PARTIAL[0]}
    for shared in SHARED_EXPERTS:
        styles |= {
            f"{block}.{shared}.gate_proj": SHARED_COLUMN,
            f"{block}.{shared}.up_proj": SHARED_COLUMN,
            f"{block}.{shared}.down_proj": SHARED_ROW,
        }
    return styles


def latent_styles(attention: str) -> dict[str, str]:
    """Return the styles of latent attention (DeepSeek-V2, section 2.1).

    Every rank has the whole compressed queries, keys and values, and its heads' expansions.
    """
    whole = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    styles = dict.fromkeys((f"{attention}.{name}" for name in whole), PARTIAL[0])
    by_heads = ("q_proj", "q_b_proj", "kv_b_proj")
    styles |= dict.fromkeys((f"{attention}.{name}" for name in by_heads), "colwise")
    return {**styles, f"{attention}.o_proj": "rowwise"}


def norms_over_all_heads(attention: str) -> dict[str, str]:
    """Return the styles of norms over all heads of queries and keys (OLMo 2)."""
    return dict.fromkeys((f"{attention}.q_norm", f"{attention}.k_norm"), SPLIT_NORM)


def _gathered_styles(parent: str, name: str) -> dict[str, str]:
    """Return the styles in place of a map whose whole output the library needs on each rank."""
    if name in ("gate_up_proj", "qkv_proj"):
        return {f"{parent}.{name}": "packed_colwise"}
    if name in ("q_proj", "k_proj", "v_proj"):
        return norms_over_all_heads(parent)
    return {f"{parent}.{name}": WHOLE, parent: WHOLE_MIXER}


def _expert_names(model_type: str) -> ExpertNames:
    """Return the names of experts in checkpoint files, by the library's own conversions."""
    maps: dict[str, list[str]] = {}
    block = "mlp"
    for conversion in get_checkpoint_conversion_mapping(model_type) or ():
        (target, *_) = conversion.target_patterns
        sources = conversion.source_patterns
        if target.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            maps[target.rpartition(".")[2]] = [each.split(".")[-2] for each in sources]
        elif "block_sparse_moe" in sources[0] and target == ".mlp.":
            block = "block_sparse_moe"
    if set(maps) != set(STACKS) or len(maps["gate_up_proj"]) != 2:
        return ExpertNames(are_stacked=True)
    gate, up = maps["gate_up_proj"]
    return ExpertNames(block, gate, up, maps["down_proj"][0])


def _gated_halves(config: PreTrainedConfig) -> tuple[int, ...]:
    return (int(config.intermediate_size),) * 2


def _query_key_value(config: PreTrainedConfig) -> tuple[int, ...]:
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    key_heads = int(config.num_key_value_heads)
    return heads * size, key_heads * size, key_heads * size


def _divide_fused_attention(module: nn.Module, share: TensorShare) -> None:
    """Set the numbers of heads by which Phi 3 slices its fused projection, in config and module."""
    if not hasattr(module, "qkv_proj"):
        return
    part = share.end - share.first
    config: Any = copy.copy(module.config)
    config.num_attention_heads = int(config.num_attention_heads) * part // share.of
    module.config = config
    module.num_key_value_heads = int(module.num_key_value_heads) * part // share.of  # type: ignore[arg-type, assignment]
