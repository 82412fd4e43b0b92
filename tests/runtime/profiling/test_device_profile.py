"""The profile measures what a run computes: its accumulation of gradients and its update."""

from typing import Any

import pytest
import torch

from autohet.runtime.job import TrainingSection
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.profiling import device_profile, layer_update
from autohet.runtime.profiling.device_profile import ProfileRequest, measure_layers
from autohet.runtime.profiling.layer_update import FlatGradients
from autohet.runtime.state.flat_optimizer import fused_update
from scripts.benchmarks.gpu import measures
from tests.harness.tiny_models import tiny_config as config_of

CPU = torch.device("cpu")
SETTINGS = TrainingSection(global_batch_sequences=1, sequence_length=8)


def stage_of(dtype: torch.dtype) -> Any:
    stage = build_stage(config_of("llama"), range(1, 2), None, CPU, dtype)
    torch.manual_seed(0)
    stage.weights.load(
        {name: torch.randn(shape) * 0.02 for name, shape in stage.weights.local_shapes().items()}
    )
    return stage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_microbatches_add_up_in_one_flat_fp32_tensor(dtype: torch.dtype) -> None:
    """Without it the backward pass is measured short of a run's accumulation."""
    stage, twin = stage_of(dtype), stage_of(dtype)
    gradients = FlatGradients(stage)
    hidden = torch.randn(2, 8, int(stage.spec.config.hidden_size), dtype=dtype)
    for _ in range(2):
        stage(hidden).sum().backward()
    twin(hidden).sum().backward()
    views = layer_update.parameter_views(
        gradients.flat, list(stage.weights.local_parameters().values())
    )
    for view, other in zip(views, twin.weights.local_parameters().values(), strict=True):
        assert torch.allclose(view, 2.0 * other.grad.float(), rtol=1e-5, atol=1e-6)
    kept = [each.grad for each in stage.weights.local_parameters().values()]
    assert all((grad is None) == (dtype == torch.bfloat16) for grad in kept)


def test_the_update_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fused kernel over all of it, with zeroing and the renewal of what is computed with:
    torch.optim.AdamW took seven times as long.
    """
    updated: list[int] = []

    def noted(tensors: list[tuple[torch.Tensor, ...]], *rest: Any) -> None:
        updated.append(tensors[0][0].numel())
        fused_update(tensors, *rest)

    monkeypatch.setattr(layer_update, "fused_update", noted)
    stage = stage_of(torch.bfloat16)
    gradients = FlatGradients(stage)
    gradients.flat.fill_(1.0)
    update = gradients.prepare_update(SETTINGS)
    for parameter in stage.parameters():
        parameter.detach().fill_(7.0)
    update()
    assert updated == [gradients.num_elements]
    assert not gradients.flat.any()
    assert not any((parameter == 7.0).any() for parameter in stage.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_layer_has_seconds_of_all_three_kinds(precision: str) -> None:
    request = ProfileRequest("m", config_of("llama"), precision, 8, (1, 2), "cpu", "CPU", repeats=1)
    rows = list(measure_layers(request))
    assert [(row.layer, row.microbatch_sequences) for row in rows] == [
        (layer, size) for layer in ("embedding", "block", "head") for size in (1, 2)
    ]
    assert all(row.forward_s > 0 and row.backward_s > 0 and row.update_s > 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("deepseek_v3", {"block:0": False, "block:1": True}),
        ("qwen3_moe", {"block:0": True, "block:1": False}),
        ("mixtral", {"block": True}),
    ],
)
def test_each_kind_of_block_is_measured_by_itself(name: str, kinds: dict[str, bool]) -> None:
    """The row of a kind has the time of its own blocks: neither the other kind's, nor a mixture."""
    request = ProfileRequest("m", config_of(name), "fp32", 8, (1,), "cpu", "CPU", repeats=1)
    rows = list(measure_layers(request))
    assert [row.layer for row in rows] == ["embedding", *kinds, "head"]
    for layer, has_experts in kinds.items():
        stage, count = device_profile.build_layer_stage(request, layer, None, CPU)
        names = {
            each.split(".")[2] for each in stage.weights.local_parameters() if ".experts." in each
        }
        assert count == 2
        assert len(names) == (count if has_experts else 0)


def test_the_profiles_cache_is_no_part_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"cached": 10 << 30, "workspace": 1 << 20, "context": 500 << 20}
    total = 80 << 30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: memory.update(cached=0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - sum(memory.values()), total))
    monkeypatch.setattr(
        torch.cuda, "memory_reserved", lambda: memory["cached"] + memory["workspace"]
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    assert measures.context_bytes() == memory["context"]
