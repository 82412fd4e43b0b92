"""What autograd keeps of a block, predicted against counted, for every family."""

import functools
from itertools import product

import pytest
import torch

from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.specs.model_spec import model_spec_from_config
from autohet.runtime.models.stages.stage import StageModel, build_stage
from autohet.runtime.models.thread_group import run_ranks
from planner.cost.memory.training_bytes import TokensOnRank, memory_terms
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import RECOMPUTE_CHOICES, Recompute
from tests.harness.live_memory import LiveMemory
from tests.harness.selection import one_of_each
from tests.harness.tiny_models import AUTO, MIXTURES, TINY, tiny_config

FORMULAS = ["gpt2", "llama", "llama-grouped", "mistral", "mistral, windowed", "qwen2", "qwen3"]
FAMILIES = [*FORMULAS, *AUTO]
SEQUENCES, LENGTH = 2, 32
WITHOUT_WINDOW = {"sliding_window": None, "use_sliding_window": False}


def planned(name: str) -> dict[str, object]:
    """The tiny config of a family, with a window shorter than the sequences only where its name
    says so.
    """
    if name == "qwen3, one key-value head":
        return {**TINY["qwen3"], "num_key_value_heads": 1}
    if name == "mistral, windowed":
        return {**TINY["mistral"], "sliding_window": LENGTH // 4, "num_key_value_heads": 2}
    if name == "qwen3_moe":
        return {**TINY[name], "mlp_only_layers": []}
    if name in ("deepseek_v3", "gpt_oss"):
        return dict(TINY[name])
    if name in AUTO:
        return {**TINY[name], "sliding_window": 2 * LENGTH}
    return {
        **TINY[name],
        **{key: value for key, value in WITHOUT_WINDOW.items() if key in TINY[name]},
    }


@functools.cache
def spec_of(name: str, precision: str) -> ModelSpec:
    """Return the spec of a family, which takes seconds to count and knows no recomputation."""
    return model_spec_from_config(name, planned(name), precision=precision)


def stage(
    name: str, layers: int, precision: str, recompute: Recompute, tp: TensorParallel | None = None
) -> StageModel:
    config = tiny_config(name.split(",")[0], **planned(name))
    model = build_stage(
        config, range(layers), tp, torch.device("cpu"), COMPUTE_DTYPES[precision], recompute
    )
    model.weights.load(
        {path: 0.02 * torch.randn(shape) for path, shape in model.weights.local_shapes().items()}
    )
    return model


def kept_bytes(model: StageModel) -> int:
    """Alive after the forward pass, with the output."""
    tokens = torch.randint(0, 60, (SEQUENCES, LENGTH))
    model(tokens)  # masks and rotary tables are made once
    with LiveMemory([*model.parameters(), *model.inputs.tensors()]) as memory:
        out = model(tokens)
    assert out.requires_grad
    return memory.bytes


CASES = [
    (name, precision, recompute)
    for name, precision, recompute in product(FAMILIES, ("fp32", "bf16"), RECOMPUTE_CHOICES)
    if recompute != "offload" and (name in FORMULAS or precision == "bf16" or recompute == "none")
]
"""All of the families that most others are like; of the others recomputation in one precision."""


@pytest.mark.parametrize(("name", "precision", "recompute"), one_of_each(CASES))
def test_a_block_keeps_what_the_planner_predicts(
    name: str, precision: str, recompute: Recompute
) -> None:
    """By two stages of which one has a block more: the rest of what they keep is equal."""
    one, two = (kept_bytes(stage(name, layers, precision, recompute)) for layers in (1, 2))
    spec = spec_of(name, precision)
    parameters = framework_parameters(OURS, CostParameters())
    on_rank = TokensOnRank(SEQUENCES * LENGTH, LENGTH, precision, 1)
    terms = memory_terms(spec, on_rank, recompute, parameters)
    predicted = terms.activation_bytes[2]  # of the second block, after the embedding's
    if name in MIXTURES and precision == "fp32":  # counted in bf16, with its copies in fp32
        assert two - one <= predicted < 1.25 * (two - one)
    else:
        assert predicted == pytest.approx(two - one, rel=0.02)


def test_inputs_in_host_memory_are_all_that_blocks_leave() -> None:
    """On the CPU the copies count as well, and nothing but them may be there."""
    one, two = (kept_bytes(stage("llama", layers, "bf16", "offload")) for layers in (1, 2))
    spec = spec_of("llama", "bf16")
    assert two - one == SEQUENCES * LENGTH * spec.hidden_size * 2
    on_rank = TokensOnRank(SEQUENCES * LENGTH, LENGTH, "bf16", 1)
    parameters = framework_parameters(OURS, CostParameters())
    assert not memory_terms(spec, on_rank, "offload", parameters).activation_bytes[1:-1].any()


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_rank_keeps_its_key_value_head_whole_where_others_hold_it_too(
    recompute: Recompute,
) -> None:
    """Four ranks with one head: what the planner says of activations and of parameters is what each
    has.
    """
    name = "qwen3, one key-value head"
    spec = spec_of(name, "fp32")
    on_rank = TokensOnRank(SEQUENCES * LENGTH, LENGTH, "fp32", 4)
    parameters = framework_parameters(OURS, CostParameters())
    terms = memory_terms(spec, on_rank, recompute, parameters)

    def work(tp: TensorParallel) -> tuple[int, int, int]:
        one, two = (stage(name, layers, "fp32", recompute, tp) for layers in (1, 2))
        block = sum(
            p.numel() for path, p in two.weights.local_parameters().items() if ".layers.1." in path
        )
        return kept_bytes(one), kept_bytes(two), block

    for one, two, block in run_ranks(4, work):
        assert terms.activation_bytes[1] == pytest.approx(two - one, rel=0.02)
        assert spec.blocks[1].parameters_per_worker(4) == pytest.approx(
            block, rel=0.05
        )  # widths that do not divide
