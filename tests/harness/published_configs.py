"""Key sets of published config.json files, with the sizes of tiny models.

The keys, and the values that decide more than a size, are those of the files as published; sizes
are shrunk by `shrunk`. `EXPECTED_REFUSALS` names the files that no family here can train.
"""

from typing import Any

from autohet.runtime.models.layers.experts import EXPERT_COUNTS
from tests.harness.published_decoders import PUBLISHED_DECODERS

LLAMA_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_2 = LLAMA_1 | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "transformers_version": "4.31.0.dev0",
}
LLAMA_3 = LLAMA_2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_3_1 = LLAMA_3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-7b": LLAMA_1 | {"max_sequence_length": 2048, "pad_token_id": -1},
    "llama-7b-huggyllama": LLAMA_1 | {"max_position_embeddings": 2048, "pad_token_id": 0},
    "vicuna-7b-v1.3": LLAMA_1
    | {"_name_or_path": "vicuna-7b-v1.3", "max_position_embeddings": 2048, "pad_token_id": 0},
    "alpaca-native": LLAMA_1 | {"max_sequence_length": 2048, "pad_token_id": 31999},
    "llama-2-7b": LLAMA_2,
    "llama-2-70b": LLAMA_2 | {"num_key_value_heads": 8, "intermediate_size": 28672},
    "codellama-7b": LLAMA_2 | {"rope_theta": 1000000, "vocab_size": 32016},
    "yarn-llama-2-7b-64k": LLAMA_2
    | {
        "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
        "rope_scaling": {
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
            "finetuned": True,
        },
    },
    "longchat-7b-16k": LLAMA_2 | {"rope_scaling": {"factor": 8.0, "type": "linear"}},
    "llama-dynamic-ntk": LLAMA_2 | {"rope_scaling": {"factor": 4.0, "type": "dynamic"}},
    "llama-3-8b": LLAMA_3,
    "llama-3.1-8b-instruct": LLAMA_3_1,
    "llama-3.2-1b": LLAMA_3_1
    | {
        "eos_token_id": 128001,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
        "_commit_hash": "4e20de362430cd3b72f300e6b0f18e50e7166e08",
    },
    "tinyllama-1.1b": LLAMA_2 | {"num_key_value_heads": 4, "attention_bias": False},
    "smollm-135m": LLAMA_3
    | {
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "smollm2-1.7b-instruct": LLAMA_3
    | {
        "pad_token_id": 2,
        "rope_interleaved": False,
        "is_llama_config": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "tie_word_embeddings": True,
    },
    "yi-6b": LLAMA_2
    | {"num_key_value_heads": 4, "pad_token_id": 0, "rope_theta": 5000000.0, "vocab_size": 64000},
    "deepseek-llm-7b": LLAMA_2 | {"attention_bias": False, "vocab_size": 102400},
    "deepseek-r1-distill-llama-8b": LLAMA_3_1,
    "deepseek-coder-6.7b": LLAMA_2
    | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
    "internlm2-converted-to-llama": LLAMA_2
    | {"attn_implementation": "eager", "bias": False, "rope_theta": 1000000, "pad_token_id": 2},
    "solar-10.7b": LLAMA_2 | {"pad_token_id": 2, "num_key_value_heads": 8},
    "openllama-3b": LLAMA_1 | {"max_position_embeddings": 2048, "pad_token_id": 0},
    "granite-code-3b": LLAMA_2
    | {
        "attention_bias": True,
        "attention_dropout": 0.1,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "llama-with-a-left-over-window": LLAMA_2 | {"sliding_window": 4096, "layer_types": None},
    "merged-by-mergekit": LLAMA_3
    | {"rope_interleaved": False, "unsloth_fixed": True, "unsloth_version": "2024.9"},
    "clex-7b-16k": LLAMA_2
    | {
        "auto_map": {"AutoConfig": "configuration_clex.CLEXLlamaConfig"},
        "log_scale": False,
        "use_flashattn": True,
        "rope_scaling": {"max_factor": 16, "param_factor": 1, "type": "clex", "factor": 1},
    },
    "llama-sequence-classifier": LLAMA_2
    | {"id2label": {"0": "NEG", "1": "POS"}, "label2id": {"NEG": 0, "POS": 1}},
    "mistral-7b-v0.1": MISTRAL,
    "mistral-7b-instruct-v0.2": MISTRAL
    | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None},
    "mistral-7b-v0.3": MISTRAL
    | {"head_dim": 128, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "zephyr-7b-beta": MISTRAL
    | {"_name_or_path": "dpo", "pad_token_id": 2, "attention_dropout": 0.0, "max_length": 20},
    "mistral-nemo-base": MISTRAL
    | {"head_dim": 128, "sliding_window": None, "rope_theta": 1000000.0, "vocab_size": 131072},
    "qwen1.5-0.5b": {key: value for key, value in QWEN2.items() if key != "use_mrope"}
    | {"max_window_layers": 21, "num_key_value_heads": 16, "tie_word_embeddings": True},
    "qwen2-7b-instruct": QWEN2 | {"tie_word_embeddings": False, "sliding_window": 131072},
    "qwen2.5-0.5b": QWEN2,
    "qwen2.5-7b-1m": QWEN2
    | {
        "tie_word_embeddings": False,
        "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
    },
    "qwen2.5-yarn": QWEN2
    | {
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "tie_word_embeddings": False,
    },
    "qwen2-with-windows": QWEN2 | {"use_sliding_window": True, "max_window_layers": 1},
    "deepseek-r1-distill-qwen-1.5b": QWEN2 | {"tie_word_embeddings": False},
    "qwen3-0.6b": QWEN3,
    "qwen3-8b": QWEN3 | {"tie_word_embeddings": False, "max_window_layers": 36},
    "qwen3-5.x": {k: v for k, v in QWEN3.items() if k not in ("rope_theta", "rope_scaling")}
    | {
        "dtype": "bfloat16",
        "layer_types": ["full_attention"],
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "transformers_version": "5.0.0",
    },
    "gpt2": GPT2,
    "gpt2-xl": GPT2 | {"output_past": True},
    "distilgpt2": GPT2
    | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "n_layer": 6}
    | {"label2id": {"LABEL_0": 0}, "summary_first_dropout": 0.1},
    "dialogpt-small": GPT2 | {"task_specific_params": {"conversational": {"max_length": 1000}}},
    "gpt2-cerebras": GPT2
    | {
        "n_inner": 3072,
        "activation_function": "gelu",
        "reorder_and_upcast_attn": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "use_cache": True,
        "torch_dtype": "float32",
        "transformers_version": "4.30.0",
    },
    "gpt2-stanford-mistral": GPT2
    | {
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
        "gradient_checkpointing": False,
    },
    "phi-2": {
        "model_type": "phi",
        "architectures": ["PhiForCausalLM"],
        "partial_rotary_factor": 0.4,
    },
    "gemma-2b": {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
    "internlm2-7b": {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "moonlight-16b-a3b": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 50304,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
PUBLISHED |= PUBLISHED_DECODERS | MIXTURES

EXPECTED_REFUSALS = {
    "phi-2": "phi",
    "gemma-2b": "gemma",
    "internlm2-7b": "internlm2",
    "clex-7b-16k": "clex",
}
"""Name -> word of the refusal. All others are to be equal to the library."""

_VOCABULARY = 67
_WINDOW = 5


def shrunk(name: str) -> dict[str, Any]:
    """A published config with the sizes of a tiny model; no other value differs, but windows are
    shorter than the sequences of the tests, and token ids lie in the vocabulary.
    """
    config = dict(PUBLISHED[name])
    if name in EXPECTED_REFUSALS and config["model_type"] not in ("llama", "gpt2"):
        return config
    if config["model_type"] == "gpt2":
        sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "n_ctx": 32}
        return _with_small_ids(config | sizes)
    groups = config.get("num_key_value_heads", 0)
    sizes = {"hidden_size": 32, "intermediate_size": 50, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2}
    if groups:
        sizes["num_key_value_heads"] = 4 if groups == config["num_attention_heads"] else 2
    config |= sizes
    if name in MIXTURES:
        config |= {"intermediate_size": 48}  # grouped products take rows of 16 bytes
        key = next(each for each in EXPERT_COUNTS if each in config)
        config |= {key: 16, "num_experts_per_tok": 2}
    if config.get("kv_lora_rank"):
        config |= {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
        config |= {"v_head_dim": 10, "q_lora_rank": config["q_lora_rank"] and 12}
        config |= {"first_k_dense_replace": 1}
    if config.get("moe_intermediate_size"):
        config["moe_intermediate_size"] = 16
    if config.get("head_dim"):
        config["head_dim"] = 16
    if config.get("sliding_window"):
        config["sliding_window"] = _WINDOW
    for key in ("layer_types", "no_rope_layers"):
        if config.get(key):
            config[key] = (config[key] * 2)[:2]
    return _with_small_ids(config)


def _with_small_ids(config: dict[str, Any]) -> dict[str, Any]:
    small = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        if isinstance(value, list):
            small[key] = [each % _VOCABULARY for each in value]
        elif value is not None:
            small[key] = value if value == -1 else value % _VOCABULARY
    return config | small | {"vocab_size": _VOCABULARY}
