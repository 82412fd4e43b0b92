"""Bytes a worker needs: state, activations of the microbatches in flight, logits, buffers and the context; formulas in README.md.

Activations per layer: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022),
section 4, as scalars per token in the model spec, split or not by tensor parallelism, with the S x S scores where
attention is not fused.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.parameters import CostParameters
from planner.model_spec import LayerSpec, ModelSpec

Floats = NDArray[np.float64]

# Compute copy (its own only beside a 16-bit one), fp32 master, fp32 gradient and the two moments of AdamW.
STATE_BYTES = {"fp32": 4 + 4 + 8, "tf32": 4 + 4 + 8, "bf16": 2 + 4 + 4 + 8, "fp16": 2 + 4 + 4 + 8}
LARGEST_OF_BLOCK = 1 / 3  # of a block's weights: an MLP matrix of GPT-2; Llama's are a quarter
FLAT_BYTES = 4  # of a flat fp32 buffer for the gradients' all-reduce
VALUE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Arrays (num_layers + 2,): embedding, blocks, head; bytes a worker.

    state_bytes: held all step long. activation_bytes: kept for each microbatch in flight. peak_bytes: extra while
    the layer runs (logits and their gradient; recomputed activations of one block; a weight's gradient of one microbatch).
    """

    state_bytes: Floats
    activation_bytes: Floats
    peak_bytes: Floats


def memory_terms(
    spec: ModelSpec,
    sequence_length: int,
    dtype: str,
    tp_degree: int,
    microbatch: int,
    recompute: bool,
    parameters: CostParameters,
) -> MemoryTerms:
    """The terms of every layer at one TP degree and microbatch."""
    layers = (spec.embedding, *spec.blocks, spec.head)
    per_parameter = parameters.state_bytes_per_parameter or STATE_BYTES[dtype] + FLAT_BYTES * parameters.flat_gradients
    state = np.array([layer.parameters_per_worker(tp_degree) * per_parameter for layer in layers])
    if spec.tied_embeddings:
        state[-1] += spec.tied_parameters / tp_degree * per_parameter
    tokens = microbatch * sequence_length
    kept = parameters.activation_scale * np.array(
        [activation_bytes(layer, tokens, sequence_length, dtype, tp_degree) for layer in layers]
    )
    peak = np.array([backward_bytes(layer, tokens, sequence_length, dtype, tp_degree) for layer in layers])
    peak[-1] = logits_bytes(spec, tokens, tp_degree, dtype)
    peak += np.array(_largest_tensors(spec)) / tp_degree * VALUE_BYTES[dtype]
    if recompute:
        whole = kept[1:-1].copy()
        kept[1:-1] = np.minimum(whole, tokens * spec.hidden_size * VALUE_BYTES[dtype])
        peak[1:-1] += whole
    return MemoryTerms(state, kept, peak)


def _largest_tensors(spec: ModelSpec) -> list[float]:
    """Scalars of each layer's largest weight, whose gradient of one microbatch is whole before it is added to the others'."""
    blocks = [block.parameters * LARGEST_OF_BLOCK for block in spec.blocks]
    return [spec.embedding.parameters, *blocks, spec.head.parameters + spec.tied_parameters]


def activation_bytes(layer: LayerSpec, tokens: int, sequence_length: int, dtype: str, tp_degree: int) -> float:
    """Bytes that one microbatch of `tokens` tokens leaves for the backward pass of a layer."""
    values = layer.replicated_activation_values + layer.split_activation_values / tp_degree
    scores = layer.attention_heads * sequence_length / tp_degree
    return float((values + scores) * tokens * VALUE_BYTES[dtype])


def backward_bytes(layer: LayerSpec, tokens: int, sequence_length: int, dtype: str, tp_degree: int) -> float:
    """Gradients alive together at the worst moment of a block's backward: of scores and their softmax, or of the
    widest product."""
    scores = 2.0 * layer.attention_heads * sequence_length / tp_degree
    widest = layer.split_activation_values / tp_degree / 2
    return float(max(scores, widest) * tokens * VALUE_BYTES[dtype])


def logits_bytes(spec: ModelSpec, tokens: int, tp_degree: int, dtype: str) -> float:
    """Logits, the loss's fp32 log-probabilities and their gradient, and the logits' gradient: alive together after
    the forward."""
    return float(tokens * spec.vocab_size / tp_degree * 2 * (VALUE_BYTES[dtype] + 4))
