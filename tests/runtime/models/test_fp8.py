"""Products in fp8: close to exact ones forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autohet.runtime.job import AdapterSection
from autohet.runtime.models.layers import fp8 as module
from autohet.runtime.models.layers.adapters import set_adapter
from autohet.runtime.models.layers.fp8 import check_fp8, fp8_linear, use_fp8
from autohet.runtime.models.thread_group import run_ranks
from planner.errors import ConfigError
from planner.plans.plan import Recompute
from tests.harness.tiny_models import (
    random_parameters,
    run_chain,
    stage_chain,
    tiny_config,
    worst_error,
)

CPU = torch.device("cpu")
ERROR = 0.05
"""Relative; e4m3 has three bits of mantissa, e5m2 two."""


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("rows", [(3, 16), (5, 7)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_products_and_gradients_are_close_to_exact_ones(rows: Any, size: float) -> None:
    torch.manual_seed(0)
    x = (size * torch.randn(*rows, 64)).bfloat16().requires_grad_()
    weight = torch.randn(48, 64).bfloat16().requires_grad_()
    gradient = (torch.randn(*rows, 48) / size).bfloat16()
    product = fp8_linear(x, weight)
    assert product.dtype == torch.bfloat16
    found = torch.autograd.grad(product, (x, weight), gradient)
    exact_product = x.double() @ weight.double().T
    exact = torch.autograd.grad(exact_product, (x, weight), gradient.double())
    assert relative(product, exact_product) < ERROR
    assert product.dtype == torch.bfloat16
    for ours, theirs in zip(found, exact, strict=True):
        assert relative(ours, theirs) < 2 * ERROR


def test_zeros_stay_zeros() -> None:
    assert not fp8_linear(torch.zeros(16, 16), torch.randn(16, 16)).any()


def test_maps_whose_dimensions_the_kernels_refuse_stay_exact() -> None:
    block = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 10), nn.LayerNorm(10))
    assert use_fp8(block) == 1
    x = torch.randn(4, 48)
    assert torch.equal(block[1](x), nn.functional.linear(x, block[1].weight, block[1].bias))
    assert set(block.state_dict()) == {
        f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")
    }


def test_a_device_without_units_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fp8(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match="fp8, for which NVIDIA A100 has no units"):
        check_fp8(torch.device("cuda"))
    monkeypatch.delattr(module.torch, "_scaled_mm")
    with pytest.raises(ConfigError, match="has no kernel"):
        check_fp8(CPU)


@pytest.mark.parametrize("adapter", [None, AdapterSection(rank=4, alpha=8.0)])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_of_a_cut_stage_changes_no_gradient(
    recompute: Recompute, adapter: AdapterSection | None
) -> None:
    """Wrong: `selective` makes a row-parallel product again and takes it for the group's sum."""
    config = tiny_config("llama", hidden_size=64, intermediate_size=64)
    set_adapter(config, adapter, None, None)
    parameters = random_parameters(config)

    def work(tp: Any) -> list[tuple[float, dict[str, Tensor]]]:
        found = []
        for how in ("none", recompute):
            stages = stage_chain(config, parameters, [3], tp, how)  # type: ignore[arg-type]
            assert sum(use_fp8(block) for block in stages[0].blocks) == 3 * 7
            _, loss, gradients = run_chain(config, stages)
            found.append((loss, gradients))
        return found

    for (loss, gradients), (again, recomputed) in run_ranks(2, work):
        assert again == loss
        assert worst_error(recomputed, gradients) < 1e-6
