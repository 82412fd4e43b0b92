"""The config.json of an export, as the library would have saved it.

It has the spellings of transformers 4.x and 5, vLLM and llama.cpp's converter.
"""

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from autohet.runtime.models.layers.adapters import ADAPTER
from autohet.runtime.models.parameter_spec import PADDED, STORED_ROWS
from planner.inputs.documents import Document, Json

_LEFT_OUT = (
    ADAPTER,
    PADDED,
    STORED_ROWS,
    "_name_or_path",
    "_attn_implementation",
    "quantization_config",
)
_PREDICTION_LAYERS = ("mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers")
"""Numbers of layers beside the decoder's that predict further tokens: an export has none."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_to_export(document: Json, dtype: str) -> Document:
    """Return the config.json of a model whose config is `document` and whose weights have `dtype`.

    transformers 4.x reads `rope_theta`, `rope_scaling`, `partial_rotary_factor` and `torch_dtype`,
    and qwen3_moe's `num_experts`.
    transformers 5 reads `rope_parameters` and `dtype`, and accepts the older keys as synonyms.
    llama.cpp's converter reads `n_ctx` (gpt2) and `rotary_pct` (cohere2), which older releases had.
    """
    config = {key: value for key, value in document.items() if key not in _LEFT_OUT}
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(document["model_type"]))
    if architecture is not None:
        config["architectures"] = [architecture]
    config.update({key: 0 for key in _PREDICTION_LAYERS if key in config})
    config.update(_older_rope(config))
    if config["model_type"] == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    if config["model_type"] == "gpt2":
        config["n_ctx"] = config.get("n_positions")
    if config["model_type"] == "cohere2":
        config["rotary_pct"] = 1.0
    config["dtype"] = dtype
    config["torch_dtype"] = dtype
    config["transformers_version"] = transformers.__version__
    return config


def _older_rope(config: Json) -> Document:
    """Return the keys of transformers 4.x for a config's `rope_parameters`.

    `rope_scaling` must be complete, since transformers 5 takes it in place of `rope_parameters`.
    """
    parameters = dict(config.get("rope_parameters") or {})
    if not parameters:
        return {}

    older: Document = {}
    if parameters.get("full_attention"):
        # Parameters by kind of layer: 4.x has a base of its own for those with windows (gemma3).
        windows = parameters.get("sliding_attention") or {}
        if "rope_theta" in windows:
            older["rope_local_base_freq"] = windows["rope_theta"]
        parameters = dict(parameters["full_attention"])

    for key in ("rope_theta", "partial_rotary_factor"):
        value = parameters.pop(key, None)
        if value is not None:
            older[key] = value

    rope_type = parameters.pop("rope_type", "default")
    original = parameters.get("original_max_position_embeddings")
    if rope_type == "longrope" and original is not None:
        older["original_max_position_embeddings"] = original
    if rope_type == "default":
        older["rope_scaling"] = None
    elif config["model_type"] == "phi3":
        # 4.x takes this spelling of the type, and the two lists of factors, alone.
        parameters.pop("original_max_position_embeddings", None)
        older["rope_scaling"] = {"type": rope_type, **parameters}
    else:
        older["rope_scaling"] = {"rope_type": rope_type, **parameters}
    return older


def default_generation_config(document: Json) -> Document:
    """Return the generation_config.json that the library saves for a model without one."""
    ids = {key: document[key] for key in _TOKEN_IDS if document.get(key) is not None}
    return {"_from_model_config": True, **ids, "transformers_version": transformers.__version__}
