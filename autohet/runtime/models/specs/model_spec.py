"""Model spec from a transformers config.

The library's own modules are built on the meta device (no weights) and measured.

Works for any decoder's causal-LM config. The blocks are the largest ModuleList with one entry a
layer. The embedding is the result of `get_input_embeddings`, with every other embedding table
outside the blocks. The head is `get_output_embeddings` and all other modules outside the blocks
(final norm, projections).
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autohet.runtime.models.config import read_config
from autohet.runtime.models.config_keys import window_of
from autohet.runtime.models.error_text import first_line
from autohet.runtime.models.family import Family
from autohet.runtime.models.layers.experts import check_experts, num_experts, own_correction_bias
from autohet.runtime.models.parameter_spec import grow_vocabulary
from autohet.runtime.models.registry import FAMILIES
from autohet.runtime.models.specs.counted_values import count_block, count_head
from planner.errors import ConfigError
from planner.plans.model_spec import Experts, ExplicitScores, KeptValues, LayerSpec, ModelSpec

_FUSED_PRECISIONS = ("bf16", "fp16")


def model_spec_from_config(
    name: str,
    config: Mapping[str, Any] | str | Path,
    *,
    precision: str = "bf16",
    revision: str | None = None,
    rows: tuple[int | None, int] = (None, 1),
    dropout: bool = False,
) -> ModelSpec:
    """Return the spec of a transformers config.

    `config` is a mapping with `model_type`, a path, or a hub id. rows: the job's
    `model.vocabulary_size` and `model.vocabulary_multiple`. precision decides if the attention's
    scores count as kept for the backward pass: flash kernels are 16-bit only. dropout: whether the
    model trains with that of its config.

    Raises:
        ConfigError: `config` is no such config, or a token would use more experts than there are.
    """
    loaded = read_config(config, revision)
    check_experts(loaded)
    if rows != (None, 1):
        num_tokens, multiple = rows
        grow_vocabulary(loaded, num_tokens)
        loaded.vocab_size = -(-int(loaded.vocab_size) // multiple) * multiple
    module = _build_on_meta(loaded)
    spec = _spec(name, loaded, module, precision)
    spec = _with_windows(spec, loaded)
    spec = _with_explicit_attention(spec, loaded, dropout)
    family = FAMILIES.get(loaded.model_type)
    drops = False
    if dropout and family is not None:
        # Of a copy, since taking the dropouts sets them to 0 in the config.
        drops = bool(family.take_dropout(copy.copy(loaded)))
    return replace(spec, has_dropout=drops)


def _with_windows(spec: ModelSpec, config: Any) -> ModelSpec:
    """Return the spec with the sliding windows of its blocks, if a stage computes them."""
    if config.model_type not in FAMILIES:
        return spec
    blocks = []
    for layer, block in enumerate(spec.blocks):
        window = window_of(config, layer) or 0
        blocks.append(replace(block, window=window))
    return replace(spec, blocks=tuple(blocks))


def _with_explicit_attention(spec: ModelSpec, config: Any, dropout: bool) -> ModelSpec:
    """Return the spec with the scores of attention that no fused kernel computes."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return spec
    # A sink makes a copy of the scores, as a soft-cap does.
    is_capped = family.attention_softcap(config) is not None or family.has_sinks
    drops = dropout and family.take_dropout(copy.copy(config)).attention > 0
    if not is_capped and not drops:
        return spec
    scores = ExplicitScores.of(spec.num_heads, has_softcap=is_capped, has_dropout=drops)
    blocks = [replace(block, explicit_scores=scores) for block in spec.blocks]
    return replace(spec, blocks=tuple(blocks))


def _build_on_meta(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    _check_decoder(config)
    try:
        with torch.device("meta"):
            builder: Any = AutoModelForCausalLM
            model = builder.from_config(config, trust_remote_code=False)
    except (
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        LookupError,
        ArithmeticError,
        AssertionError,
    ) as error:
        raise ConfigError(
            f"transformers builds no causal language model from this config: {first_line(error)}"
        ) from error
    own_correction_bias(model)
    return model


def _check_decoder(config: Any) -> None:
    """Check that a config is one of a decoder, although the library gives others a causal head.

    A class that was registered with the library counts as a decoder.

    Raises:
        ConfigError: it is not.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    remedy = (
        "only decoders that predict the next token can be planned, such as llama, gpt2, opt or"
        " gpt_neo"
    )
    has_encoder = getattr(config, "is_encoder_decoder", False)
    has_causal_class = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if has_encoder or not has_causal_class:
        raise ConfigError(f"model_type '{kind}' is no decoder-only language model; {remedy}")
    # BERT and its kin have a causal head too, but attend to both sides unless `is_decoder` is set.
    is_masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_masked and getattr(config, "is_decoder", None) is False:
        raise ConfigError(
            f"model_type '{kind}' is an encoder: its tokens see those that follow; {remedy}. As a"
            f" decoder, {kind} takes is_decoder: true in model.config"
        )


def _spec(name: str, config: Any, module: Any, precision: str) -> ModelSpec:
    blocks_name, blocks = _find_blocks(module, config)
    heads = int(_first(config, "num_attention_heads", "n_head", "num_heads", "n_heads"))
    hidden = int(_first(config, "hidden_size", "n_embd", "d_model", "n_embed"))
    kv_heads = _key_value_heads(config, heads)
    widths = _Widths(hidden, heads, kv_heads, _head_size(config, hidden, heads))
    specs = []
    for index, block in enumerate(blocks):
        path = f"{blocks_name}.{index}"
        specs.append(_block_spec(block, path, config, widths, precision))

    family = FAMILIES.get(config.model_type)
    kept = None
    if family is not None and _is_trainable(family, config):
        kept = count_head(config, precision)
        # Blocks of one size are counted once.
        by_size: dict[int, KeptValues] = {}
        for layer, spec in enumerate(specs):
            if spec.parameters not in by_size:
                by_size[spec.parameters] = count_block(config, precision, layer)
        specs = [replace(spec, autograd=by_size[spec.parameters]) for spec in specs]

    tied = _is_tied(module)
    embedding, head = _outside(module, blocks, tied)
    vocab = int(config.vocab_size)
    if family is not None:
        max_tp_degree = family.max_tp_degree(config)
    else:
        max_tp_degree = math.gcd(heads, kv_heads, 8)
    return ModelSpec(
        name=name,
        model_type=str(config.model_type),
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=_widest(blocks[0], hidden),
        tied_embeddings=tied,
        max_tp_degree=max_tp_degree,
        embedding=LayerSpec(
            parameters=embedding,
            replicated_parameters=max(0, embedding - vocab * hidden),
            replicated_activation_values=2.0,
        ),
        blocks=tuple(specs),
        head=LayerSpec(
            parameters=head,
            replicated_parameters=head if tied else max(0, head - vocab * hidden),
            matmul_parameters=vocab * hidden,
            replicated_activation_values=2.0 * hidden,
            autograd=kept,
        ),
    )


def _key_value_heads(config: Any, heads: int) -> int:
    """Return the heads of keys and values; `multi_query` (GPT-BigCode) means one of each."""
    given = getattr(config, "num_key_value_heads", None)
    if given:
        return int(given)
    return 1 if getattr(config, "multi_query", False) else heads


def _head_size(config: Any, hidden: int, heads: int) -> int:
    """Return the width of a head, the mean of queries and values if they differ."""
    if getattr(config, "qk_head_dim", None):
        return (int(config.qk_head_dim) + int(config.v_head_dim)) // 2
    return int(getattr(config, "head_dim", None) or hidden // heads)


def _is_trainable(family: Family, config: Any) -> bool:
    """Return True if the runtime can train the model, so that its blocks can be run and counted.

    A vocabulary smaller than the finest tensor-parallel degree, for example, cannot be cut.
    """
    try:
        family.parameter_specs(config)
    except ConfigError:
        return False
    return True


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    # A model of text and images keeps the sizes of its language model in a config of its own.
    text = getattr(config.get_text_config(), "model_type", None)
    hint = ""
    if text not in (None, config.model_type):
        hint = f"; try its language model alone, model_type {text}"
    raise ConfigError(
        f"the {config.model_type} config has none of {', '.join(names)}; the planner cannot size"
        f" its layers{hint}"
    )


def _find_blocks(module: Any, config: Any) -> tuple[str, list[Any]]:
    from torch.nn import ModuleList

    count = int(_first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers"))
    if count < 1:
        raise ConfigError(f"the {config.model_type} config has {count} layers; it needs at least 1")
    lists = []
    for name, child in module.named_modules():
        if isinstance(child, ModuleList) and len(child) == count:
            lists.append((_num_parameters(child), name, child))
    if not lists:
        raise ConfigError(
            f"the {config.model_type} model has no list of {count} blocks; it cannot be cut into"
            " stages"
        )
    # A list of as many small modules, such as rotary embeddings by layer, is not the blocks.
    _, name, blocks = max(lists, key=lambda item: item[0])
    return name, list(blocks)


def _num_parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_tied(module: Any) -> bool:
    """Return True if the head's weight is the embedding's.

    The config's declaration counts, since the meta device does not tie weights in all models.
    """
    output = module.get_output_embeddings()
    same = output is not None and output.weight is module.get_input_embeddings().weight
    return bool(same or module.config.tie_word_embeddings)


def _outside(module: Any, blocks: list[Any], tied: bool) -> tuple[int, int]:
    """Count the parameters outside the blocks: (embedding, head).

    The embedding counts its tables and their projections, the head the final norm, without a tied
    weight.
    """
    from torch.nn import Embedding

    in_blocks: set[int] = set()
    for block in blocks:
        in_blocks |= _parameter_ids(block)

    tables: set[int] = set()
    for each in module.modules():
        if isinstance(each, Embedding):
            tables |= _parameter_ids(each)

    # A tied head has the embedding's weight and, in some models, a bias of its own.
    output = module.get_output_embeddings()
    shared: set[int] = set()
    if tied and output is not None:
        shared = _parameter_ids(output)
        shared.discard(id(getattr(output, "bias", None)))

    embedding = 0
    head = 0
    for parameter in module.parameters():
        key = id(parameter)
        if key in in_blocks:
            continue
        if key in tables:
            embedding += parameter.numel()
        elif key not in shared:
            head += parameter.numel()
    return embedding, head


def _parameter_ids(module: Any) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


@dataclass(frozen=True)
class _Widths:
    """Widths of a model's attention: hidden size, heads, heads of keys and values, their size."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int


def _block_spec(block: Any, path: str, config: Any, widths: _Widths, precision: str) -> LayerSpec:
    """Return a block's parameters by kind, and the activations kept for the backward pass.

    Activations are counted per token (Korthikanti et al. 2022, section 4.1, without dropout).
    """
    products = []
    for name, parameter in block.named_parameters():
        if parameter.dim() >= 2 and not name.endswith("bias"):
            products.append(_used_per_token(parameter, config))

    # Queries, the attention's output, keys and values.
    attention = (widths.heads * 2 + widths.kv_heads * 2) * widths.head_size

    width = _widest(block, widths.hidden)
    gated = any("gate" in name for name, _ in block.named_modules())
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    experts += int(getattr(config, "n_shared_experts", None) or 0)
    feed_forward = (4 if gated else 2) * width * experts

    key_value_parameters, key_value_units = _key_values(block, config)
    return LayerSpec(
        parameters=_num_parameters(block),
        replicated_parameters=_count_replicated(block, path, config, widths.hidden),
        matmul_parameters=int(sum(products)),
        attention_width=widths.heads * widths.head_size,
        split_activation_values=float(attention + feed_forward),
        replicated_activation_values=4.0 * widths.hidden,
        attention_heads=0 if precision in _FUSED_PRECISIONS else widths.heads,
        key_value_parameters=key_value_parameters,
        key_value_units=key_value_units,
        experts=_experts(block, config),
    )


def _experts(block: Any, config: Any) -> Experts | None:
    """Return the routed experts of a block: its stacks of matrices; None: it has none."""
    stacks = [parameter for parameter in block.parameters() if parameter.dim() > 2]
    number = num_experts(config)
    if not stacks or number is None:
        return None
    routed = _routed_per_token(config)
    has_shared = any("shared_expert" in name for name, _ in block.named_modules())
    parameters = sum(each.numel() for each in stacks)
    return Experts(number, min(routed, number), parameters, has_shared=has_shared)


def _count_replicated(block: Any, path: str, config: Any, hidden: int) -> int:
    """Count the scalars of a block that every tensor-parallel rank holds whole.

    The family's split decides. For unknown families, vectors of the hidden size count.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        vectors = [p.numel() for p in block.parameters() if p.dim() == 1]
        return hidden * vectors.count(hidden)
    total = 0
    for inner, module in block.named_modules(prefix=path):
        for kind, parameter in module.named_parameters(recurse=False):
            if family.split_dim(config, inner, module, kind) is None:
                total += parameter.numel()
    return total


def _key_values(block: Any, config: Any) -> tuple[int, int]:
    """Return `key_value_parameters` and `key_value_units` of a LayerSpec."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return 0, 0
    units = family.key_value_units(config)
    # Cut as finely as all other parameters, they need no count of their own.
    if units == family.max_tp_degree(config):
        return 0, 0
    parameters = 0
    for path, module in block.named_modules():
        if family.is_key_value(f".{path}"):
            parameters += _num_parameters(module)
    return parameters, units


def _used_per_token(parameter: Any, config: Any) -> float:
    """Count the weights of a matrix that one token uses.

    It uses all weights, or, in a stack of experts, those of the experts that it is routed to.
    """
    if parameter.dim() < 3:
        return float(parameter.numel())
    experts = num_experts(config) or parameter.shape[0]
    routed = _routed_per_token(config)
    return float(parameter.numel()) * min(1.0, routed / experts)


def _routed_per_token(config: Any) -> int:
    """Return the experts that a router chooses for a token; 1 if the config does not say."""
    given = getattr(config, "num_experts_per_tok", None)
    return given if isinstance(given, int) else 1


def _widest(block: Any, hidden: int) -> int:
    """Return the feed-forward's inner width; of experts, that of one.

    It is the largest side of a matrix whose other side is the hidden size, with fused pairs halved.
    """
    stacks = [parameter.shape[-2:] for parameter in block.parameters() if parameter.dim() == 3]
    if stacks:
        # One stack holds gate above up; that of down is half as wide, and has the inner width.
        return int(min(math.prod(sides) // hidden for sides in stacks))
    sizes = []
    for name, parameter in block.named_parameters():
        is_attention = "attn" in name or "attention" in name
        if parameter.dim() >= 2 and not is_attention:
            sizes.append(max(parameter.shape[-2:]))
    return int(max(sizes, default=4 * hidden))
