"""The library's model without storage."""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from autohet.runtime.models.error_text import first_line
from autohet.runtime.models.layers.attention import IMPLEMENTATION
from autohet.runtime.models.layers.experts import own_correction_bias
from planner.errors import ConfigError


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the library's model without storage, on the meta device.

    It gets a copy of the config: the library writes into its config, and models of one config may
    use different attention implementations.
    """
    config = copy.deepcopy(config)
    config.use_cache = False
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=IMPLEMENTATION,
                dtype=torch.float32,
                trust_remote_code=False,
            )
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"transformers builds no {config.model_type} from this config: {first_line(error)}"
        ) from error
    own_correction_bias(model)
    return model
