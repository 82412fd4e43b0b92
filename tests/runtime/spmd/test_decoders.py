"""Graphs by formula against those captured from the library's own modules: what is planned is what
runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autohet.runtime.job.sections import ModelSection
from autohet.runtime.models import load_config
from autohet.runtime.models.model_spec import model_spec_from_config
from autohet.runtime.spmd.language_model import capture_language_model, split_dims_of
from planner.errors import ConfigError
from planner.spmd.decoders import decoder_graph
from planner.spmd.graph import Graph

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA_LIKE},
    "mistral": {"model_type": "mistral", **LLAMA_LIKE, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", **LLAMA_LIKE},
    "qwen3": {"model_type": "qwen3", **LLAMA_LIKE, "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 67,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 24,
    },
}


def _listed(graph: Graph) -> list[tuple[Any, ...]]:
    return [
        (
            n.name,
            n.kind,
            n.op,
            n.inputs,
            n.shape,
            n.item_bytes,
            n.needs_gradient,
            n.flops,
            n.backward_flops,
            n.is_alias,
            repr(n.signature),
        )
        for n in graph.nodes
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_formula_equals_what_is_captured(name: str, precision: str) -> None:
    config = load_config(ModelSection(config=dict(CASES[name]), dropout=False))
    spec = model_spec_from_config(name, dict(CASES[name]), precision=precision)
    made = decoder_graph(spec, 6, 8, precision)
    assert made is not None
    captured = capture_language_model(
        config, 6, 8, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    )
    assert _listed(made.graph) == _listed(captured.graph)
    assert made.graph.axes == captured.graph.axes
    assert made.split_dims == split_dims_of(config)
    assert set(captured.parameters) == set(made.split_dims)


def test_a_spec_with_parameters_that_no_formula_has_is_left_to_capture() -> None:
    mapping = {**CASES["llama"], "attention_bias": True}
    assert (
        decoder_graph(model_spec_from_config("biased", mapping, precision="fp32"), 6, 8, "fp32")
        is None
    )


def test_a_model_with_dropout_is_refused_with_the_remedy() -> None:
    """Wrong: its programs train without, and nobody is told."""
    config = load_config(ModelSection(config=dict(CASES["gpt2"])))
    with pytest.raises(ConfigError, match=r"no dropout, and the gpt2 config has .*dropout: false"):
        capture_language_model(config, 6, 8, torch.float32)
