"""Config keys of the trainable families: every key is used, without effect, or refused by name.

The sets hold for the modules of `transformers`, which read the keys; a test compares them with the
library's config classes and the attributes that its modules read.
"""

import dataclasses
import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from autohet.runtime.models.layers.experts import keep_density
from planner.errors import ConfigError

logger = logging.getLogger(__name__)

COMMON_KEYS = frozenset({"model_type", "vocab_size", "initializer_range", "pad_token_id"})
DECODER_KEYS = COMMON_KEYS | {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "attention_dropout",
    "tie_word_embeddings",
}
GEMMA_KEYS = DECODER_KEYS - {"hidden_act"} | {
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
}
WINDOW_KEYS = frozenset(
    {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
)
DELTA_KEYS = frozenset(
    {
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    }
)
EXPERT_KEYS = frozenset({"num_experts", "num_experts_per_tok", "num_local_experts"})
ROUTED_KEYS = EXPERT_KEYS | {"norm_topk_prob"}

OLDER_SPELLINGS = frozenset({"model_type", "rope_theta", "rope_scaling", "partial_rotary_factor"})
"""Keys that the library reads for every family although they are no fields."""

WITHOUT_EFFECT = frozenset(
    {
        # bookkeeping
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_name_or_path",
        "_num_labels",
        "architectures",
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "dtype",
        "gradient_checkpointing",
        "model_name",
        "num_mtp_layers",  # of generation alone
        "num_nextn_predict_layers",
        "name_or_path",
        "pretraining_tp",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        # generation
        "bos_token_id",
        "cache_implementation",
        "decoder_start_token_id",
        "eos_token_id",
        "do_sample",
        "max_length",
        "max_new_tokens",
        "repetition_penalty",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "top_k",
        "top_p",
        "use_cache",
        # other heads and what a model returns
        "classifier_dropout",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "problem_type",
        "return_dict",
        "summary_activation",
        "summary_first_dropout",
        "summary_last_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "router_aux_loss_coef",  # of output_router_logits, which is refused
        # other code's names, or of branches that these modules do not take
        "chunk_size_feed_forward",
        "is_llama_config",
        "n_ctx",
        "predict_special_tokens",
        "reorder_and_upcast_attn",  # of eager attention alone; sdpa is used
        "tie_encoder_decoder",
        "tokenizer_class",
        "use_mrope",
    }
)
"""Keys that change neither loss nor gradient of a causal language model of any family."""

_DECODER_ALONE = "a decoder alone is trained here: set it to false"
REFUSED: Mapping[str, str] = {
    "use_bidirectional_attention": (
        "lets tokens see those that follow, as an encoder; set it to false"
    ),
    "is_encoder_decoder": f"is for encoder-decoder models; {_DECODER_ALONE}",
    "add_cross_attention": f"is for encoder-decoder models; {_DECODER_ALONE}",
    "output_router_logits": (
        "adds the library's balance loss of a batch, which depends on the microbatch and so on the"
        " plan; set it to false"
    ),
    "router_jitter_noise": (
        "multiplies what the router reads by noise, which would depend on the fleet; set it to 0"
    ),
    "pruned_heads": "removes attention heads; save the pruned model without it",
    "per_layer_config": "gives layers shapes of their own; all layers of a model must be alike",
}
"""Keys that must be null, false or empty, each with the reason."""

MIN_SIMILARITY = 0.8
"""Similarity (difflib's ratio) above which an unknown key counts as a misspelt one."""


RECURRENT = "linear_attention"
"""Layer type of blocks whose tokens are mixed by a recurrence and a short convolution."""
PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Keys with an entry for each layer."""


def entries_by_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """Return the keys of PER_LAYER that a config gives for each of its layers, with the entries."""
    given = {key: getattr(config, key, None) for key in PER_LAYER}
    num_layers = int(config.num_hidden_layers)
    found = {}
    for key, entries in given.items():
        if isinstance(entries, (list, tuple)) and len(entries) == num_layers:
            found[key] = list(entries)
    return found


def with_layers(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return a copy of the config for a model that has only these of its layers, in order."""
    short = keep_density(config, layers)
    for key, entries in entries_by_layer(config).items():
        setattr(short, key, [entries[index] for index in layers])
    short.num_hidden_layers = len(layers)
    return short


def known_keys(config: PreTrainedConfig, used: frozenset[str]) -> frozenset[str]:
    """Return the keys with a meaning for the config's class.

    They are its fields, aliases and used keys, and those that the class itself writes into a
    config.json (`_sliding_window_pattern`).

    used: `Family.config_keys`; empty if they are not known.
    """
    fields = {field.name for field in dataclasses.fields(config)}
    written = set(type(config)().to_dict())
    return frozenset(fields | written | set(config.attribute_map) | (used or OLDER_SPELLINGS))


def settle_keys(
    config: PreTrainedConfig,
    given: Mapping[str, Any],
    where: str,
    used: frozenset[str],
    *,
    typed_by_hand: bool,
) -> None:
    """Refuse forbidden keys, drop left-over attributes, and log the keys without effect.

    given: the document that the config was made from. used: as in `known_keys`. typed_by_hand: a
    key that looks like a misspelt field is an error; in a published file it is logged like other
    left-over keys.

    Raises:
        ConfigError: a refused key has a value, or a key is misspelt.
    """
    _check_refused(config, given, where, used)
    known = known_keys(config, used)
    left_over = sorted(set(given) - known - WITHOUT_EFFECT - {"quantization_config"})
    if typed_by_hand:
        for key in left_over:
            near = difflib.get_close_matches(
                key, sorted(known - set(given)), n=1, cutoff=MIN_SIMILARITY
            )
            if near:
                raise ConfigError(
                    f"{where}: {config.model_type!s} has no key '{key}'; did you mean {near[0]}?"
                )
    if not used:
        if left_over:
            logger.warning(
                "%s: %s are no fields of transformers' %s; its modules may read them",
                where,
                ", ".join(left_over),
                type(config).__name__,
            )
        return
    fields = {field.name for field in dataclasses.fields(config)}
    for key in set(given) - fields - used - {"quantization_config"}:
        config.__dict__.pop(key, None)
    if left_over:
        logger.warning(
            "%s: %s have no effect, since transformers' %s does not read them",
            where,
            ", ".join(left_over),
            type(config).__name__,
        )


def _check_refused(
    config: PreTrainedConfig, given: Mapping[str, Any], where: str, used: frozenset[str]
) -> None:
    for key, reason in REFUSED.items():
        if given.get(key):
            raise ConfigError(f"{where}: {key} {reason}")
    if not used:
        return
    pristine = type(config)()
    for field in dataclasses.fields(config):
        if field.name in used | WITHOUT_EFFECT | REFUSED.keys():
            continue
        if getattr(config, field.name) != getattr(pristine, field.name):
            raise ConfigError(
                f"{where}: {field.name} is a key of transformers' {type(config).__name__} whose"
                " effect this version does not know; leave it out"
            )


def is_recurrent(config: PreTrainedConfig, layer: int) -> bool:
    """Return True if a block mixes tokens by a recurrence, which takes no attention mask."""
    kinds = getattr(config, "layer_types", None) or ()
    return bool(kinds) and kinds[layer] == RECURRENT


def window_of(config: PreTrainedConfig, layer: int) -> int | None:
    """Return the number of tokens that a token of a block attends to, itself included.

    None: all preceding tokens.
    """
    kinds = getattr(config, "layer_types", None)
    slides = not kinds or kinds[layer] == "sliding_attention"
    window = getattr(config, "sliding_window", None)
    if not slides or not window:
        return None
    return int(window)


def check_window(config: PreTrainedConfig, where: str) -> None:
    """Check `layer_types` and `sliding_window` against the needs of the library's masks.

    Raises:
        ConfigError: a layer slides without a window, or a type is unknown.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return
    if len(kinds) != int(config.num_hidden_layers):
        raise ConfigError(
            f"{where}: layer_types has {len(kinds)} entries, but num_hidden_layers is"
            f" {config.num_hidden_layers}; give one for each layer"
        )
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention", RECURRENT})
    if unknown:
        raise ConfigError(
            f"{where}: layer_types holds {unknown[0]}; use full_attention, sliding_attention or"
            f" {RECURRENT}"
        )
    if "sliding_attention" in kinds and not getattr(config, "sliding_window", None):
        raise ConfigError(
            f"{where}: layer_types holds sliding_attention, but there is no sliding_window; give"
            " sliding_window and use_sliding_window: true, or leave layer_types out"
        )


def check_rope(config: PreTrainedConfig, where: str) -> None:
    """Check the kind and the base of rotary embeddings; both are free text to the config class.

    Raises:
        ConfigError: transformers knows no such kind, or the base is no number.
    """
    # One set of parameters, or one for each layer type.
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [each for each in parameters.values() if isinstance(each, Mapping)]
    known = ("default", *sorted(ROPE_INIT_FUNCTIONS))
    for each in by_layer_type or [parameters]:
        kind = each.get("rope_type", "default")
        if kind not in known:
            raise ConfigError(
                f"{where}: transformers knows no rope_type {kind!r}; use one of {', '.join(known)}"
            )
        base = each.get("rope_theta", 1.0)
        is_number = isinstance(base, int | float) and not isinstance(base, bool)
        if not is_number or base <= 0:
            raise ConfigError(f"{where}: rope_theta is {base!r}; give a positive number")
