"""Bases as they are published: text parts of multimodal models, MXFP4, fp8, and adapters.

The judge is transformers (and peft) on the same directory, which these libraries wrote.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AyaVisionConfig,
    Gemma3Config,
    Idefics3Config,
    LlavaConfig,
    Mistral3Config,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3VLConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autohet.runtime.job import AdapterSection, ModelSection
from autohet.runtime.models.config import load_config, saved_document
from autohet.runtime.models.registry import family_of
from autohet.runtime.state.export_config import config_to_export
from autohet.runtime.state.frozen import first_weights
from planner.errors import ConfigError
from tests.harness.tiny_models import TINY, stage_chain

TOLERANCE = 1e-5
TOKENS = torch.arange(3, 27).reshape(2, 12)
TEXT = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
DELTA = {
    "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DEEP_VISION = {"hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2}
GEMMA_TEXT = {**TEXT, "model_type": "gemma3_text", "sliding_window": 4}
MULTIMODAL: dict[str, Any] = {
    "gemma3": lambda: Gemma3Config(
        text_config={
            **GEMMA_TEXT,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        vision_config=VISION,
        mm_tokens_per_image=4,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**VISION, "model_type": "pixtral"},
        tie_word_embeddings=False,
    ),
    "idefics3": lambda: Idefics3Config(
        text_config={**TEXT, "model_type": "llama", "pad_token_id": 0},
        vision_config={**VISION, "model_type": "idefics3_vision"},
        scale_factor=1,
        pad_token_id=0,
    ),
    "qwen3_5": lambda: Qwen3_5Config(text_config={**TEXT, **DELTA}, vision_config=DEEP_VISION),
    "llava of qwen2": lambda: LlavaConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**VISION, "model_type": "clip_vision_model"},
    ),
}
PUBLISHED_PREFIXES = ("", "language_model.model.", "model.language_model.")
"""Prefix of the text part's tensors; empty: that which the library writes today."""


def first_logits(section: ModelSection, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Logits of stages with the first weights of a run."""
    config = load_config(section)
    family = family_of(config)
    parameters = dict(first_weights(section, config, family.parameter_specs(config), 0))
    hidden = tokens
    for stage in stage_chain(config, parameters, [1] * family.num_layers(config)):
        hidden = stage(hidden)
    return hidden.detach()


def check_logits(found: torch.Tensor, model: Any, tokens: torch.Tensor = TOKENS) -> None:
    with torch.no_grad():
        expected = model.eval()(tokens, use_cache=False).logits
    assert (found - expected).abs().max() / expected.abs().max() < TOLERANCE


def write_random(model: PreTrainedModel, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, tensor in sorted(model.named_parameters()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)


def rename_text(folder: Path, prefix: str) -> None:
    file = folder / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        renamed[name.replace("language_model.model.", prefix)] = tensor
    save_file(renamed, file, {"format": "pt"})


@pytest.mark.parametrize("prefix", PUBLISHED_PREFIXES)
@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_part_of_a_multimodal_model_is_the_librarys(
    name: str, prefix: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    write_random(AutoModelForImageTextToText.from_config(MULTIMODAL[name]()), tmp_path)
    if prefix:
        rename_text(tmp_path, prefix)
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    section = ModelSection(pretrained=str(tmp_path))
    assert load_config(section).model_type == MULTIMODAL[name]().text_config.model_type
    found = first_logits(section)
    check_logits(found, stock)
    check_logits(found, exported(section, tmp_path / "exported"))


def exported(section: ModelSection, folder: Path, num_tokens: int = -1) -> PreTrainedModel:
    """A whole model's export, as transformers loads it."""
    config = load_config(section)
    state = dict(first_weights(section, config, family_of(config).parameter_specs(config), 0))
    if num_tokens > 0:
        for name in family_of(config).vocabulary_parameters() & set(state):
            state[name] = state[name][:num_tokens].clone()
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    document = config_to_export(saved_document(section), "float32")
    (folder / "config.json").write_text(json.dumps(document))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model.config, "vision_config")
    return model


def test_a_text_part_that_cannot_be_trained_is_refused_by_its_own_name(tmp_path: Path) -> None:
    document = Qwen3VLConfig(text_config=TEXT).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="model_type 'qwen3_vl_text' cannot be trained"):
        load_config(ModelSection(pretrained=str(tmp_path)))


@pytest.mark.parametrize("family", [None, "auto"])
def test_layers_that_need_more_than_hidden_states_are_refused(
    tmp_path: Path, family: str | None
) -> None:
    """Wrong: the advice to try `family: auto`, or a stage that leaves out a layer's embeddings."""
    wanted = "cannot be trained: a stage passes on hidden states alone.*take Gemma 3"
    for text in ("gemma3n_text", "gemma4_text", "gemma4_unified_text"):
        (tmp_path / text).mkdir()
        document: dict[str, Any] = {"model_type": text}
        with pytest.raises(ConfigError, match=f"'{text}' {wanted}"):
            load_config(ModelSection(config=document, family=family))
        whole = {"model_type": text.removesuffix("_text"), "text_config": document}
        (tmp_path / text / "config.json").write_text(json.dumps(whole))
        with pytest.raises(ConfigError, match=f"'{text}' {wanted}"):
            load_config(ModelSection(pretrained=str(tmp_path / text), family=family))


def test_a_text_part_whose_logits_the_multimodal_model_leaves_as_they_are_is_refused(
    tmp_path: Path,
) -> None:
    """The library's Aya Vision leaves out the logit scale of its text model."""
    text = {**TEXT, "model_type": "cohere2", "sliding_window": 4, "logit_scale": 0.5}
    config = AyaVisionConfig(text_config=text, vision_config={"model_type": "siglip_vision_model"})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ConfigError, match=r"text part \(cohere2\) scales or caps its logits"):
        load_config(ModelSection(pretrained=str(tmp_path)))


def test_the_librarys_own_config_is_taken_as_a_mapping() -> None:
    """Wrong: the key that the library writes for Gemma 3 counts as a misspelt one."""
    config = CONFIG_MAPPING["gemma3_text"](**{**GEMMA_TEXT, "sliding_window": 4})
    document = config.to_dict()
    assert "_sliding_window_pattern" in document
    assert load_config(ModelSection(config=document)).sliding_window == 4


# quantized bases
# ----------------------------------------------------------------------------------


def quantize_experts(folder: Path) -> None:
    """Replace stacks of experts by random MXFP4 of their shapes, as gpt-oss is published."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    generator = torch.Generator().manual_seed(5)
    for name in [each for each in stored if each.endswith("proj") and ".experts." in each]:
        count, inputs, outputs = stored.pop(name).shape
        shape = (count, outputs, inputs // 32, 16)
        stored[f"{name}_blocks"] = torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=generator
        )
        stored[f"{name}_scales"] = torch.randint(
            121, 126, shape[:3], dtype=torch.uint8, generator=generator
        )
    save_file(stored, file, {"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize("adapter", [None, AdapterSection(rank=2, targets="o_proj")])
def test_mxfp4_is_dequantized_as_the_library_does(
    adapter: AdapterSection | None, tmp_path: Path
) -> None:
    document = {**TINY["gpt_oss"], "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    config = CONFIG_MAPPING["gpt_oss"](**{k: v for k, v in document.items() if k != "model_type"})
    write_random(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path)
    quantize_experts(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    section = ModelSection(pretrained=str(tmp_path), adapter=adapter)
    check_logits(first_logits(section), stock)


def quantize_fp8(folder: Path, block: int, *, says_size: bool = True) -> None:
    """Store all projections as fp8 with a scale for each block; a side's last may be a part."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    for name in [each for each in stored if re.search(r"_proj(_with_mqa)?\.weight$", each)]:
        weight = stored[name]
        rows, columns = weight.shape
        grid = (-(-rows // block), -(-columns // block))
        scales = torch.empty(grid)
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = weight[i * block : (i + 1) * block, j * block : (j + 1) * block]
                scales[i, j] = part.abs().max() / 448
                part /= scales[i, j]
        stored[name] = weight.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
    save_file(stored, file, {"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    if says_size:
        document["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
        }
    (folder / "config.json").write_text(json.dumps(document))


def write_deepseek(folder: Path) -> None:
    """Sides of 16, since the library dequantizes no part of a block."""
    sides = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    document = {**TINY["deepseek_v3"], **sides, "qk_nope_head_dim": 16, "intermediate_size": 48}
    config = CONFIG_MAPPING[document.pop("model_type")](**document)
    write_random(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)


def test_fp8_of_deepseek_is_the_base_of_an_adapter(tmp_path: Path) -> None:
    write_deepseek(tmp_path)
    quantize_fp8(tmp_path, 16)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert stock.dtype == torch.float32
    adapter = AdapterSection(rank=2, targets="o_proj")
    section = ModelSection(pretrained=str(tmp_path), adapter=adapter)
    check_logits(first_logits(section), stock)


def test_fp8_blocks_of_unknown_size_are_refused(tmp_path: Path) -> None:
    """Wrong: a size follows from the scales although a side ends with a part of a block."""
    write_deepseek(tmp_path)
    quantize_fp8(tmp_path, 40, says_size=False)
    with pytest.raises(ConfigError, match=r"no quantization_config; put it back"):
        first_logits(ModelSection(pretrained=str(tmp_path)))


# new tokens
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("name", ["llama", "llama-biased-tied", "gpt2"])
def test_new_tokens_begin_as_the_librarys(name: str, multiple: int, tmp_path: Path) -> None:
    """The library adds noise of 1e-9 of the covariance, which is far below what is compared."""
    document = dict(TINY[name])
    config = CONFIG_MAPPING[document.pop("model_type")](**document)
    write_random(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path)
    num_tokens = config.vocab_size + 6
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    stock.resize_token_embeddings(num_tokens, mean_resizing=True)
    section = ModelSection(
        pretrained=str(tmp_path), vocabulary_size=num_tokens, vocabulary_multiple=multiple
    )
    tokens = torch.arange(num_tokens - 9, num_tokens).unsqueeze(0)
    found = first_logits(section, tokens=tokens)[..., :num_tokens]
    with torch.no_grad():
        expected = stock.eval()(tokens, use_cache=False).logits
    assert (found - expected).abs().max() / expected.abs().max() < 1e-3
    assert saved_document(section)["vocab_size"] == num_tokens
    loaded = exported(section, tmp_path / "exported", num_tokens)
    with torch.no_grad():
        again = loaded(tokens).logits
    assert (found - again).abs().max() / expected.abs().max() < TOLERANCE


def test_fewer_tokens_are_refused(tmp_path: Path) -> None:
    write_deepseek(tmp_path)
    with pytest.raises(ConfigError, match=r"vocabulary_size is 9, but the model has \d+ tokens"):
        load_config(ModelSection(pretrained=str(tmp_path), vocabulary_size=9))


def test_new_tokens_that_an_adapter_would_lose_are_refused(tmp_path: Path) -> None:
    write_deepseek(tmp_path)
    section = ModelSection(
        pretrained=str(tmp_path),
        vocabulary_size=200,
        adapter=AdapterSection(targets="o_proj", modules_to_save=("lm_head",)),
    )
    with pytest.raises(ConfigError, match=r"rows of model\.embed_tokens; name them"):
        load_config(section)
