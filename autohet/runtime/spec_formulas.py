"""Model specs by formulas, for configs of families whose modules are known.

They save the import of torch and transformers, which takes three seconds. A config is accepted only
if it has every number that counts and no key beyond those listed. Errors and rarer models stay with
the library's own modules (`models/model_spec.py`), whose specs these equal
(tests/runtime/test_spec_formulas.py).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autohet.runtime.kept_values import kept_of_block, kept_of_head
from planner.model_spec import LayerSpec, ModelSpec

FAMILIES = frozenset({"llama", "mistral"})
FUSED_PRECISIONS = frozenset({"bf16", "fp16"})
MISTRAL_WINDOW = 4096
"""Tokens of Mistral's sliding window, where its config names none."""
_NUMBERS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_WITHOUT_PARAMETERS = frozenset({"max_position_embeddings", "rms_norm_eps"})
_ROPE = {"rope_type": "default", "rope_theta": 1e4}  # these have no parameters either
_KEYS = frozenset(
    {
        *_NUMBERS,
        *_WITHOUT_PARAMETERS,
        "model_type",
        "tie_word_embeddings",
        "head_dim",
        "rope_parameters",
    }
)


def spec_by_formula(
    name: str, config: Mapping[str, Any] | str | Path, precision: str
) -> ModelSpec | None:
    """Return the spec of a transformers config given as a mapping; None if no formula fits it."""
    if (
        not isinstance(config, Mapping)
        or config.get("model_type") not in FAMILIES
        or not set(config) <= _KEYS
    ):
        return None
    if not all(type(config.get(key)) is int and config[key] > 0 for key in _NUMBERS):
        return None
    tied = config.get("tie_word_embeddings", False)
    layers, hidden, heads, kv_heads, inner, vocab = (config[key] for key in _NUMBERS)
    size = config.get("head_dim", hidden // heads)
    if (
        type(tied) is not bool
        or hidden % heads
        or heads % kv_heads
        or type(size) is not int
        or size < 1
        or size % 2
    ):
        return None
    if (
        config.get("rope_parameters", _ROPE).keys() != _ROPE.keys()
        or config.get("rope_parameters", _ROPE)["rope_type"] != "default"
    ):
        return None
    table = vocab * hidden
    products = 2 * hidden * (heads + kv_heads) * size + 3 * hidden * inner
    width = max(inner, hidden)
    degree = math.gcd(heads, 8)
    degree = math.gcd(degree, kv_heads) if degree % kv_heads else degree
    block = LayerSpec(
        parameters=products + 2 * hidden,
        replicated_parameters=2 * hidden,
        matmul_parameters=products,
        attention_width=heads * size,
        split_activation_values=float((heads * 2 + kv_heads * 2) * size + 4 * width),
        replicated_activation_values=4.0 * hidden,
        attention_heads=0 if precision in FUSED_PRECISIONS else heads,
        autograd=kept_of_block(
            config["model_type"], hidden, heads, kv_heads, size, inner, precision
        ),
        key_value_parameters=2 * hidden * kv_heads * size if kv_heads < degree else 0,
        key_value_units=kv_heads if kv_heads < degree else 0,
        window=MISTRAL_WINDOW if config["model_type"] == "mistral" else 0,
    )
    return ModelSpec(
        name=name,
        model_type=config["model_type"],
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=width,
        tied_embeddings=tied,
        max_tp_degree=degree,
        embedding=LayerSpec(table, replicated_activation_values=2.0),
        blocks=(block,) * layers,
        head=LayerSpec(
            parameters=hidden if tied else table + hidden,
            replicated_parameters=hidden,
            matmul_parameters=table,
            replicated_activation_values=2.0 * hidden,
            autograd=kept_of_head(config["model_type"], hidden, precision),
        ),
    )
