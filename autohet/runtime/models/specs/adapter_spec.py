"""Changes that an adapter makes to a model spec: trained and frozen parameters, backward FLOPs.

With frozen weights a backward pass computes the gradients of inputs alone. Take a layer whose
weights need M FLOPs a token in the forward pass, its attention A and its adapters L. Its backward
pass then needs M + 2 A + 2 L, instead of 2 (M + A + L) with all weights trained.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedConfig

from autohet.runtime.models.layers.adapters import B_SUFFIX, is_adapter
from autohet.runtime.models.parameter_spec import EMBEDDING, HEAD, ParameterSpec
from autohet.runtime.models.quantized.weight import held_as
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.specs.counted_values import count_block
from planner.plans.model_spec import KeptValues, LayerSpec, ModelSpec, Quantized


def adapt_spec(
    spec: ModelSpec, config: PreTrainedConfig, sequence_length: int, precision: str
) -> ModelSpec:
    """Return the spec of a model with the config's adapter, given the spec of the whole model."""
    family = family_of(config)
    by_layer: dict[int, list[ParameterSpec]] = {}
    quantized_by_layer: dict[int, list[ParameterSpec]] = {}
    for each in family.parameter_specs(config).values():
        if each.trainable:
            by_layer.setdefault(each.layer, []).append(each)
        elif each.base_format is not None:
            quantized_by_layer.setdefault(each.layer, []).append(each)
    blocks = []
    known: dict[object, KeptValues] = {}
    for index, block in enumerate(spec.blocks):
        specs = by_layer[index]
        # Blocks of equal shapes keep equally many values, which take a while to count.
        kind = block.parameters, tuple(each.shape for each in specs)
        if kind not in known:
            known[kind] = _kept(config, precision, index, specs)
        key_values = []
        for each in specs:
            module_path = each.name.removesuffix(B_SUFFIX)
            if family.is_key_value(module_path):
                key_values.append(each)
        used = _used_scalars(config, specs)
        adapted = _adapt_block(block, specs, key_values, used, sequence_length)
        quantized = _quantized(quantized_by_layer.get(index, []))
        blocks.append(replace(adapted, autograd=known[kind], quantized=quantized))
    embedding = _adapt_end(spec.embedding, by_layer.get(EMBEDDING, []))
    head = _adapt_end(spec.head, by_layer.get(HEAD, []))
    if family.tied_head(config) and embedding.frozen_parameters == 0:
        head = spec.head
    if not by_layer.get(EMBEDDING):
        # A backward pass ends before the embedding.
        embedding = replace(embedding, backward_share=0.0)
    return replace(
        spec, embedding=embedding, blocks=tuple(blocks), head=head, frozen_format=precision
    )


def _adapt_end(layer: LayerSpec, trained: Sequence[ParameterSpec]) -> LayerSpec:
    """Return the spec of embedding or head, of which these parameters are trained."""
    added = _scalars(trained)
    if any(not is_adapter(each.name) and len(each.shape) > 1 for each in trained):
        # The matrix itself is trained, and all but vectors with it.
        return layer
    replicated = _scalars([each for each in trained if each.split_dim is None])
    frozen = _frozen(layer)
    # Of a frozen head a backward pass needs the input's gradient alone.
    return replace(frozen, parameters=added, replicated_parameters=replicated, backward_share=0.5)


def _frozen(layer: LayerSpec) -> LayerSpec:
    return replace(
        layer,
        parameters=0,
        replicated_parameters=0,
        key_value_parameters=0,
        frozen_parameters=layer.parameters,
        frozen_replicated_parameters=layer.replicated_parameters,
        frozen_key_value_parameters=layer.key_value_parameters,
    )


def _adapt_block(
    block: LayerSpec,
    trained: Sequence[ParameterSpec],
    key_values: Sequence[ParameterSpec],
    used: float,
    sequence_length: int,
) -> LayerSpec:
    """Return a block's spec with frozen weights and trained adapters.

    trained: the block's adapters. key_values: those of them that are B of keys or values. used:
    scalars of the adapters that a token is multiplied with.
    """
    added = _scalars(trained)
    replicated = [each for each in trained if each.split_dim is None]
    weights = 2.0 * block.matmul_parameters * sequence_length
    attention = block.score_flops(sequence_length)
    updates = 2.0 * used * sequence_length
    backward = weights + 2.0 * (attention + updates)
    return replace(
        _frozen(block),
        parameters=added,
        replicated_parameters=_scalars(replicated),
        key_value_parameters=_scalars(key_values) if block.key_value_units else 0,
        matmul_parameters=block.matmul_parameters + round(used),
        backward_share=backward / (2.0 * (weights + attention + updates)),
    )


def _quantized(specs: Sequence[ParameterSpec]) -> Quantized | None:
    """Return what a block has in fewer bits; None: nothing."""
    if not specs:
        return None
    whole = [each for each in specs if each.split_dim is None]
    largest = max(math.prod(each.shape) for each in specs)
    num_bytes = 0
    for part in [part for each in specs for part in held_as(each)]:
        assert part.held_dtype is not None
        num_bytes += math.prod(part.shape) * part.held_dtype.itemsize
    total = _scalars(specs)
    return Quantized(total, _scalars(whole), largest, num_bytes / total)


def _scalars(specs: Sequence[ParameterSpec]) -> int:
    return sum(math.prod(each.shape) for each in specs)


def _used_scalars(config: PreTrainedConfig, trained: Sequence[ParameterSpec]) -> float:
    """Return how many scalars of a block's adapters a token is multiplied with."""
    total = 0.0
    for each in trained:
        # Of a stack, those of the token's experts.
        experts = each.shape[0] if is_adapter(each.name) and len(each.shape) == 3 else None
        share = 1.0 if experts is None else config.num_experts_per_tok / experts
        total += share * math.prod(each.shape)
    return total


def _kept(
    config: PreTrainedConfig, precision: str, layer: int, trained: Sequence[ParameterSpec]
) -> KeptValues:
    """Count the values that autograd keeps of a block with adapters.

    In a backward pass the scaled gradient of the widest update is alive, too.
    """
    counted = count_block(config, precision, layer)
    outputs = [0]
    for each in trained:
        if each.name.endswith(B_SUFFIX):
            *stacked, width, _ = each.shape
            outputs.append(width * (config.num_experts_per_tok if stacked else 1))
    return replace(counted, backward=counted.backward + max(outputs))
