"""Bytes that a worker needs.

    state * parameters + in_flight * activations + peak + borders + communicators + context

State: 16 bytes a parameter in fp32 (weight, gradient, two moments), 18 in bf16, fp16 and fp8. With
ZeRO-1 over |H| holders, 12 bytes of master and moments become 12 / |H|: 6 + 12 / |H| in 16 bits,
and 8 + 12 / |H| in fp32, where the weights to compute with are then no longer the masters. A frozen
weight has its stored bytes and, in a stage of another format, a copy; one in fewer bits has its
codes and scales, and at the peak one weight of a block is dequantized. Peak: logits and their
gradient, or the gradients alive together in a block's backward with what it computes again, and one
microbatch's gradient of the largest weight. Real steps of five families are met within 10% for
every worker (`tests/runtime/test_plan_memory.py`).

Activations per layer: Korthikanti et al., "Reducing activation recomputation in large transformer
models" (2022), section 4, as scalars per token in the model spec, split or not by tensor
parallelism, with the S x S scores if attention is not fused.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from planner.arrays import Floats
from planner.cost.parameters import CostParameters
from planner.plans.model_spec import EXPLICIT_SCORES, LayerSpec, ModelSpec
from planner.plans.muon import MUON_STATE_BYTES, WORKSPACE_BYTES
from planner.plans.plan import Recompute

FP32_BYTES = 4
# Compute copy (its own only beside a 16-bit one), fp32 master, fp32 gradient and the two moments of
# AdamW. Products in fp8 cast copies that are in bf16.
STATE_BYTES = {
    "fp32": 4 + 4 + 8,
    "tf32": 4 + 4 + 8,
    "bf16": 2 + 4 + 4 + 8,
    "fp16": 2 + 4 + 4 + 8,
    "fp8": 2 + 4 + 4 + 8,
}
# What ZeRO-1 shares out of that: master and moments (Rajbhandari et al. 2020, section 5.1), and
# what it adds: the compute copy, which in fp32 is the master itself where a worker keeps it whole.
OPTIMIZER_BYTES = 12
COPY_BYTES = {"fp32": 4, "tf32": 4, "bf16": 0, "fp16": 0, "fp8": 0}
SELECTIVE_SHARE = 0.6
"""Share of a block's split activations that `selective` keeps, where its modules are not known.

Of Llama's and GPT-2's it keeps 0.56 and 0.5.
"""
LARGEST_OF_BLOCK = 1 / 3
"""Share of a block's weights in its largest: an MLP matrix of GPT-2; Llama's are a quarter."""
LARGEST_OF_EXPERTS = 2 / 3
"""The same in a block with experts: the stack of gate and up of all experts."""
FLAT_BYTES = 4
"""Bytes of a parameter in a flat fp32 buffer for the gradients' all-reduce."""
VALUE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
WEIGHT_FORMATS = {"tf32": "fp32", "fp8": "bf16"}
"""Format of weights by that of products, where they differ."""


@dataclass(frozen=True, slots=True)
class TokensOnRank:
    """Tokens of one microbatch on one rank of a tensor-parallel group.

    dtype: format in which the rank computes. tp_degree: for uneven shares one over the rank's.
    """

    tokens: int
    sequence_length: int
    dtype: str
    tp_degree: float

    @property
    def value_bytes(self) -> int:
        """Bytes of one value."""
        return VALUE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Bytes a worker of every layer.

    Arrays (num_layers + 2,): embedding, blocks, head.

    state_bytes: held all step long. optimizer_bytes: the part of it that holders of a layer may
    share out (masters and moments). copy_bytes: what they need in addition if they do: weights to
    compute with, if these are the masters. host_bytes: masters and moments in host memory, which
    are in none of the other fields. activation_bytes: kept for each microbatch in flight.
    peak_bytes: extra while the layer runs (logits and their gradient; recomputed activations of one
    block; a weight's gradient of one microbatch) or Muon updates its largest matrix. matrix_bytes:
    what holders share out of Muon's matrices beside masters and momenta: gradients of parts that
    other ranks compute with; negative for weights that are copies only where another owns them.
    """

    state_bytes: Floats
    optimizer_bytes: Floats
    copy_bytes: Floats
    activation_bytes: Floats
    peak_bytes: Floats
    host_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    matrix_bytes: Floats = field(default_factory=lambda: np.zeros(1))

    def saved_bytes(self, holders: int) -> Floats:
        """Return bytes of each layer that a worker saves if `holders` share out optimizer state.

        Zero if there is one holder.
        """
        saved = (1.0 - 1.0 / holders) * (self.optimizer_bytes + self.matrix_bytes)
        if holders > 1:
            saved -= self.copy_bytes
        return saved

    def share_out(self, holders: int) -> "MemoryTerms":
        """Return the terms with optimizer state shared out among `holders`."""
        return replace(self, state_bytes=self.state_bytes - self.saved_bytes(holders))

    def offload(self) -> "MemoryTerms":
        """Return the bytes with masters and moments in host memory.

        The device has gradients and compute weights, whatever the number of workers that share the
        state out.
        """
        nothing = np.zeros_like(self.optimizer_bytes)
        return replace(
            self,
            state_bytes=self.state_bytes - self.optimizer_bytes + self.copy_bytes,
            optimizer_bytes=nothing,
            copy_bytes=nothing,
            host_bytes=self.optimizer_bytes,
        )


def memory_terms(
    spec: ModelSpec, on_rank: TokensOnRank, recompute: Recompute, parameters: CostParameters
) -> MemoryTerms:
    """Return the terms of every layer with such microbatches.

    Optimizer state is whole on each worker.
    """
    dtype = on_rank.dtype
    tp_degree = on_rank.tp_degree
    layers = spec.layers
    scalars = np.array([layer.parameters_per_worker(tp_degree) for layer in layers])
    frozen = np.array([layer.frozen_per_worker(tp_degree) for layer in layers])
    quantized = np.array([layer.quantized_per_worker(tp_degree) for layer in layers])
    if spec.tied_embeddings:
        scalars[-1] += spec.tied_parameters / tp_degree
        frozen[-1] += spec.frozen_tied_parameters / tp_degree

    kept, peak = _activations(spec, on_rank, recompute, parameters)
    if parameters.fused_head_elements is None:
        peak[-1] = logits_bytes(spec, on_rank.tokens, tp_degree, dtype, parameters)
    else:
        # A fused head has its gradients at the end of its forward: what it keeps is gone before any
        # block's backward. It has one microbatch at a time: a last stage keeps one in flight
        # (`planner.plans.plan.check_plan`), however many earlier ones do.
        elements = parameters.fused_head_elements
        peak[-1] = fused_head_bytes(spec, on_rank.tokens, dtype, elements, tp_degree) + kept[-1]
        kept[-1] = 0.0
    largest = np.array(_largest_tensors(spec)) / tp_degree
    dequantized = np.array([each.quantized.largest if each.quantized else 0 for each in layers])
    peak += (largest + dequantized / tp_degree) * VALUE_BYTES[dtype]
    if _sums_chunks(spec, on_rank, parameters):
        peak[-1] += largest[-1] * FP32_BYTES

    per_parameter = parameters.state_bytes_per_parameter or _state_bytes(dtype, parameters)
    may_share = OPTIMIZER_BYTES
    if parameters.half_gradients and dtype == "fp16":
        # each holder has an fp32 copy of the gradients of its own part alone
        may_share += FLAT_BYTES
    held = np.array([layer.quantized_bytes_per_worker(tp_degree) for layer in layers])
    frozen_bytes = (frozen - quantized) * _frozen_bytes(spec, dtype) + held
    terms = MemoryTerms(
        state_bytes=scalars * per_parameter + frozen_bytes,
        optimizer_bytes=scalars * min(may_share, per_parameter),
        copy_bytes=scalars * COPY_BYTES[dtype],
        activation_bytes=kept,
        peak_bytes=peak,
    )
    return _with_muon(terms, spec, on_rank) if spec.uses_muon else terms


def optimizer_bytes_each(spec: ModelSpec) -> float:
    """Return bytes of master and moments of a trained parameter, in the mean."""
    by_muon = sum(block.matrices.parameters for block in spec.blocks if block.matrices)
    saved_bytes = (OPTIMIZER_BYTES - MUON_STATE_BYTES) * by_muon
    return OPTIMIZER_BYTES - saved_bytes / max(1, spec.parameters)


def _with_muon(terms: MemoryTerms, spec: ModelSpec, on_rank: TokensOnRank) -> MemoryTerms:
    """Return the terms with one moment of matrices, each whole on one rank."""
    tp_degree = on_rank.tp_degree
    held = np.zeros(len(spec.layers))
    owned = np.zeros(len(spec.layers))
    workspace = np.zeros(len(spec.layers))
    for entry, layer in enumerate(spec.layers):
        if layer.matrices is not None:
            beside = layer.parameters - layer.matrices.parameters
            held[entry] = layer.parameters_per_worker(tp_degree) - beside
            owned[entry] = layer.matrices.parameters / tp_degree
            workspace[entry] = WORKSPACE_BYTES * layer.matrices.largest
    # A rank of several computes with copies of its part; alone in its stage with its own masters.
    copies = COPY_BYTES[on_rank.dtype] * held
    sums = FLAT_BYTES * owned * (1.0 - 1.0 / tp_degree)
    is_cut = tp_degree > 1
    optimizer = terms.optimizer_bytes - OPTIMIZER_BYTES * held + MUON_STATE_BYTES * owned
    return replace(
        terms,
        state_bytes=terms.state_bytes - terms.optimizer_bytes + optimizer + is_cut * copies + sums,
        optimizer_bytes=optimizer,
        copy_bytes=terms.copy_bytes - copies,
        matrix_bytes=sums if is_cut else -copies,
        peak_bytes=np.maximum(terms.peak_bytes, workspace),
    )


def _state_bytes(dtype: str, parameters: CostParameters) -> int:
    """Bytes of state of a parameter by the precision's rule.

    Gradients in fp16 alone have an fp32 copy while the optimizer runs, of what a worker updates.
    """
    if parameters.half_gradients and dtype == "fp16":
        return STATE_BYTES[dtype] + VALUE_BYTES[dtype]
    return STATE_BYTES[dtype] + FLAT_BYTES * parameters.flat_gradients


def _frozen_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return bytes of a frozen weight: the stored one, and its copy in another format if needed."""
    compute_bytes = VALUE_BYTES[dtype]
    stored = spec.frozen_format
    if stored is None or stored == WEIGHT_FORMATS.get(dtype, dtype):
        return compute_bytes
    return VALUE_BYTES[stored] + compute_bytes


def _activations(
    spec: ModelSpec, on_rank: TokensOnRank, recompute: Recompute, parameters: CostParameters
) -> tuple[Floats, Floats]:
    """Return activation bytes kept for a microbatch, and peak bytes, (num_layers + 2,) each.

    Peak bytes: what a layer's backward needs beyond the kept bytes, with what it recomputes.
    """
    layers = spec.layers
    scale = parameters.activation_scale
    by_modules = parameters.autograd_activations

    def stored_bytes(how: Recompute) -> Floats:
        by_layer = [activation_bytes(layer, on_rank, how, by_modules) for layer in layers]
        return scale * np.array(by_layer)

    whole = stored_bytes("none")
    kept = stored_bytes(recompute)
    peak = np.array([backward_bytes(layer, on_rank, by_modules) for layer in layers])
    input_bytes = on_rank.tokens * spec.hidden_size * on_rank.value_bytes
    if recompute == "full":
        # a block keeps its input, unless it would keep less than that anyway
        kept[1:-1] = np.minimum(whole[1:-1], input_bytes)
    elif recompute == "offload":
        kept[1:-1] = 0.0
        # inputs on the way: of the block that runs, and of the one that is next
        peak[1:-1] += 2 * input_bytes
    return kept, peak + whole - kept


def _largest_tensors(spec: ModelSpec) -> list[float]:
    """Return the scalars of each layer's largest weight.

    Its gradient of one microbatch is whole before it is added to the others' gradients.
    """
    blocks = []
    for block in spec.blocks:
        share = LARGEST_OF_EXPERTS if block.has_experts else LARGEST_OF_BLOCK
        blocks.append(block.parameters * share)
    # a tied head multiplies by the embedding's weight
    head = spec.head.parameters + spec.tied_parameters
    return [spec.embedding.parameters, *blocks, head]


def activation_bytes(
    layer: LayerSpec,
    on_rank: TokensOnRank,
    recompute: Recompute = "none",
    by_modules: bool = False,
) -> float:
    """Return bytes that one microbatch leaves for the backward of a layer.

    by_modules: as the runtime's modules keep them, if they are known, with a fused attention.
    `full` and `offload` give the same as `none`: the caller knows the layer's input.
    """
    known = layer.autograd if by_modules else None
    if known is None:
        split = layer.split_activation_values
        replicated = layer.replicated_activation_values
        shared = 0.0
        if recompute == "selective":
            split *= SELECTIVE_SHARE
        else:
            split += layer.attention_heads * on_rank.sequence_length
    elif recompute == "selective":
        split = known.selective_split
        replicated = known.selective_replicated
        shared = known.selective_key_value
    else:
        split = known.split
        replicated = known.replicated
        shared = known.key_value
    tp_degree = on_rank.tp_degree
    # several ranks hold one unit of keys and values if there are fewer units than ranks
    excess = shared * layer.split_excess(tp_degree)
    scalars = replicated + split / tp_degree + excess
    return float(scalars * on_rank.tokens * on_rank.value_bytes)


def recomputed_values(layer: LayerSpec, tp_degree: float) -> float:
    """Return scalars per token that `selective` recomputation makes again on each rank."""
    token = TokensOnRank(1, 0, "fp32", tp_degree)
    whole = activation_bytes(layer, token, "none", True)
    kept = activation_bytes(layer, token, "selective", True)
    return (whole - kept) / token.value_bytes


def backward_bytes(layer: LayerSpec, on_rank: TokensOnRank, by_modules: bool = False) -> float:
    """Return bytes of gradients alive together at the worst moment of a block's backward.

    They are those of scores and their softmax, or of the widest product.
    """
    tp_degree = on_rank.tp_degree
    if by_modules and layer.autograd is not None:
        per_value = on_rank.tokens * on_rank.value_bytes / tp_degree
        # Values that are kept after the attention are gone at its backward pass.
        kept_after = max(0.0, layer.autograd.split - 4 * layer.attention_width)
        scores_bytes = explicit_scores_bytes(layer, on_rank) - kept_after * per_value
        return max(layer.autograd.backward * per_value, scores_bytes)
    scores = 2.0 * layer.attention_heads * on_rank.sequence_length / tp_degree
    widest = layer.split_activation_values / tp_degree / 2
    return float(max(scores, widest) * on_rank.tokens * on_rank.value_bytes)


def explicit_scores_bytes(layer: LayerSpec, on_rank: TokensOnRank) -> float:
    """Return bytes of attention scores, and of tensors like them, while they are computed."""
    if layer.explicit_scores is None:
        return 0.0
    heads = layer.explicit_scores.heads / on_rank.tp_degree
    scores = heads * on_rank.tokens * on_rank.sequence_length
    return layer.explicit_scores.alive_bytes * min(scores, EXPLICIT_SCORES)


def logits_bytes(
    spec: ModelSpec, tokens: int, tp_degree: float, dtype: str, parameters: CostParameters
) -> float:
    """Return bytes of logits and loss that are alive together after the forward.

    They are the logits and their gradient, and the loss's fp32 log-probabilities and their
    gradient. A fused loss has one of the two in fp32. A loss that is computed some rows at a time
    has a chunk in fp32, or two if it makes them from another dtype.
    """
    logits = float(tokens * spec.vocab_size / tp_degree)
    chunk_bytes = parameters.loss_chunk_bytes
    kept = 2 * VALUE_BYTES[dtype] * logits
    if chunk_bytes is None:
        num_fp32 = 1 if parameters.fuses_loss else 2
        return kept + num_fp32 * FP32_BYTES * logits
    num_fp32 = 1 if VALUE_BYTES[dtype] == FP32_BYTES else 2
    return kept + num_fp32 * min(FP32_BYTES * logits, chunk_bytes)


def fused_head_bytes(
    spec: ModelSpec, tokens: int, dtype: str, chunk_elements: float, tp_degree: float
) -> float:
    """A chunk of a rank's logits, made its own gradient in fp32, and the head input's gradient.

    The head's weight gradient, which the forward pass makes, is among `_largest_tensors`; its sum
    over chunks (`_sums_chunks`) is not counted here.
    """
    value_bytes = VALUE_BYTES[dtype]
    fp32_bytes = 0 if value_bytes == FP32_BYTES else FP32_BYTES
    chunk = min(tokens * spec.vocab_size / tp_degree, chunk_elements)
    input_gradient_bytes = tokens * spec.hidden_size * value_bytes
    return chunk * (value_bytes + fp32_bytes) + input_gradient_bytes


def _sums_chunks(spec: ModelSpec, on_rank: TokensOnRank, parameters: CostParameters) -> bool:
    """Return True if a fused head adds up its weight's gradient in fp32 beside the format's own."""
    if parameters.fused_head_elements is None or VALUE_BYTES[on_rank.dtype] == FP32_BYTES:
        return False
    logits = on_rank.tokens * spec.vocab_size / on_rank.tp_degree
    return logits > parameters.fused_head_elements


def with_cut_sequence(
    memory: MemoryTerms,
    spec: ModelSpec,
    value_bytes: float,
    ranks: int,
    recompute: Recompute,
    by_modules: bool,
) -> MemoryTerms:
    """Return the terms of a sequence-parallel stage, made from those of one that is not.

    value_bytes: bytes of one value of each token. Norms and residual sums are cut. The gathered
    inputs of a block's two cut parts stay whole, since autograd keeps them for their weights'
    gradients.
    """
    kept = memory.activation_bytes.copy()
    peak = memory.peak_bytes.copy()
    share = value_bytes * (1.0 - 1.0 / ranks)
    for index, layer in enumerate(spec.blocks, start=1):
        whole = layer.replicated_activation_values
        if by_modules and layer.autograd is not None:
            whole = layer.autograd.replicated
        saved = max(0.0, whole - 2.0 * spec.hidden_size) * share
        # a block that recomputes all keeps its input alone, and has the rest at its peak
        saved_of_kept = saved
        if recompute == "full":
            saved_of_kept = spec.hidden_size * share
        elif recompute == "offload":
            saved_of_kept = 0.0
        saved_of_peak = saved - saved_of_kept
        kept[index] = max(0.0, kept[index] - saved_of_kept)
        peak[index] = max(0.0, peak[index] - saved_of_peak)
    return replace(memory, activation_bytes=kept, peak_bytes=peak)
