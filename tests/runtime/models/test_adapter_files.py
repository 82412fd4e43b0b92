"""A job goes on with an adapter that peft wrote: logits, settings and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from autohet.runtime.job import AdapterSection, Job, ModelSection
from autohet.runtime.job.identity import REFERENCE, changes, decides, with_implied
from autohet.runtime.models.config import load_config
from autohet.runtime.models.layers.adapters import adapter_of
from autohet.runtime.state.frozen import run_identity
from planner.errors import ConfigError
from recovery.storage.open import open_storage
from tests.harness.tiny_models import TINY
from tests.runtime.models.test_published_bases import (
    MULTIMODAL,
    check_logits,
    first_logits,
    write_random,
)

ALL = "all-linear"
TRAINING = {"global_batch_sequences": 1, "sequence_length": 8, "steps": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "names": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}),
    "all maps, rslora": ("qwen3", {"r": 3, "use_rslora": True, "target_modules": ALL}),
    "transposed": ("gpt2", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "a pattern": ("llama", {"r": 2, "target_modules": r".*layers\.\d\.(self_attn\.[kv]_proj)"}),
    "some layers": (
        "qwen3",
        {"r": 2, "target_modules": ["v_proj", "up_proj"], "exclude_modules": r".*\.0\.mlp\..*"},
    ),
    "saved modules": (
        "llama",
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]},
    ),
    "a saved tied embedding": (
        "llama-biased-tied",
        {
            "r": 2,
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "embedding and head": (
        "llama",
        {"r": 2, "target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    ),
    "attention of experts": ("qwen3_moe", {"r": 2, "target_modules": ["q_proj", "o_proj"]}),
}


def write_base(name: str, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_config(load_config(ModelSection(config=dict(TINY[name]))))
    write_random(model, folder)
    return folder


def write_adapter(model: Any, settings: dict[str, Any], folder: Path) -> Path:
    """What peft saves of random matrices."""
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base("llama", tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return write_adapter(AutoModelForCausalLM.from_pretrained(base), settings, tmp_path / "adapter")


def section_of(base: Path, adapter: Path | str, **more: Any) -> ModelSection:
    return ModelSection(pretrained=str(base), adapter=AdapterSection(from_=str(adapter), **more))


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_that_peft_wrote_begins_the_run(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    base = write_base(name, tmp_path / "base")
    written = write_adapter(
        AutoModelForCausalLM.from_pretrained(base), settings, tmp_path / "adapter"
    )
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), written)
    section = section_of(base, written)
    found = first_logits(section)
    check_logits(found, stock)
    plain = first_logits(replace(section, adapter=None))
    assert (found - plain).abs().max() > 0.01, "the adapter changes nothing"


@pytest.mark.parametrize("name", MULTIMODAL)
def test_an_adapter_of_a_multimodal_model_begins_a_run_of_its_text_part(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    write_random(AutoModelForImageTextToText.from_config(MULTIMODAL[name]()), tmp_path / "base")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    pattern = r".*(language|text)_model.*\.([qo]|down)_proj"
    written = write_adapter(whole, {"r": 2, "target_modules": pattern}, tmp_path / "adapter")
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    check_logits(
        first_logits(section_of(tmp_path / "base", written)),
        PeftModel.from_pretrained(stock, written),
    )


def test_settings_are_those_of_the_files(base: Path, adapter: Path) -> None:
    found = adapter_of(load_config(section_of(base, adapter, dropout=0.1)))
    assert found is not None
    assert (found.rank, found.alpha, found.rslora, found.dropout) == (4, 8.0, False, 0.1)
    assert found.targets == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 16}, "rank is 16, but the adapter .* has 4; leave the key out"),
        ({"alpha": 4.0}, r"alpha is 4\.0, but the adapter .* has 8\.0"),
        ({"rslora": True}, "rslora is True, but the adapter .* has False"),
        ({"targets": ("q_proj",)}, r"the adapter alone adapts .*v_proj; leave the key out"),
        ({"modules_to_save": ("norm",)}, r"modules_to_save is .*, but the adapter .* has \(\)"),
        ({"targets": "all-linear"}, r"the job alone adapts .*_proj; leave the key out"),
    ],
)
def test_other_settings_of_the_job_are_refused(
    given: dict[str, Any], message: str, base: Path, adapter: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(section_of(base, adapter, **given))


def test_a_tied_embedding_that_was_trained_alone_is_refused(tmp_path: Path) -> None:
    """peft then gives the head the frozen weights, so that the model is tied no longer."""
    base = write_base("llama-biased-tied", tmp_path / "base")
    settings = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    written = write_adapter(
        AutoModelForCausalLM.from_pretrained(base), settings, tmp_path / "adapter"
    )
    with pytest.raises(ConfigError, match="head is tied, without ensure_weight_tying"):
        load_config(section_of(base, written))


def test_equal_settings_of_the_job_are_taken(base: Path, adapter: Path) -> None:
    """Also those that are written in another way."""
    targets = ("*.self_attn.[qv]_proj",)
    load_config(section_of(base, adapter, rank=4, alpha=8.0, rslora=False, targets=targets))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "has use_dora: true, which cannot be trained here"),
        # peft changes the base as it loads these.
        ({"init_lora_weights": "pissa"}, 'init_lora_weights: "pissa", which cannot be trained'),
        ({"init_lora_weights": "olora"}, 'init_lora_weights: "olora", which cannot be trained'),
        ({"peft_type": "IA3", "r": None}, 'peft_type: "IA3", which cannot be trained here'),
        ({"peft_type": "IA3"}, 'has peft_type: "IA3"'),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern"),
        ({"trainable_token_indices": [3]}, "has trainable_token_indices"),
        ({"modules_to_save": ["lm_head"]}, r"has no tensor lm_head\.weight"),
        ({"modules_to_save": ["head"]}, r"has no tensor lm_head\.weight"),
        ({"modules_to_save": ["score"]}, "'score' is no module of this model"),
        ({"modules_to_save": ["self_attn"]}, r"trains .*q_proj, which has an adapter"),
        ({"r": 0}, "no readable adapter_config"),
        ({"r": None}, "no readable adapter_config"),
        ({"r": 3}, r"has shape \(4, \d+\), but this model's is \(3, \d+\)"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    changes: dict[str, Any], message: str, base: Path, adapter: Path
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        first_logits(section_of(base, adapter))


def test_settings_that_are_no_mapping_are_said_to_be_unreadable(base: Path, adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no readable adapter_config"):
        load_config(section_of(base, adapter))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors", "."])
def test_missing_files_are_named(missing: str, base: Path, adapter: Path) -> None:
    if missing == ".":
        adapter = adapter / "elsewhere"
    else:
        (adapter / missing).unlink()
    with pytest.raises(ConfigError, match=r"model\.adapter\.from: .*(no readable|no directory)"):
        load_config(section_of(base, adapter))


def test_matrices_of_another_model_are_refused(adapter: Path, tmp_path: Path) -> None:
    other = write_base("llama-grouped", tmp_path / "other")
    with pytest.raises(ConfigError, match="name the adapter's own base"):
        first_logits(section_of(other, adapter))


def test_an_adapter_in_a_bucket_is_fetched(base: Path, adapter: Path, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/bucket"
    storage = open_storage(uri)
    for file in adapter.iterdir():
        storage.put(file.name, file.read_bytes())
    expected = first_logits(section_of(base, adapter))
    assert torch.equal(first_logits(section_of(base, uri)), expected)
    with pytest.raises(ConfigError, match=r"model\.adapter\.from .* cannot be read"):
        load_config(section_of(base, f"{uri}/elsewhere"))


def test_an_adapter_as_a_base_is_said_to_be_one(adapter: Path, base: Path) -> None:
    for config in (None, "{}", (base / "config.json").read_text()):
        if config is not None:
            (adapter / "config.json").write_text(config)
        with pytest.raises(ConfigError, match=f"is an adapter of {base}; name that model as"):
            load_config(ModelSection(pretrained=str(adapter)))


def test_the_key_is_from() -> None:
    """Python reserves the word, so the field has another name."""
    document = {
        "model": {"pretrained": "a", "adapter": {"from": "b"}},
        "training": {"global_batch_sequences": 2, "sequence_length": 8},
    }
    job = Job.from_document(document)
    assert job.model.adapter is not None
    assert job.model.adapter.from_ == "b"
    assert job.identity(None)["model.adapter.from"] == "b"
    document["model"]["adapter"] = {"from": 3}
    with pytest.raises(ConfigError, match=r"model\.adapter\.from is 3"):
        Job.from_document(document)


def test_a_reference_is_known_by_its_content(base: Path, adapter: Path) -> None:
    """Wrong: DPO goes on with another reference once files were written over, or as releases did
    that took the base.
    """

    def identity(folder: Path) -> dict[str, Any]:
        model = {"pretrained": str(base), "adapter": {"from": str(folder)}}
        training = {**TRAINING, "objective": "dpo"}
        return run_identity(Job.from_document({"model": model, "training": training}))

    then = identity(adapter)
    earlier = {key: value for key, value in then.items() if key != REFERENCE}
    (change,) = changes(with_implied(earlier, then), then)
    assert str(change).startswith(f"{REFERENCE} was the model without its adapter and is ")
    moved = adapter.rename(adapter.with_name("moved"))
    (moved / "adapter_model.safetensors").write_bytes(b"other")
    found = [each.key for each in changes(then, identity(moved))]
    assert found == ["model.adapter.from", REFERENCE]
    assert decides(REFERENCE)
