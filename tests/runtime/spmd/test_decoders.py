"""Graphs that planning derives from one block of each kind, against those of whole models."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autohet.runtime.job.model import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.spmd.capture import Captured
from autohet.runtime.spmd.language_model import (
    capture_decoder,
    capture_language_model,
    split_dims_of,
)
from planner.errors import ConfigError
from planner.spmd.graph import Graph
from tests.harness.selection import every_third
from tests.harness.tiny_models import CAPTURED, CHANGE_IN_PLACE, TINY, random_parameters

SEQUENCES, LENGTH = 2, 8


def config_of(name: str) -> Any:
    return load_config(ModelSection(config=dict(TINY[name]), dropout=False))


def listed(graph: Graph) -> list[tuple[Any, ...]]:
    return [
        (
            node.name,
            node.kind,
            node.op,
            node.inputs,
            node.shape,
            node.item_bytes,
            node.needs_gradient,
            node.flops,
            node.backward_flops,
            node.is_alias,
            repr(node.signature),
        )
        for node in graph.nodes
    ]


@pytest.mark.parametrize("name", every_third(CAPTURED))
def test_copies_of_a_block_make_the_graph_of_the_whole_model(name: str) -> None:
    config = config_of(name)
    planned = capture_decoder(config, SEQUENCES, LENGTH, torch.bfloat16)
    captured = capture_language_model(config, SEQUENCES, LENGTH, torch.bfloat16)
    assert listed(planned.graph) == listed(captured.graph)
    assert planned.graph.axes == captured.graph.axes
    assert planned.graph.notes == captured.graph.notes
    assert planned.split_dims == split_dims_of(config)
    assert set(captured.parameters) == set(planned.split_dims)


@pytest.mark.parametrize("name", CHANGE_IN_PLACE)
def test_a_model_that_changes_tensors_in_place_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"operator '\w+_' .* changes its inputs"):
        capture_decoder(config_of(name), SEQUENCES, LENGTH, torch.bfloat16)


def test_only_one_block_of_each_kind_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong kind would trace 80 blocks, or take a windowed block for one without a window."""
    traced = []

    def count(config: Any, *arguments: Any) -> Captured:
        traced.append(config.num_hidden_layers)
        return capture_language_model(config, *arguments)

    monkeypatch.setattr("autohet.runtime.spmd.language_model.capture_language_model", count)
    capture_decoder(config_of("llama"), SEQUENCES, LENGTH, torch.float32)
    capture_decoder(config_of("cohere2"), SEQUENCES, LENGTH, torch.float32)
    assert traced == [1, 2]


def loss_of_graph(captured: Captured, values: dict[str, Tensor]) -> Tensor:
    """Run a captured graph, operator by operator."""
    for node in captured.graph.nodes:
        if node.kind == "op":
            values[node.name] = captured.calls[node.name]([values[name] for name in node.inputs])
    return values[captured.graph.nodes[-1].name]


@pytest.mark.parametrize("name", every_third(CAPTURED))
def test_the_graph_computes_the_loss_of_the_stage(name: str) -> None:
    config = config_of(name)
    captured = capture_language_model(config, SEQUENCES, LENGTH, torch.float32)
    parameters = dict(random_parameters(config))
    layers = int(config.num_hidden_layers)
    stage = build_stage(config, range(layers), None, torch.device("cpu"), torch.float32)
    stage.weights.load(parameters)
    ids = torch.randint(0, 60, (SEQUENCES, LENGTH))
    targets = torch.randint(0, 60, (SEQUENCES, LENGTH))
    given = dict(zip(captured.inputs, (ids, targets), strict=True))
    with torch.no_grad():
        expected = stage.loss(ids, targets)
        found = loss_of_graph(captured, {**captured.constants, **parameters, **given})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_model_with_dropout_is_refused_with_the_remedy() -> None:
    """Wrong: its programs train without, and nobody is told."""
    config = load_config(ModelSection(config=dict(TINY["gpt2"]) | {"resid_pdrop": 0.1}))
    with pytest.raises(ConfigError, match=r"no dropout, and the gpt2 config has .*dropout: false"):
        capture_language_model(config, 6, 8, torch.float32)
