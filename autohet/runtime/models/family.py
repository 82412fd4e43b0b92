"""Description of a decoder family: the paths of its parts, and the dimension to cut each parameter.

A family is data about the library's own modules (transformers); no model code is rewritten here.
"""

import fnmatch
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autohet.runtime.models.decoder_check import check_decoder
from autohet.runtime.models.layers.adapters import (
    A_SUFFIX,
    B_SUFFIX,
    EMBEDDING_A,
    EMBEDDING_B,
    Adapter,
    adapter_of,
    check_ends,
    is_linear,
    module_of,
    target_ranks,
)
from autohet.runtime.models.layers.dropout import ModelDropout
from autohet.runtime.models.layers.experts import (
    CORRECTION_BIAS,
    EXPERTS,
    SHARED_COLUMN,
    SHARED_ROW,
    ExpertNames,
    num_experts,
)
from autohet.runtime.models.layers.logits import LogitAdjustment, adjustment_of
from autohet.runtime.models.parameter_spec import (
    EMBEDDING,
    HEAD,
    MUON,
    PADDED,
    ParameterSpec,
    is_norm_or_bias,
    match_parameters,
)
from autohet.runtime.models.skeleton import skeleton
from planner.errors import ConfigError
from planner.plans.model_spec import limit_of_parts
from planner.plans.plan import FINEST_TP_DEGREE, TensorShare

COMPUTE_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Dtypes of compute weights and hidden states, by the format of products.

Products in fp8 take their factors from bf16 and return to it.
"""
COLUMN = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", SHARED_COLUMN)
ROW = ("rowwise", "rowwise_split_input", SHARED_ROW)
PARTIAL = ("replicated_with_grad_allreduce",)
SPLIT_NORM = "split_norm"
"""Style of a norm over all heads of a cut projection (OLMo 2's of query and key)."""
SPLIT_HEADS = "split_heads"
"""Style of an attention module with a parameter of its own that has a number for each head."""
WHOLE = "whole"
"""Style of a map that every rank of a group computes whole, although the library cuts it."""
WHOLE_MIXER = "whole_mixer"
"""Style of a module that mixes tokens, all of whose maps are whole."""
PackedSizes = Callable[[PreTrainedConfig], tuple[int, ...]]
"""Function that returns the widths of the parts of a fused projection, in their order."""


ATTENTION = "attention weights"
EMBEDDED = "embedding"
"""Places of dropout that are no linear map (`Family.dropouts`)."""
UNREAD_DROPOUTS = frozenset({"classifier_dropout", "summary_first_dropout", "summary_last_dropout"})
"""Keys of heads that no causal language model has."""


@dataclass(frozen=True, eq=False)
class Family:
    """Module paths of a decoder in the library's model.

    `tp_plan` maps path patterns to styles; None selects the library's own plan.
    """

    model_type: str
    base: str = "model"
    layers: str = "model.layers"
    token_embedding: str = "model.embed_tokens"
    position_embedding: str | None = None
    rotary: str | None = "model.rotary_emb"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    tp_plan: Mapping[str, str] | None = None
    changed_styles: Mapping[str, str] = field(default_factory=dict)
    """Styles by path pattern below `base`, which replace those of the library.

    Example: `packed_colwise` for a fused projection, which the library computes whole on every
    rank.
    """
    packed: Mapping[str, PackedSizes] = field(default_factory=dict)
    """Functions for the widths of fused projections, by the end of the projection's path."""
    shares_key_heads: bool = True
    """True if several ranks may hold one key-value head, each for its own query heads."""
    key_value_projections: tuple[str, ...] = ("self_attn.k_proj", "self_attn.v_proj")
    """Path patterns inside a block; empty if query, key and value are packed."""
    attention: str = "self_attn"
    """Path of the attention module inside a block."""
    dropouts: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"attention_dropout": (ATTENTION,)}
    )
    """Places of each dropout key of the config.

    A place is ATTENTION (the attention weights), EMBEDDED (the embedding's output), or the end of
    the path of a linear map inside a block, whose output is dropped. No place: the library's
    modules do not read the key.
    """
    embedding_scale: Callable[[PreTrainedConfig, torch.dtype], float] | None = None
    """Factor of the embedding's output, in the precision of the compute format.

    None: the factor of the library's own table, or the config's `embedding_multiplier`.
    """
    logit_adjustment: Callable[[PreTrainedConfig], LogitAdjustment] = adjustment_of
    """Adjustment of the head's output before the loss."""
    attention_softcap: Callable[[PreTrainedConfig], float | None] = lambda config: getattr(
        config, "attn_logit_softcapping", None
    )
    """Soft-cap of the attention's scores."""
    has_sinks: bool = False
    """True if attention has a learned sink in each head, which torch's fused kernels have not."""
    config_keys: frozenset[str] = frozenset()
    """Config keys that decide the model's mathematics; dropouts are among them.

    Any other key of the config's class is refused if it is not at its default. Empty: nothing is
    known of its keys, so unknown ones are only logged.
    """
    example: Mapping[str, Any] | None = None
    """Config of a tiny model with every special field at a value that shows.

    Every parity test runs for it.
    """
    check: Callable[[PreTrainedConfig], None] = lambda _: None
    """Check of the config's values; raises ConfigError."""
    expert_names: ExpertNames | None = None
    """Names of experts in checkpoint files; None: all blocks are dense."""
    stock_attention: str = "sdpa"
    """Attention implementation of the library that computes the same result."""
    changes_products: Callable[[PreTrainedConfig], bool] = lambda config: (
        getattr(config, "clip_qkv", None) is not None
    )
    """True if modules change outputs of matrix products in place, so that none can be kept alone.

    OLMo's `clip_qkv` clamps projections in place.
    """
    loops_over_own_experts: bool = True
    """True if the library's loop over experts also computes a rank's own experts alone."""
    divide_attention: Callable[[nn.Module, TensorShare], None] | None = None
    """Function that sets an attention module's numbers of heads to those of a rank's share.

    Only for modules whose forward pass reads these numbers.
    """

    @property
    def has_experts(self) -> bool:
        """True if blocks may be mixtures of experts."""
        return self.expert_names is not None

    @property
    def parts_beside_blocks(self) -> list[str]:
        """Paths of embedding, final norm and head, and of those optional parts that it has."""
        parts = [self.token_embedding, self.final_norm, self.head]
        return parts + [part for part in (self.position_embedding, self.rotary) if part]

    def num_layers(self, config: PreTrainedConfig) -> int:
        return int(config.num_hidden_layers)

    def style(self, config: PreTrainedConfig, module_path: str) -> str | None:
        """Return the style of the module's split in a tensor-parallel group; None: replicated."""
        if module_path in (self.token_embedding, self.head):
            return "vocabulary"
        for pattern, style in self._styles(config).items():
            if fnmatch.fnmatchcase(module_path, pattern):
                return style
        return None

    def _styles(self, config: PreTrainedConfig) -> Mapping[str, str]:
        """Return the styles of modules by path pattern; the first pattern that fits counts."""
        if self.tp_plan:
            return self.tp_plan
        below_base = {**(config.base_model_tp_plan or {}), **self.changed_styles}
        return {f"{self.base}.{pattern}": style for pattern, style in below_base.items()}

    def split_dim(
        self, config: PreTrainedConfig, module_path: str, module: nn.Module, kind: str
    ) -> int | None:
        """Return the dimension along which tensor parallelism cuts a module's parameter.

        `kind`: "weight" or "bias". None: every rank has the whole parameter.
        """
        return _split_dim(self.style(config, module_path), module, kind)

    def max_tp_degree(self, config: PreTrainedConfig) -> int:
        """Return the finest TP degree.

        It is the largest power of two, at most 8, that divides the attention heads, and that
        divides the key-value heads or is a multiple of them. It is at most the number of experts.
        """
        return self._finest_of_heads(config, num_experts(config) or FINEST_TP_DEGREE)

    def limit_of_parts(self, config: PreTrainedConfig) -> str:
        """Return what limits the number of parts, as a noun: `6 experts` or `heads`."""
        heads = int(config.num_attention_heads)
        experts = num_experts(config) or 0
        return limit_of_parts(heads, experts, self.max_tp_degree(config))

    def _finest_of_heads(self, config: PreTrainedConfig, most: int) -> int:
        """Return the finest TP degree of at most `most` parts that the heads allow."""
        finest = math.gcd(int(config.num_attention_heads), FINEST_TP_DEGREE)
        while finest > most:
            finest //= 2
        kv_heads = self._kv_heads(config)
        if finest % kv_heads or not self.shares_key_heads:
            return math.gcd(finest, kv_heads)
        return finest

    def key_value_units(self, config: PreTrainedConfig) -> int:
        """Return the number of units into which keys and values are cut.

        It is that of all other parameters, or the number of key-value heads if that is smaller.
        """
        return math.gcd(self.max_tp_degree(config), self._kv_heads(config))

    def _kv_heads(self, config: PreTrainedConfig) -> int:
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    def is_key_value(self, module_path: str) -> bool:
        """Return True if the module computes only keys or only values."""
        return any(module_path.endswith(f".{each}") for each in self.key_value_projections)

    def packed_sizes(self, config: PreTrainedConfig, module_path: str) -> tuple[int, ...] | None:
        """Return the widths of the parts of a fused projection; None: the module has one part."""
        for end, sizes in self.packed.items():
            if module_path.endswith(f".{end}"):
                return sizes(config)
        return None

    def layer_of(self, name: str) -> int:
        """Return the block that a parameter belongs to, or EMBEDDING or HEAD."""
        prefix = f"{self.layers}."
        if name.startswith(prefix):
            index, _, _ = name.removeprefix(prefix).partition(".")
            return int(index)
        for path in (self.token_embedding, self.position_embedding):
            if path and name.startswith(f"{path}."):
                return EMBEDDING
        return HEAD

    def vocabulary_parameters(self) -> frozenset[str]:
        """Return the names of the parameters with a row for each token."""
        return frozenset(f"{path}.weight" for path in (self.token_embedding, self.head))

    def token_dims(self) -> dict[str, int]:
        """Return the dimension of the tokens of each parameter that has one, of adapters too."""
        dims = dict.fromkeys(self.vocabulary_parameters(), 0)
        return dims | {f"{self.head}{B_SUFFIX}": 0, f"{self.token_embedding}{EMBEDDING_A}": 1}

    def parameter_specs(self, config: PreTrainedConfig) -> dict[str, ParameterSpec]:
        """Return the spec of every parameter of the whole model, by its name in a checkpoint.

        A tied head is listed once.
        """
        document = {**config.to_dict(), "model_type": config.model_type}
        return dict(_parameter_specs(self, json.dumps(document, sort_keys=True, default=str)))

    def adapter_ranks(self, adapter: Adapter, model: PreTrainedModel) -> dict[str, int]:
        """Return the rank of each weight's update (`target_ranks`) in the library's model."""
        return target_ranks(adapter, model, self.layers, self.expert_names)

    def tied_head(self, config: PreTrainedConfig) -> bool:
        return bool(config.tie_word_embeddings)

    def take_dropout(self, config: PreTrainedConfig) -> ModelDropout:
        """Return the config's dropouts, and set the config's own keys to 0.

        The library's modules then drop nothing: their bits would depend on the plan.

        Raises:
            ConfigError: a value is no probability, or no place of a key is known.
        """
        _check_dropout_keys(self, config)
        rates: dict[str, float] = {}
        for key, places in self.dropouts.items():
            rate = float(getattr(config, key, 0.0) or 0.0)
            if not 0 <= rate < 1:
                raise ConfigError(
                    f"model.config: {key} is {rate}, but must be at least 0 and less than 1"
                )
            if rate:
                setattr(config, key, 0.0)
                rates |= dict.fromkeys(places, rate)
        attention = rates.pop(ATTENTION, 0.0)
        embedding = rates.pop(EMBEDDED, 0.0)
        return ModelDropout(attention, embedding, rates)


def _check_dropout_keys(family: Family, config: PreTrainedConfig) -> None:
    """Raise ConfigError if dropouts of the config have no known place in the model."""
    unplaced: dict[str, float] = {}
    for key, value in sorted(config.to_dict().items()):
        is_dropout = key.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate"))
        is_rate = isinstance(value, int | float) and value > 0
        is_known = key in family.dropouts or key in UNREAD_DROPOUTS
        if is_dropout and is_rate and not is_known:
            unplaced[key] = value
    if not unplaced:
        return
    rates = [f"{key} of {config.model_type} is {value}" for key, value in unplaced.items()]
    it, its, drops = (
        ("it", "its", "it drops") if len(rates) == 1 else ("them", "their", "they drop")
    )
    raise ConfigError(
        f"model.config: {', '.join(rates)}, but the family does not say what {drops}; set {it} to"
        f" 0, or name {its} places in the family's dropouts"
    )


@functools.lru_cache(maxsize=8)
def _parameter_specs(family: Family, config_key: str) -> tuple[tuple[str, ParameterSpec], ...]:
    from transformers import AutoConfig

    document: dict[str, Any] = json.loads(config_key)
    config = AutoConfig.for_model(document.pop("model_type"), **document)
    model = skeleton(config)
    paths = [path for path, _ in model.named_modules()]
    stacks = {path for path in paths if family.style(config, path) == EXPERTS}
    known_stacks = stacks if stacks or family.has_experts else None
    check_decoder(config, model, family.layers, family.parts_beside_blocks, known_stacks)
    finest = family.max_tp_degree(config)
    specs = []
    for path, module in model.named_modules():
        if path == family.head and family.tied_head(config):
            continue
        for kind, _ in module.named_parameters(recurse=False):
            spec = _spec(family, config, path, module, kind, finest)
            specs.append((spec.name, spec))
    adapter = adapter_of(config)
    if adapter is not None:
        specs = list(_adapted_specs(family, adapter, model, specs))
    exempt: Sequence[str] | None = getattr(config, MUON, None)
    if exempt is None:
        return tuple(specs)
    return tuple(_with_muon(dict(specs), tuple(f"{path}." for path in stacks), exempt))


def _with_muon(
    specs: Mapping[str, ParameterSpec], stacks: tuple[str, ...], exempt: Sequence[str]
) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield the specs, with those marked that Muon updates.

    They are the trained matrices of blocks and of each expert; neither norms and biases nor what
    matches a pattern of `exempt`. stacks: beginnings of the names of stacks.
    """
    by_adamw = match_parameters("training.muon_exempt", exempt, specs)
    for name, spec in specs.items():
        num_dims = 3 if name.startswith(stacks) else 2
        is_matrix = spec.layer >= 0 and len(spec.shape) == num_dims and not spec.is_norm_or_bias
        yield name, replace(spec, uses_muon=is_matrix and spec.trainable and name not in by_adamw)


def _adapted_specs(
    family: Family,
    adapter: Adapter,
    model: PreTrainedModel,
    specs: Sequence[tuple[str, ParameterSpec]],
) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield the specs of a frozen model, and after each adapted weight those of its matrices."""
    ranks = family.adapter_ranks(adapter, model)
    check_ends(adapter, ranks, model)
    for name, spec in specs:
        # Routers' biases are buffers of the library, which peft trains in no module.
        is_trained = adapter.saves(name) and not spec.is_token_count
        path = name.removesuffix(".weight")
        spec = replace(spec, trainable=is_trained)
        if not is_trained and adapter.base_format and _is_map(spec, model, adapter.base_format):
            spec = replace(spec, base_format=adapter.base_format)
        yield name, spec
        if path not in ranks:
            continue
        module = module_of(path, model)
        if isinstance(module, nn.Embedding):
            matrices = _embedding_specs(spec, path, ranks[path])
        else:
            is_transposed = getattr(module, "is_transposed", isinstance(module, Conv1D))
            matrices = _low_rank_specs(spec, path, ranks[path], is_transposed)
        for each in matrices:
            yield each.name, each


def _is_map(spec: ParameterSpec, model: PreTrainedModel, base_format: str) -> bool:
    """Return True for the weight of a linear map of a block, which a quantized base has so.

    Raises:
        ConfigError: the map's weight is transposed.
    """
    path, _, kind = spec.name.rpartition(".")
    module = model.get_submodule(path)
    if spec.layer < 0 or kind != "weight" or not is_linear(module):
        return False
    if isinstance(module, Conv1D):
        raise ConfigError(
            f"model.adapter.base is {base_format}, which quantizes weights (out, in), but"
            f" {spec.name} is one (in, out); leave base out"
        )
    return True


def _embedding_specs(
    spec: ParameterSpec, path: str, rank: int
) -> tuple[ParameterSpec, ParameterSpec]:
    """Return the specs of A [rank, tokens], cut as the embedding's rows, and B [hidden, rank]."""
    tokens, hidden = spec.shape
    a = ParameterSpec(f"{path}{EMBEDDING_A}", (rank, tokens), spec.layer, 1, spec.cuts)
    b = ParameterSpec(f"{path}{EMBEDDING_B}", (hidden, rank), spec.layer, partial_gradient=True)
    return a, b


def _low_rank_specs(
    spec: ParameterSpec, path: str, rank: int, is_transposed: bool
) -> tuple[ParameterSpec, ParameterSpec]:
    """Return the specs of A [rank, in] and B [out, rank], cut as the weight's input and output.

    Those of a stack have a first dimension of experts, by which they are cut.
    """
    *stacked, output, inputs = range(len(spec.shape))
    if is_transposed:
        output, inputs = inputs, output
    first = tuple(spec.shape[each] for each in stacked)
    a = ParameterSpec(f"{path}{A_SUFFIX}", (*first, rank, spec.shape[inputs]), spec.layer)
    b = ParameterSpec(f"{path}{B_SUFFIX}", (*first, spec.shape[output], rank), spec.layer)
    if stacked:
        a = replace(a, split_dim=spec.split_dim, cuts=spec.cuts)
        return a, replace(b, split_dim=spec.split_dim, cuts=spec.cuts)
    if spec.split_dim == output:
        cut = replace(b, split_dim=0, cuts=spec.cuts, groups=spec.groups)
        return replace(a, partial_gradient=True), cut
    if spec.split_dim == inputs:
        cut = replace(a, split_dim=1, cuts=spec.cuts, groups=spec.groups)
        return cut, replace(b, partial_gradient=True)
    partial = spec.partial_gradient
    return replace(a, partial_gradient=partial), replace(b, partial_gradient=partial)


def _spec(
    family: Family,
    config: PreTrainedConfig,
    path: str,
    module: nn.Module,
    kind: str,
    finest: int,
) -> ParameterSpec:
    """Return the spec of the parameter `kind` of the module at `path`.

    finest: the most ranks among which the model can be cut.
    """
    name = f"{path}.{kind}"
    shape = tuple(module.get_parameter(kind).shape)
    style = family.style(config, path)
    if style == "vocabulary":
        num_rows = int(getattr(config, PADDED, shape[0]))
        shape = (num_rows, *shape[1:])
    layer = family.layer_of(name)
    split_dim = family.split_dim(config, path, module, kind)
    exempt = is_norm_or_bias(module, name)
    if split_dim is None:
        return ParameterSpec(
            name,
            shape,
            layer,
            partial_gradient=style in PARTIAL,
            is_norm_or_bias=exempt,
            is_token_count=kind == CORRECTION_BIAS,
        )
    sizes = family.packed_sizes(config, path) or (shape[split_dim],)
    if family.is_key_value(path):
        finest = family.key_value_units(config)
    cuts = _cuts(sizes, finest, name)
    assert cuts[-1] == shape[split_dim], f"{name}: parts of {sizes} in {shape[split_dim]} rows"
    return ParameterSpec(name, shape, layer, split_dim, cuts, len(sizes), is_norm_or_bias=exempt)


def _split_dim(style: str | None, module: nn.Module, kind: str) -> int | None:
    """Return the dimension along which a parameter of a module of this style is cut.

    Linear stores (out, in), Conv1D (in, out).
    """
    if style in (None, WHOLE, WHOLE_MIXER, *PARTIAL):
        return None
    output, inputs = (1, 0) if isinstance(module, Conv1D) else (0, 1)
    if style in ("vocabulary", SPLIT_NORM, SPLIT_HEADS, EXPERTS):
        return 0
    if style in COLUMN:
        return output if kind == "weight" else 0
    if style in ROW:
        return inputs if kind == "weight" else None
    raise ConfigError(
        f"the model splits a module in style '{style}', which this version does not know"
    )


def _cuts(sizes: Sequence[int], finest: int, name: str) -> tuple[int, ...]:
    """Return the unit boundaries of parts of these sizes; all parts have equally many units."""
    if min(sizes) < finest:
        raise ConfigError(
            f"{name} has only {min(sizes)} rows to cut, fewer than the finest tensor-parallel"
            f" degree, {finest}"
        )
    cuts = [0]
    start = 0
    for size in sizes:
        cuts += [start + unit * size // finest for unit in range(1, finest + 1)]
        start += size
    return tuple(cuts)
