"""Isolated documents of a row compute what each computes alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from autohet.runtime.job.model import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.layers.pieces import cumulative_lengths, piece_mask, positions_of
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.stage import StageModel, build_stage
from planner.plans.plan import Recompute
from tests.harness.tiny_models import TINY

COMMON: dict[str, Any] = {"vocab_size": 67, "bos_token_id": None, "eos_token_id": None}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    **COMMON,
}
MODELS = {
    "llama": LLAMA,
    "window": {**LLAMA, "model_type": "mistral", "sliding_window": 4},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        **COMMON,
    },
}
OF_FAMILIES = ("gpt_oss", "ministral3", "qwen3_5_text")
"""Sinks, queries that are scaled by positions, and recurrences."""
BEGINS = [[0, 7, 8], [0, 13]]


def begins_of(length: int = 20) -> torch.Tensor:
    begins = torch.zeros(len(BEGINS), length, dtype=torch.bool)
    for row, places in enumerate(BEGINS):
        begins[row, places] = True
    return begins


def stage_of(model: dict[str, Any], recompute: Recompute) -> StageModel:
    config = load_config(ModelSection(config=model))
    family = family_of(config)
    stage = build_stage(
        config,
        range(family.num_layers(config)),
        None,
        torch.device("cpu"),
        torch.float32,
        recompute,
    )
    names = list(family.parameter_specs(config))
    stage.weights.load(dict(initial_parameters(config, names, 0)))
    return stage


def gradients(stage: StageModel) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in stage.weights.local_parameters().items():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
        parameter.grad = None
    return found


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", [*MODELS, *OF_FAMILIES])
def test_pieces_are_documents_by_themselves(name: str, recompute: Recompute) -> None:
    """Wrong: a document sees the one before it, or positions go on."""
    stage = stage_of(MODELS.get(name) or dict(TINY[name]), recompute)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 67, (2, 20), generator=draw)
    targets = torch.randint(0, 67, (2, 20), generator=draw)
    logits = stage(tokens, begins_of())
    stage.loss_sum(logits, targets).backward()
    together = gradients(stage)
    for row, places in enumerate(BEGINS):
        for begin, end in pairwise([*places, 20]):
            alone = stage(tokens[row : row + 1, begin:end])
            torch.testing.assert_close(alone, logits[row : row + 1, begin:end])
            stage.loss_sum(alone, targets[row : row + 1, begin:end]).backward()
    for parameter, gradient in gradients(stage).items():
        torch.testing.assert_close(gradient, together[parameter], rtol=1e-4, atol=1e-5)
    whole = torch.zeros_like(begins_of())
    whole[:, 0] = True
    torch.testing.assert_close(stage(tokens, whole), stage(tokens))


def test_positions_and_lengths() -> None:
    begins = begins_of()
    assert positions_of(begins)[0].tolist() == [*range(7), 0, *range(12)]
    lengths = cumulative_lengths(begins, torch.device("cpu"))
    assert lengths.tolist() == [0, 7, 8, 20, 33, 40, 40, 40, 40]
    assert lengths.dtype == torch.int32
    seen = piece_mask(begins, 3, torch.device("cpu"))[0, 0]
    assert seen[12].nonzero().flatten().tolist() == [10, 11, 12]
    assert seen[8].nonzero().flatten().tolist() == [8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_varlen_is_the_mask(name: str) -> None:
    """On CUDA attention over lengths gives what the block-diagonal mask gives."""
    device = torch.device("cuda")
    model = MODELS[name] if name == "gpt2" else {**MODELS[name], "hidden_size": 64}
    config = load_config(ModelSection(config=model))
    family = family_of(config)
    layers = family.num_layers(config)
    tokens = torch.randint(0, 67, (2, 20), generator=torch.Generator().manual_seed(0)).to(device)
    logits = []
    for dtype in (torch.bfloat16, torch.float32):
        stage = build_stage(config, range(layers), None, device, dtype, "selective")
        names = list(family.parameter_specs(config))
        stage.weights.load(dict(initial_parameters(config, names, 0)))
        out = stage(tokens, begins_of())
        stage.loss_sum(out, tokens).backward()
        logits.append(out.float())
    torch.testing.assert_close(logits[0], logits[1], rtol=0.05, atol=0.05)
