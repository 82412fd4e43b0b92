"""Config of a job's model, as transformers reads it and as the stages need it."""

import copy
import difflib
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autohet.runtime.job import ModelSection, TrainingSection
from autohet.runtime.models.adapter_files import adapter_base, is_adapter_alone, take_stored
from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import (
    WITHOUT_EFFECT,
    check_rope,
    check_window,
    known_keys,
    settle_keys,
)
from autohet.runtime.models.error_text import first_line
from autohet.runtime.models.layers.adapters import Adapter, adapter_of, set_adapter
from autohet.runtime.models.layers.dropout import set_dropout
from autohet.runtime.models.layers.experts import check_experts
from autohet.runtime.models.parameter_spec import (
    MUON,
    STORED_ROWS,
    grow_vocabulary,
    pad_vocabulary,
)
from autohet.runtime.models.pretrained import quantization_of, settle_weights
from autohet.runtime.models.registry import (
    FAMILIES,
    LINKED_LAYERS,
    family_of,
    import_family,
    untrained_error,
    used_keys,
)
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json

logger = logging.getLogger(__name__)


def use_family(source: ModelSection) -> None:
    """Register the family that `model.family` names in this process; no-op without one.

    Raises:
        ConfigError: it cannot be imported, is no Family, is of another model type, or the library
        has no plans to derive it from.
    """
    name = source.family
    if name is None:
        return
    document = source.config
    if document is None:
        document = _read_document(str(source.pretrained), source.revision)
    model_type = str(document.get("model_type"))
    if name != "auto":
        FAMILIES[model_type] = import_family(name, model_type)
    elif str(model_type).startswith(LINKED_LAYERS):
        raise untrained_error(model_type)
    elif model_type not in FAMILIES:
        _from_document(dict(document), "model.config")  # names an unknown type
        FAMILIES[model_type] = auto_family(model_type)


def load_config(source: ModelSection, training: TrainingSection | None = None) -> PreTrainedConfig:
    """Return the transformers config of a job's model.

    Its own dropout keys are 0: stages drop by `dropout.dropout_of(config)`, other modules nothing.
    The optimizer of `training` decides the kinds of state of each parameter; None: AdamW.

    Raises:
        ConfigError: the model type is unknown, a value is wrong, or the checkpoint cannot be read.
    """
    use_family(source)
    if source.config is not None and source.config.get("model_type") not in FAMILIES:
        raise untrained_error(source.config.get("model_type"))
    config = _read_source(source)
    _check_architecture(config)
    dropout = family_of(config).take_dropout(config)
    if source.dropout:
        set_dropout(config, dropout)
        if dropout.attention:
            _warn_of_attention_dropout(dropout.attention)
    config._attn_implementation = family_of(config).stock_attention
    pad_vocabulary(config, source.vocabulary_multiple)
    _set_adapter(config, source)
    if training is not None and training.optimizer == "muon":
        setattr(config, MUON, list(training.muon_exempt))
    return config


@cache
def _warn_of_attention_dropout(rate: float) -> None:
    """Log, once per process, the price of dropout of attention weights."""
    logger.warning(
        "The model's config drops attention weights with probability %g: attention trains without"
        " fused kernels, several times slower; model.dropout: false trains without dropout",
        rate,
    )


def _set_adapter(config: PreTrainedConfig, source: ModelSection) -> None:
    """Put the source's adapter into the config; no-op without one."""
    section = source.adapter
    text_path = ""
    if section is not None:
        section = take_stored(section, config)
        if source.pretrained is not None:
            text_path = _text_path(source.pretrained, source.revision)
    set_adapter(config, section, source.pretrained, source.revision, text_path)
    adapter = adapter_of(config)
    if adapter is None:
        return
    _check_new_tokens(config, adapter)


def _check_new_tokens(config: PreTrainedConfig, adapter: Adapter) -> None:
    """Raise ConfigError if new tokens have rows that the adapter neither trains nor stores."""
    if not hasattr(config, STORED_ROWS):
        return
    family = family_of(config)
    names = {family.token_embedding}
    if not family.tied_head(config):
        names.add(family.head)
    lacking = sorted(name for name in names if not adapter.saves(f"{name}.weight"))
    if lacking:
        raise ConfigError(
            f"model.vocabulary_size adds tokens, but the adapter neither trains nor stores their"
            f" rows of {' and '.join(lacking)}; name them in model.adapter.modules_to_save"
        )


def saved_document(source: ModelSection) -> Document:
    """Return the config that a checkpoint of this model carries.

    It has the source's own values (`use_cache`, dropouts), and the rows that pad the vocabulary.
    """
    config = _read_source(source)
    pad_vocabulary(config, source.vocabulary_multiple)
    _set_adapter(config, source)
    return config.to_dict()


def _read_source(source: ModelSection) -> PreTrainedConfig:
    if source.config is not None:
        return read_config(source.config, source.revision)
    config = read_config(str(source.pretrained), source.revision)
    grow_vocabulary(config, source.vocabulary_size)
    return config


def read_config(source: Json | str | Path, revision: str | None = None) -> PreTrainedConfig:
    """Return the transformers config of any causal language model.

    `source` is a mapping with `model_type`, a directory, or a hub id. The config of a trainable
    family has no left-over keys. The config of a checkpoint describes its weights as they are read:
    without quantization, and with the head tied only if it is.

    Raises:
        ConfigError: the model type is unknown, a value is wrong, or there is no config at the place
        named.
    """
    is_mapping = isinstance(source, Mapping)
    where = "model.config" if is_mapping else f"model.pretrained '{source}'"
    if isinstance(source, Mapping):
        document = dict(source)
    else:
        document = _read_document(str(source), revision)
    config = _from_document(document, where)
    if config.model_type not in FAMILIES:
        if not is_mapping:
            return config
        _warn_of_unknown(config, document)
        return _without_quantization(config)
    settle_keys(config, document, where, used_keys(config.model_type), typed_by_hand=is_mapping)
    check_window(config, where)
    check_rope(config, where)
    if not is_mapping:
        settle_weights(str(source), config, family_of(config), revision)
    return _without_quantization(config)


def _warn_of_unknown(config: PreTrainedConfig, document: Json) -> None:
    """Log the keys of a document that mean nothing to a config that no family describes."""
    unknown = sorted(set(document) - known_keys(config, frozenset()) - WITHOUT_EFFECT)
    if unknown:
        logger.warning(
            "model.config: %s has no key %s; the default is used",
            config.model_type,
            ", ".join(unknown),
        )


def _read_document(source: str, revision: str | None) -> Document:
    """Read the config.json of a directory or hub id; of a multimodal model, its text part's."""
    return _text_document(_read_whole_document(source, revision), source)


def _read_whole_document(source: str, revision: str | None) -> Document:
    problem = (
        f"the config.json of '{source}' names no model_type; name a directory that transformers'"
        " AutoModelForCausalLM loads"
    )
    document: Document = {}
    try:
        document = PreTrainedConfig.get_config_dict(source, revision=revision or "main")[0]
    except (OSError, ValueError) as error:
        # A JSONDecodeError is a ValueError.
        place = "the directory" if Path(source).is_dir() else "the hub id or directory"
        problem = f"{place} '{source}' has no readable config: {first_line(error)}"
    if not document.get("model_type") or is_adapter_alone(source):
        base = adapter_base(source, revision)
        if base is not None:
            problem = (
                f"'{source}' is an adapter of {base}; name that model as model.pretrained, and the"
                " adapter as model.adapter.from"
            )
        raise ConfigError(f"model.pretrained: {problem}")
    return document


def _multimodal_config(document: Document, source: str) -> PreTrainedConfig | None:
    """Return the config of a multimodal model's document; None for that of a text model."""
    model_type = str(document["model_type"])
    if model_type in FAMILIES or model_type not in CONFIG_MAPPING:
        return None
    if "text_config" not in CONFIG_MAPPING[model_type].sub_configs:
        return None
    return _from_document(document, f"model.pretrained '{source}'")


@cache
def _text_path(source: str, revision: str | None) -> str:
    """Return the path of the text model in a multimodal model; empty if `source` is none."""
    config = _multimodal_config(_read_whole_document(source, revision), source)
    if config is None:
        return ""
    try:
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
            kind = type(
                AutoModel.from_config(config.get_text_config(decoder=True), trust_remote_code=False)
            )
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        logger.warning("Exported adapters will have names of the text part: %s", first_line(error))
        return ""
    found = [path for path, module in whole.named_modules() if isinstance(module, kind)]
    return found[0] if found else ""


def _text_document(document: Document, source: str) -> Document:
    """Return the config of a multimodal model's text part; that of a text model is returned as is.

    source: place of the model, for messages.
    """
    config = _multimodal_config(document, source)
    if config is None:
        return document
    text = config.get_text_config(decoder=True)
    family = FAMILIES.get(text.model_type)
    if family is not None and not family.logit_adjustment(text).changes_nothing:
        raise ConfigError(
            f"model.pretrained '{source}': its text part ({text.model_type}) scales or caps its"
            f" logits, and transformers' {config.model_type} does not; save the text model that you"
            " mean, and name that directory"
        )
    found: Document = {**text.to_dict(), "model_type": text.model_type}
    # The library ties by the outer config, older releases by the inner; files say if both are so.
    # The text part of Qwen 3 VL has no such key.
    is_tied = config.tie_word_embeddings or getattr(text, "tie_word_embeddings", False)
    found["tie_word_embeddings"] = bool(is_tied)
    quantization = quantization_of(document)
    if quantization:
        found["quantization_config"] = quantization
    _log_text_part(source, str(config.model_type), text.model_type)
    return found


@cache
def _log_text_part(source: str, model_type: str, text_type: str) -> None:
    """Log, once per process, that no other part of a multimodal model is trained and saved."""
    logger.info(
        "model.pretrained '%s' is a %s: its text part (%s) alone is trained and saved",
        source,
        model_type,
        text_type,
    )


def _from_document(document: Document, where: str) -> PreTrainedConfig:
    """Build a config as `AutoConfig` builds it from a config.json."""
    model_type = str(document.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, CONFIG_MAPPING.keys(), n=1)
        hint = "name one such as llama, qwen3, mistral, gpt2 or opt"
        if near:
            hint = f"did you mean {near[0]}?"
        raise ConfigError(f"{where}: model_type '{model_type}' is unknown to transformers; {hint}")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(document))
    except (TypeError, ValueError, KeyError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigError(
            f"{where} is no valid {model_type} config: {' '.join(str(error).split())}"
        ) from None
    return config


def _without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove the quantization settings: weights are dequantized on reading, and saved so."""
    config.__dict__.pop("quantization_config", None)
    return config


def _check_architecture(config: PreTrainedConfig) -> None:
    family_of(config).check(config)
    check_experts(config)
    heads = int(config.num_attention_heads)
    hidden = int(config.hidden_size)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % groups:
        raise ConfigError(
            f"num_key_value_heads {groups} does not divide num_attention_heads {heads}; choose a"
            " divisor"
        )
    if hidden % heads and getattr(config, "head_dim", None) is None:
        raise ConfigError(
            f"num_attention_heads {heads} does not divide hidden_size {hidden}; choose a divisor"
        )
