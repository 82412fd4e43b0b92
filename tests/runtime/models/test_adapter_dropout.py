"""Dropout of adapters: bits that no plan changes, and torch's own distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autohet.runtime.job import AdapterSection, ModelSection
from autohet.runtime.models import adapter_dropout, build_stage, family_of, load_config
from autohet.runtime.models.adapter_dropout import (
    column_keys,
    dropped,
    dropped_product,
    row_keys,
)
from autohet.runtime.models.initialization import initial_parameters
from tests.harness.tiny_models import LLAMA_LIKE

CPU = torch.device("cpu")
RATE = 0.3


def masks(samples: list[int], columns: range = range(40), path: str = "layers.0.q") -> torch.Tensor:
    rows = row_keys(5, samples, 50, CPU)
    return dropped(rows, column_keys(path, torch.arange(columns.start, columns.stop)), RATE)


def test_bits_belong_to_the_sample_and_the_column_alone() -> None:
    whole = masks([3, 9, 4])
    assert torch.equal(masks([9]), whole[1:2])
    assert torch.equal(masks([3, 9, 4], range(10, 25)), whole[..., 10:25])
    assert not torch.equal(masks([3, 9, 5])[2], whole[2])
    assert not torch.equal(masks([3, 9, 4], path="layers.1.q"), whole)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_as_many_are_dropped_as_by_torch_and_they_are_independent(rate: float) -> None:
    rows = row_keys(1, range(64), 64, CPU)
    mask = dropped(rows, column_keys("a", torch.arange(256)), rate).float()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(mask.mean().item() - rate) < 4 * deviation / mask.numel() ** 0.5
    centred = mask - rate
    for dim in range(3):  # neighbours of one sample, token or column
        pairs = (centred * centred.roll(1, dim)).mean().item()
        assert abs(pairs) < 5 * deviation**2 / mask.numel() ** 0.5
    for dim in range(3):  # no sample, token or column has a rate of its own
        others = [each for each in range(3) if each != dim]
        rates = mask.mean(dim=others)
        spread = deviation / (mask.numel() / mask.shape[dim]) ** 0.5
        assert (rates - rate).abs().max().item() < 5 * spread


@pytest.mark.parametrize("elements", [1 << 22, 700, 1])
def test_product_and_gradients_are_those_of_torch_with_the_same_mask(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_dropout, "CHUNK_ELEMENTS", elements)
    torch.manual_seed(0)
    x = torch.randn(2, 50, 40, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    rows, columns = row_keys(5, [1, 2], 50, CPU), column_keys("a", torch.arange(40))
    kept = ~dropped(rows, columns, RATE)
    expected = (x * kept / (1 - RATE)) @ weight.T
    found = dropped_product(x, weight, rows, columns, RATE)
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, (x, weight), slope)
    for one, other in zip(torch.autograd.grad(found, (x, weight), slope), wanted, strict=True):
        torch.testing.assert_close(one, other)


def stage_of(recompute: Any, rate: float = RATE) -> Any:
    adapter = AdapterSection(rank=4, alpha=8.0, dropout=rate)
    section = ModelSection(config={"model_type": "llama", **LLAMA_LIKE}, adapter=adapter)
    config = load_config(section)
    family = family_of(config)
    stage = build_stage(config, 0, family.num_layers(config), None, CPU, torch.float32, recompute)
    drawn = dict(initial_parameters(config, list(family.parameter_specs(config)), 1))
    generator = torch.Generator().manual_seed(2)
    for name, tensor in drawn.items():
        if "lora_B" in name:
            tensor.normal_(0, 0.3, generator=generator)
    stage.load_parameters(drawn)
    return stage


def test_recomputation_draws_the_same_bits_while_other_microbatches_pass() -> None:
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in ("none", "selective", "full"):
        stage = stage_of(recompute)
        losses = []
        for samples in ([0, 1], [2, 3]):
            stage.draw_dropout(7, samples)
            losses.append(stage.loss(tokens, tokens))
        assert losses[0].item() != losses[1].item()
        losses[0].backward()  # after the forward pass of another microbatch, as in a pipeline
        gradients.append({n: p.grad for n, p in stage.local_parameters().items()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, msg=name)


def test_evaluation_drops_nothing() -> None:
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))
    stage, plain = stage_of("none"), stage_of("none", 0.0)
    stage.draw_dropout(7, [0, 1])
    assert stage.loss(tokens, tokens).item() != plain.loss(tokens, tokens).item()
    with torch.no_grad():
        assert stage.loss(tokens, tokens).item() == plain.loss(tokens, tokens).item()
