"""Bytes a worker needs: state, activations by 1F1B depth, logits, buffers and the context; formulas in README.md.

Activations per layer: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), section 4, as scalars
per token in the model spec, split or not by tensor parallelism, with the S x S scores where attention is not fused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.model_spec import LayerSpec, ModelSpec
from planner.parameters import CostParameters

Floats = NDArray[np.float64]

# Compute copy, gradient (fp32 buckets, as they are summed over pipelines), fp32 master and the two moments of AdamW.
STATE_BYTES = {"fp32": 4 + 4 + 4 + 4, "tf32": 4 + 4 + 4 + 4, "bf16": 2 + 4 + 4 + 8, "fp16": 2 + 4 + 4 + 8}
VALUE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Arrays (num_layers + 2,): embedding, blocks, head; bytes a worker, fragmentation included.

    state_bytes: held all step long. activation_bytes: kept for each microbatch in flight. peak_bytes: extra while the layer runs
    (logits and their gradient; recomputed activations of one block).
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
    per_parameter = parameters.state_bytes_per_parameter or STATE_BYTES[dtype]
    state = np.array([layer.parameters_per_worker(tp_degree) * per_parameter for layer in layers])
    if spec.tied_embeddings:
        state[-1] += spec.tied_parameters / tp_degree * per_parameter
    tokens = microbatch * sequence_length
    kept = np.array([activation_bytes(layer, tokens, sequence_length, dtype, tp_degree) for layer in layers])
    peak = np.zeros(len(layers))
    peak[-1] = logits_bytes(spec, tokens, tp_degree, dtype)
    if recompute:
        whole = kept[1:-1].copy()
        kept[1:-1] = np.minimum(whole, tokens * spec.hidden_size * VALUE_BYTES[dtype])
        peak[1:-1] = whole
    margin = 1.0 + parameters.fragmentation
    return MemoryTerms(state * margin, kept * margin, peak * margin)


def activation_bytes(layer: LayerSpec, tokens: int, sequence_length: int, dtype: str, tp_degree: int) -> float:
    """Bytes that one microbatch of `tokens` tokens leaves for the backward pass of a layer."""
    values = layer.replicated_activation_values + layer.split_activation_values / tp_degree
    scores = layer.attention_heads * sequence_length * 2.5 / tp_degree
    return float((values + scores) * tokens * VALUE_BYTES[dtype])


def logits_bytes(spec: ModelSpec, tokens: int, tp_degree: int, dtype: str) -> float:
    """Logits, their fp32 copy in the loss and the gradient of it: alive together at the end of the last stage's forward."""
    return float(tokens * spec.vocab_size / tp_degree * (VALUE_BYTES[dtype] + 2 * 4))


def in_flight(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Microbatches whose activations stage `stage` holds at once under 1F1B (Narayanan et al. 2021)."""
    return min(num_stages - stage, num_microbatches)


def stage_memory_bytes(
    terms: MemoryTerms, layers: Sequence[int], num_in_flight: int, fixed_bytes: float, tied_once: float = 0.0
) -> float:
    """Bytes a worker of a stage with the entries `layers` (0 embedding, 1.. blocks, -1 head); `tied_once` is subtracted."""
    chosen = np.asarray(layers)
    kept = terms.state_bytes[chosen].sum() + num_in_flight * terms.activation_bytes[chosen].sum()
    return float(kept + terms.peak_bytes[chosen].max() + fixed_bytes - tied_once)
