"""The config.json of an export, as the library would have saved it.

It has the spellings of transformers 4.x and 5, vLLM and llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from autohet.runtime.models.layers.adapters import ADAPTER
from autohet.runtime.models.parameter_spec import PADDED

_LEFT_OUT = (ADAPTER, PADDED, "_name_or_path", "_attn_implementation", "quantization_config")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_to_export(document: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config.json of a model whose config is `document` and whose weights have `dtype`.

    transformers 4.x reads `rope_theta`, `rope_scaling` and `torch_dtype`. transformers 5 reads
    `rope_parameters` and `dtype`, and accepts the older keys as synonyms.
    """
    config = {key: value for key, value in document.items() if key not in _LEFT_OUT}
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(document["model_type"]))
    if architecture is not None:
        config["architectures"] = [architecture]
    config.update(_older_rope(config))
    config["dtype"] = dtype
    config["torch_dtype"] = dtype
    config["transformers_version"] = transformers.__version__
    return config


def _older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(config.get("rope_parameters") or {})
    if not parameters:
        return {}

    older: dict[str, Any] = {}
    theta = parameters.pop("rope_theta", None)
    if theta is not None:
        older["rope_theta"] = theta

    is_default = parameters.get("rope_type", "default") == "default"
    older["rope_scaling"] = None if is_default else parameters
    return older


def default_generation_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation_config.json that the library saves for a model without one."""
    ids = {key: document[key] for key in _TOKEN_IDS if document.get(key) is not None}
    return {"_from_model_config": True, **ids, "transformers_version": transformers.__version__}
