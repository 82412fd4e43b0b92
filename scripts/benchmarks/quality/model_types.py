"""Which causal model types of transformers `model.family: auto` trains: results/model_types.json.

    python -m scripts.benchmarks.quality.model_types [TYPE ...]     default: all that have a plan for pipelines

Each type's tiny config is proved as `autohet check-model` proves a job's (cut at every layer, TP 1, 2 and 4). A type that is not derived, or differs, is recorded with its reason.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.proof import prove_model
from autohet.runtime.models.registry import FAMILIES
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "model_types.json"
LIMIT_S = 120
"""Processor seconds for a type."""
HIDDEN = 64
HEADS = 4
SIZES = {
    "hidden_size": HIDDEN,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "num_hidden_layers": 4,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "index_n_heads"), HEADS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("moe_num_experts", "sliding_window", "index_topk"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_dense_layers"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a small config of a type, with each of its kinds of layers and without dropout."""
    usual = CONFIG_MAPPING[model_type]().to_dict()
    document: dict[str, Any] = {key: size for key, size in SIZES.items() if key in usual}
    if "qk_rope_head_dim" in usual:
        document.pop("head_dim", None)
    for key, value in usual.items():
        if "dropout" in key and isinstance(value, float):
            document[key] = 0.0
        if key.endswith("layer_types") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            document[key] = (kinds * SIZES["num_hidden_layers"])[: SIZES["num_hidden_layers"]]
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**document)
    return config


def judge(model_type: str) -> dict[str, Any]:
    """Return the outcome of a type's proof."""
    if model_type not in FAMILIES:
        FAMILIES[model_type] = auto_family(model_type)
    config = tiny_config(model_type)
    config._attn_implementation = FAMILIES[model_type].stock_attention
    proof = prove_model(config)
    worst = max(proof.cases, key=lambda case: case.error)
    degrees = sorted({case.tp_degree for case in proof.cases})
    return {"passed": proof.passed, "tp_degrees": degrees, "largest_error": worst.error}


def _give_up(*_: Any) -> None:
    raise TimeoutError(f"no answer within {LIMIT_S} processor seconds")


def main(wanted: list[str]) -> None:
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGPROF, _give_up)
    known = [each for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if each in CONFIG_MAPPING]
    planned = [each for each in known if getattr(CONFIG_MAPPING[each], "base_model_pp_plan", None)]
    found: dict[str, Any] = {}
    for model_type in wanted or planned:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            found[model_type] = judge(model_type)
        except Exception as error:  # noqa: BLE001
            found[model_type] = {"passed": False, "reason": str(error).splitlines()[0]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(model_type, found[model_type], flush=True)
    if wanted:
        return
    passed = [name for name, outcome in found.items() if outcome["passed"]]
    document = {
        "what": __doc__,
        **provenance(),
        "causal_types": len(known),
        "types_with_a_pipeline_plan": len(planned),
        "passed": len(passed),
        "types": found,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
