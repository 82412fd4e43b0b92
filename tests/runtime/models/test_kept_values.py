"""What autograd keeps of a block, predicted against counted, for every family."""

from __future__ import annotations

import pytest
import torch

from autohet.runtime.models import COMPUTE_DTYPES, StageModel, build_stage, family_of
from autohet.runtime.models.model_spec import model_spec_from_config
from planner.cost.memory import memory_terms
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.plan import RECOMPUTE_CHOICES, Recompute
from tests.harness.live_memory import LiveMemory
from tests.harness.tiny_models import TINY, tiny_config

FAMILIES = ["gpt2", "llama", "llama-grouped", "mistral", "mistral, windowed", "qwen2", "qwen3"]
SEQUENCES, LENGTH = 2, 32
WITHOUT_WINDOW = {"sliding_window": None, "use_sliding_window": False}


def planned(name: str) -> dict[str, object]:
    """The tiny config of a family, with a window shorter than the sequences only where its name says so."""
    if name == "mistral, windowed":
        return {**TINY["mistral"], "sliding_window": LENGTH // 4, "num_key_value_heads": 2}
    return {**TINY[name], **{key: value for key, value in WITHOUT_WINDOW.items() if key in TINY[name]}}


def stage(name: str, layers: int, precision: str, recompute: Recompute) -> StageModel:
    config = tiny_config(name.split(",")[0], **planned(name))
    model = build_stage(config, 0, layers, None, torch.device("cpu"), COMPUTE_DTYPES[precision], recompute)
    specs = family_of(config).parameter_specs(config)
    model.load_parameters({path: 0.02 * torch.randn(specs[path].shape) for path in model.local_parameters()})
    return model


def kept_bytes(model: StageModel) -> int:
    """Alive after the forward pass, with the output."""
    tokens = torch.randint(0, 60, (SEQUENCES, LENGTH))
    model(tokens)  # masks and rotary tables are made once
    with LiveMemory(model.parameters()) as memory:
        out = model(tokens)
    assert out.requires_grad
    return memory.bytes


@pytest.mark.parametrize("recompute", RECOMPUTE_CHOICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_keeps_what_the_planner_predicts(name: str, precision: str, recompute: Recompute) -> None:
    """By two stages of which one has a block more: the rest of what they keep is equal."""
    one, two = (kept_bytes(stage(name, layers, precision, recompute)) for layers in (1, 2))
    spec = model_spec_from_config(name, planned(name), precision=precision)
    parameters = framework_parameters(OURS, CostParameters())
    terms = memory_terms(spec, LENGTH, precision, 1, SEQUENCES, recompute, parameters)
    assert terms.activation_bytes[1] == pytest.approx(two - one, rel=0.02)
