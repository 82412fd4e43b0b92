"""Model specs against the library's own parameter counts and the models' known shapes."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autohet.runtime.models.specs.model_spec import model_spec_from_config
from planner.cost.layers.roofline import LayerWork, block_seconds, device_rates
from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.inputs.catalogue import find_gpu_type
from planner.plans.model_spec import ExplicitScores
from tests.harness.published_configs import PUBLISHED

SMALL = {
    "gpt2": {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32},
    "llama": {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    },
    "qwen3": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    },
    "opt": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 32,
    },
    "gpt_neo": {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 100,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("model_type", sorted(SMALL))
def test_parameters_are_the_librarys_own(model_type):
    config = AutoConfig.for_model(model_type, **SMALL[model_type])
    with torch.device("cpu"):
        real = AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in {id(p): p for p in real.parameters()}.values())
    spec = model_spec_from_config("m", {"model_type": model_type} | SMALL[model_type])
    assert spec.parameters == expected
    assert spec.tied_embeddings == bool(
        real.get_output_embeddings().weight is real.get_input_embeddings().weight
    )
    assert spec.num_layers == config.num_hidden_layers
    assert len(set(spec.blocks)) == 1


def test_flops_of_a_llama_block_are_those_of_its_products():
    spec = model_spec_from_config("m", {"model_type": "llama"} | SMALL["llama"])
    weights = 64 * 64 * 2 + 2 * 64 * 16 + 3 * 64 * 96
    assert spec.blocks[0].forward_flops(10) == 2 * weights * 10 + 4 * 100 * 64
    assert spec.head.forward_flops(10) == 2 * 64 * 100 * 10
    assert (spec.max_tp_degree, spec.key_value_units) == (8, 2)
    assert spec.blocks[0].key_value_parameters == 2 * 64 * 16
    assert (
        spec.blocks[0].parameters_per_worker(8)
        == 2 * 64 + (weights - 2 * 64 * 16) / 8 + 2 * 64 * 16 / 2
    )


def test_scores_are_kept_where_attention_cannot_be_fused():
    config = {"model_type": "gpt2"} | SMALL["gpt2"]
    assert model_spec_from_config("m", config, precision="bf16").blocks[0].attention_heads == 0
    assert model_spec_from_config("m", config, precision="fp32").blocks[0].attention_heads == 4


def test_a_token_meets_only_the_experts_it_is_routed_to():
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 100,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    block = model_spec_from_config("m", config).blocks[0]
    experts = 4 * 3 * 64 * 96
    rest = 4 * 64 * 64 + 4 * 64
    assert block.parameters == pytest.approx(experts + rest, rel=0.01)
    assert block.matmul_parameters == pytest.approx(experts / 2 + rest, rel=0.01)


@pytest.mark.parametrize(
    "config", [{"model_type": "no-such-model"}, {"model_type": "vit"}, "/no/such/directory"]
)
def test_a_config_that_is_none_says_so(config, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError):
        model_spec_from_config("m", config)


def test_the_inner_width_of_experts_is_that_of_one() -> None:
    spec = model_spec_from_config("qwen", PUBLISHED["qwen3-30b-a3b"])
    assert spec.intermediate_size == 768
    assert len(spec.blocks) == 48
    assert spec.parameters == pytest.approx(30.5e9, rel=0.01), "as Qwen's technical report says"
    active = sum(block.matmul_parameters for block in spec.blocks) + 2 * 151936 * 2048
    assert active == pytest.approx(3.3e9, rel=0.02)


def test_scores_without_a_fused_kernel_cost_memory_and_time() -> None:
    """Soft-caps and dropout of attention weights: none of it is free."""
    gpt2 = {"model_type": "gpt2"} | SMALL["gpt2"]
    fused, drops = (
        model_spec_from_config("m", gpt2, precision="bf16", dropout=dropout).blocks[0]
        for dropout in (False, True)
    )
    assert fused.explicit_scores is None
    assert drops.explicit_scores == ExplicitScores(4, 8.0, 21.0, 160.0, 225.0)
    gemma2 = {"model_type": "gemma2", "num_hidden_layers": 2}
    spec = model_spec_from_config("m", gemma2)
    assert spec.blocks[0].explicit_scores == ExplicitScores(8, 8.0, 17.0, 60.0, 125.0)
    capped = spec.blocks[0]
    for name, dtype in (("T4", "fp16"), ("H100-80", "bf16")):
        device = find_gpu_type(name)
        assert device is not None
        plain, found = (
            block_seconds(device, LayerWork("block", each, dtype, 4096, 1, 2), CostParameters())
            for each in (replace(capped, explicit_scores=None), capped)
        )
        rates = device_rates(device, dtype, CostParameters())
        more_s = 4 * 4096**2 / 2 * 60.0 / rates.memory_bytes_per_s
        if name != "T4":
            more_s = 4 * 4096**2 / 2 * 8 / (device.fp32_flops / 4)
        assert found[0] - plain[0] == pytest.approx(more_s), "by chunks on a GPU without the kernel"
        assert found[1] > plain[1]
