"""Tiny models of every family, the library's own model as judge, and stages chained in one
process.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.families import BUILT_IN
from autohet.runtime.models.layers.experts import CORRECTION_BIAS
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.parameter_spec import WHOLE, ParameterSpec, local_units, take_units
from autohet.runtime.models.quantized.weight import held_as, quantize
from autohet.runtime.models.registry import family_of, stage_parameter_names
from autohet.runtime.models.stages.stage import StageModel, build_stage
from planner.plans.plan import Recompute, TensorShare

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA: dict[str, Any] = {
    **LLAMA_LIKE,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "layer_types": _SLIDING_THEN_FULL,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 3,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_DELTA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    "pad_token_id": 3,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_NO_SPECIAL_TOKENS: dict[str, Any] = {
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
AUTO: dict[str, dict[str, Any]] = {
    "cohere2": {
        "model_type": "cohere2",
        **LLAMA_LIKE,
        "num_key_value_heads": 2,
        "logit_scale": 0.3,
        "layer_types": _SLIDING_THEN_FULL,
        "sliding_window": 5,
        "attention_bias": True,
        "pad_token_id": 0,
        "bos_token_id": 5,
        "eos_token_id": 6,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LLAMA_LIKE,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "attention_bias": True,
        "rope_interleave": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "original_max_position_embeddings": 8,
        },
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "pad_token_id": 5,
    },
    "gemma2": {"model_type": "gemma2", **_GEMMA, "attention_bias": True},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
        },
    },
    "glm4": {
        "model_type": "glm4",
        **LLAMA_LIKE,
        **_NO_SPECIAL_TOKENS,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "granite": {
        "model_type": "granite",
        **LLAMA_LIKE,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **LLAMA_LIKE,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "layer_types": _SLIDING_THEN_FULL,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.4,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
        "pad_token_id": 5,
    },
    "mixtral": {
        "model_type": "mixtral",
        **LLAMA_LIKE,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
    "olmoe": {
        "model_type": "olmoe",
        **LLAMA_LIKE,
        "intermediate_size": 48,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "attention_bias": True,
        "pad_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **LLAMA_LIKE, **_DELTA, "attention_bias": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **LLAMA_LIKE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
        "attention_bias": True,
    },
    "olmo2": {
        "model_type": "olmo2",
        **LLAMA_LIKE,
        "attention_bias": True,
        "pad_token_id": 1,
        "eos_token_id": 2,
    },
    "phi3": {
        "model_type": "phi3",
        **LLAMA_LIKE,
        **_NO_SPECIAL_TOKENS,
        "sliding_window": 5,
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [1.0, 4.0],
        },
    },
    "smollm3": {
        "model_type": "smollm3",
        **LLAMA_LIKE,
        **_NO_SPECIAL_TOKENS,
        "num_key_value_heads": 2,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        **LLAMA_LIKE,
        **_NO_SPECIAL_TOKENS,
        "num_key_value_heads": 2,
        "sliding_window": 5,
        "use_bias": True,
        "norm_epsilon": 1e-3,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
    },
}
"""Of the families that are read off the library's plans: every special field that published configs
have, at a value that shows.
"""
AUTO |= {
    name: {"model_type": name, **family.example}
    for name, family in BUILT_IN.items()
    if family.example is not None
}
MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")
"""Families with experts."""
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA_LIKE},
    "llama-biased-tied": {
        "model_type": "llama",
        **LLAMA_LIKE,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "pad_token_id": 61,
    },
    "llama-grouped": {
        "model_type": "llama",
        **LLAMA_LIKE,
        "num_key_value_heads": 2,
        "pad_token_id": 3,
    },
    "qwen2": {
        "model_type": "qwen2",
        **LLAMA_LIKE,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **LLAMA_LIKE, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **LLAMA_LIKE, "head_dim": 16, "sliding_window": 5},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 67,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
    },
    "gpt2-untied": {
        "model_type": "gpt2",
        "vocab_size": 67,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        "tie_word_embeddings": False,
    },
    **AUTO,
    "deepseek_v3-plain": {
        **AUTO["deepseek_v3"],
        "q_lora_rank": None,
        "rope_interleave": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "attention_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "n_shared_experts": 1,
    },
}


CHANGE_IN_PLACE = ("gemma2", "gemma3_text", "qwen3_5_text", "vaultgemma")
"""Models whose modules change tensors in place, which no rule of SPMD programs covers."""
CAPTURED = [
    name
    for name, config in TINY.items()
    if config["model_type"] not in (*MIXTURES, *CHANGE_IN_PLACE)
]
"""Models of whose graph SPMD programs are planned and trained."""


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    return load_config(ModelSection(config={**TINY[name], **changes}))


def random_parameters(config: PreTrainedConfig, seed: int = 0) -> dict[str, Tensor]:
    """Whole tensors with no structure to hide behind: norms are not 1, biases not 0."""
    generator = torch.Generator().manual_seed(seed)
    specs = family_of(config).parameter_specs(config)
    return {
        name: torch.randn(spec.shape, generator=generator) * 0.2 for name, spec in specs.items()
    }


def batch(config: PreTrainedConfig, sequences: int = 2, length: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens and targets; two targets count nothing, and the padding token, where there is one,
    occurs.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (sequences, length + 1), generator=generator)
    if config.pad_token_id is not None:
        tokens[0, 2] = tokens[1, 5] = config.pad_token_id
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].clone()
    targets[0, 3] = targets[1, 0] = -100
    return inputs, targets


def judge(
    config: PreTrainedConfig, parameters: Mapping[str, Tensor]
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, loss sum and gradients of the library's own model, which knows nothing of stages."""
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=family_of(config).stock_attention, dtype=torch.float32
    )
    unknown = model.load_state_dict(dict(parameters), strict=False).unexpected_keys
    assert not unknown
    inputs, targets = batch(config)
    logits = model(inputs).logits
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.item(), gradients | gradients_of_biases(model)


def gradients_of_biases(model: Any) -> dict[str, Tensor]:
    """No loss teaches the routers' correction biases, which are buffers of the library."""
    biases = {name: each for name, each in model.named_buffers() if name.endswith(CORRECTION_BIAS)}
    return {name: torch.zeros_like(bias) for name, bias in biases.items()}


def take(spec: ParameterSpec, whole: Tensor, share: TensorShare = WHOLE) -> Tensor:
    """The slice of a whole tensor that a rank with this share holds, as a copy."""
    return take_units(spec, local_units(spec, share), whole)


def stage_chain(
    config: PreTrainedConfig,
    parameters: Mapping[str, Tensor],
    cut: Sequence[int],
    tp: TensorParallel | None = None,
    recompute: Recompute = "none",
    dtype: torch.dtype = torch.float32,
) -> list[StageModel]:
    """Loaded stages of `cut` layers each."""
    specs = family_of(config).parameter_specs(config)
    share = WHOLE if tp is None else tp.share
    stages = []
    first = 0
    for num_layers in cut:
        layers = range(first, first + num_layers)
        stage = build_stage(config, layers, tp, torch.device("cpu"), dtype, recompute=recompute)
        names = stage_parameter_names(config, first, num_layers)
        slices: dict[str, Tensor] = {}
        for name in names:
            spec = specs[name]
            held = {name: parameters[name].to(dtype)}
            if spec.base_format is not None:
                held = quantize(spec, parameters[name])
            slices |= {part.name: take(part, held[part.name], share) for part in held_as(spec)}
        stage.weights.load(slices)
        stages.append(stage)
        first += num_layers
    return stages


def run_chain(
    config: PreTrainedConfig, stages: Sequence[StageModel]
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Local logits, loss sum, and this rank's gradients (summed where two stages hold one tied
    tensor).
    """
    inputs, targets = batch(config)
    borders = []
    hidden = inputs
    for stage in stages:
        given = hidden if stage.spec.is_first else hidden.detach().requires_grad_()
        hidden = stage(given)
        borders.append((given, hidden))
    loss = stages[-1].loss_sum(hidden, targets)
    loss.backward()
    for (_, out), (given, _) in reversed(list(itertools.pairwise(borders))):
        out.backward(given.grad)
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.weights.local_parameters().items():
            assert parameter.grad is not None, f"{name} got no gradient"
            gradients[name] = (
                gradients[name] + parameter.grad if name in gradients else parameter.grad
            )
    return hidden.detach(), loss.item(), gradients


def worst_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to that tensor's largest element, or to a
    thousandth of the largest of all where the tensor is near 0 (a bias of keys without positions
    has no gradient but noise).
    """
    assert set(found) == set(expected), set(found) ^ set(expected)
    largest = max(float(want.abs().max()) for want in expected.values())
    floor = 1e-3 * max(1.0, largest)
    return max(
        float((found[name] - want).abs().max() / want.abs().max().clamp(min=floor))
        for name, want in expected.items()
    )
