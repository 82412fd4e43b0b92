"""What capture makes of a model, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autohet.runtime.spmd.capture import capture
from planner.errors import ConfigError
from planner.spmd.layouts import FACTORED, PARTIAL, REPLICATED, sharded
from planner.spmd.rules import rules_of
from tests.harness.spmd_models import spmd_case


class Sorted(nn.Module):
    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3), change

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = self.linear(x)
        if self.change == "dropout":
            y = F.dropout(y, 0.5)
        if self.change == "roll":
            y = torch.roll(y, 1, 0)
        if self.change == "no scalar":
            return y
        return F.cross_entropy(y, targets, reduction="sum")


BATCH = (torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))


def test_a_linear_has_batch_row_column_replicated_partial_and_factored_rules() -> None:
    captured = capture(Sorted(), BATCH)
    node = next(node for node in captured.graph.nodes if node.op == "linear")
    found = {(rule.inputs, rule.output) for rule in rules_of(captured.graph, node)}
    assert found == {
        ((REPLICATED,) * 3, REPLICATED),
        ((sharded(0), REPLICATED, REPLICATED), sharded(0)),
        ((sharded(0), FACTORED, FACTORED), sharded(0)),
        ((REPLICATED, sharded(0), sharded(0)), sharded(1)),
        ((sharded(1), sharded(1), PARTIAL), PARTIAL),
        ((PARTIAL, REPLICATED, PARTIAL), PARTIAL),
    }
    rule = next(rule for rule in rules_of(captured.graph, node) if rule.inputs[0] == sharded(1))
    assert rule.gradient == (REPLICATED, (sharded(1), sharded(1), REPLICATED))


def test_an_operator_without_a_rule_is_replicated_and_named() -> None:
    captured = capture(Sorted("roll"), BATCH)
    assert captured.graph.notes == (
        "operator 'roll' has no sharding rule: every rank computes the whole of it",
    )
    node = captured.graph.by_name["roll"]
    assert [(rule.inputs, rule.output) for rule in rules_of(captured.graph, node)] == [
        ((REPLICATED,), REPLICATED)
    ]


def test_random_operators_and_models_that_return_no_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'dropout' .* is random.*set dropout to 0"):
        capture(Sorted("dropout"), BATCH)
    with pytest.raises(ConfigError, match="must be a scalar loss"):
        capture(Sorted("no scalar"), BATCH)


def test_heads_and_their_projections_are_one_axis_of_whole_heads() -> None:
    model, batch = spmd_case("vit")
    graph = capture(model, batch).graph
    query = graph.by_name["qkv.0.0.weight"]
    assert query.shape == (12, 12)
    assert graph.axes[query.name, 0].units == 3
    assert graph.axes[query.name, 0] == graph.axes["qkv.0.3.weight", 1]
    assert graph.cuts(query.name, 0) == (0, 4, 8, 12)
    assert graph.axes["images", 0].is_batch


class Turned(nn.Module):
    """Loss of rotated vectors; which elements are turned with which is the caller's."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.turn = turn
        angles = torch.arange(12.0).reshape(1, 1, 2, 6)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        turned = x * self.cos + self.turn(x) * self.sin
        return turned.pow(2).mean()


def turn_halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 3:], x[..., :3]), dim=-1)


def turn_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turn_back(x: Tensor) -> Tensor:
    return torch.cat((-x[..., :3], x[..., 3:]), dim=-1)


@pytest.mark.parametrize(
    ("turn", "fused"), [(turn_halves, 1), (turn_neighbours, 1), (turn_back, 0)]
)
def test_what_is_fused_as_rotary_computes_it(turn: Any, fused: int) -> None:
    """Wrong: a pattern alone decides, which does not see what its slices take."""
    x = torch.randn(2, 3, 2, 6, generator=torch.Generator().manual_seed(1))
    captured = capture(Turned(turn), (x,))
    assert [node.op for node in captured.graph.nodes].count("rotary") == fused
    values = {**captured.constants, captured.inputs[0]: x}
    for node in captured.graph.nodes:
        if node.kind == "op":
            values[node.name] = captured.calls[node.name]([values[name] for name in node.inputs])
    assert torch.equal(values[captured.graph.nodes[-1].name], Turned(turn)(x))
