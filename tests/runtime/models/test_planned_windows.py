"""The planner prices a sliding window as the scores that workers compute."""

from typing import Any

import pytest
import torch

from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.models.layers.attention import whole_mask
from planner.cost.layers.roofline import LayerWork, block_seconds
from planner.cost.parameters import CostParameters
from planner.inputs.catalogue import find_gpu_type
from planner.plans.model_spec import LayerSpec
from tests.harness.tiny_models import AUTO, TINY

CPU = torch.device("cpu")
MODELS = {**AUTO, **TINY}


@pytest.mark.parametrize(("length", "window"), [(64, 16), (512, 100), (300, 299)])
def test_flops_are_those_of_the_keys_that_the_mask_lets_through(length: int, window: int) -> None:
    mask = whole_mask(window, length, torch.float32, CPU)
    assert mask is not None
    block = LayerSpec(10, attention_width=3, window=window)
    pairs = int((mask == 0).sum())
    assert block.score_flops(length) == pytest.approx(2 * 4.0 * 3 * pairs, rel=0.07)


def inputs_of(model: dict[str, Any], length: int) -> Any:
    training = {"global_batch_sequences": 4, "sequence_length": length, "precision": "bf16"}
    return planning_inputs(Job.from_document({"model": {"config": model}, "training": training}))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_blocks_that_slide_are_cheaper_than_whole_ones(kind: str) -> None:
    model = MODELS[kind] | {"sliding_window": 32, "max_position_embeddings": 4096}
    sliding, whole = inputs_of(model, 2048).spec.blocks[:2]
    assert (sliding.window, whole.window) == (32, 0)
    assert sliding.forward_flops(2048) < whole.forward_flops(2048) / 2
    device = find_gpu_type("A100-80")
    assert device is not None
    seconds = [
        sum(block_seconds(device, LayerWork("block", block, "bf16", 2048, 1, 1), CostParameters()))
        for block in (sliding, whole)
    ]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_a_window_that_holds_the_sequences_makes_no_kind_of_blocks(kind: str) -> None:
    model = MODELS[kind] | {"sliding_window": 64}
    assert len(set(inputs_of(model, 64).spec.blocks)) == 1
    assert inputs_of(model, 64).spec.blocks[0].window == 0


def test_mistrals_own_window_counts_where_the_config_names_none() -> None:
    model = {key: value for key, value in TINY["mistral"].items() if key != "sliding_window"}
    model["max_position_embeddings"] = 8192
    assert inputs_of(model, 8192).spec.blocks[0].window == 4096
    assert inputs_of(model, 4096).spec.blocks[0].window == 0
