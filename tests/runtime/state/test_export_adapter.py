"""An adapter's export is a directory that stock peft loads, and merged a model that transformers
loads: both with the logits of the stages that trained it.
"""

import json
from dataclasses import replace
from pathlib import Path

import msgspec.structs
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from autohet.runtime.facts.layout import state_name, tensor_specs
from autohet.runtime.job import AdapterSection, ModelSection
from autohet.runtime.models.config import load_config, saved_document
from autohet.runtime.models.pretrained import weights_identity
from autohet.runtime.models.registry import family_of
from autohet.runtime.state.export import ExportOptions, export_checkpoint
from autohet.runtime.state.frozen import first_weights
from planner.errors import ConfigError
from recovery.checkpoint.commit import (
    CheckpointFacts,
    CheckpointPart,
    commit_checkpoint,
    write_shards,
)
from recovery.checkpoint.manifest import Manifest
from recovery.state.layout import Layout, assign_writers
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from tests.harness.peft_reference import with_base
from tests.harness.tiny_models import TINY, random_parameters, stage_chain
from tests.runtime.models.test_published_bases import (
    MULTIMODAL,
    check_logits,
    first_logits,
    write_random,
)

CASES = {
    "llama": AdapterSection(rank=4, alpha=8.0),
    "qwen3": AdapterSection(rank=3, alpha=6.0, rslora=True, targets=("q_proj", "down_proj")),
    "gpt2": AdapterSection(rank=4, alpha=2.5),
    "gpt2-untied": AdapterSection(rank=2, targets="*.attn.c_proj"),
    "deepseek_v3": AdapterSection(rank=3, alpha=6.0),
    "gpt_oss": AdapterSection(rank=2, targets=("v_proj", "gate_up_proj", "experts.down_proj")),
    "qwen3_moe": AdapterSection(rank=3, alpha=6.0, rslora=True),
    "olmoe": AdapterSection(rank=2, targets=("q_proj", "down_proj")),
    "mixtral": AdapterSection(rank=2),
}
SAVED = ("embed_tokens", "lm_head", "norm")
ENDS = {
    "saved": ("llama", AdapterSection(rank=2, targets="q_proj", modules_to_save=SAVED)),
    "saved and tied": (
        "llama-biased-tied",
        AdapterSection(rank=2, targets="q_proj", modules_to_save=("embed_tokens",)),
    ),
    "targets": (
        "llama",
        AdapterSection(rank=2, alpha=0.5, targets=("all-linear", "embed_tokens", "lm_head")),
    ),
    "saved experts": (
        "qwen3_moe",
        AdapterSection(rank=2, targets="q_proj", modules_to_save=("experts",)),
    ),
    "saved map of a mixture": (
        "qwen3_moe",
        AdapterSection(rank=2, targets="q_proj", modules_to_save=("lm_head", "k_norm")),
    ),
}
"""Embedding, head and norms that are trained, whole or by an update."""
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "durable"))


def pretrained_base(name: str, directory: Path) -> Path:
    """A directory with a whole model, as transformers saves it."""
    torch.manual_seed(5)
    config = load_config(ModelSection(config=dict(TINY[name])))
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def trained(section: ModelSection, storage: Storage) -> tuple[Manifest, dict[str, Tensor]]:
    """A checkpoint of random adapters, and all parameters, as a run would have them."""
    assert section.pretrained is not None
    config = load_config(section)
    own = family_of(config).parameter_specs(config)
    frozen = [name for name, spec in own.items() if not spec.trainable]
    parameters = random_parameters(config) | dict(first_weights(section, config, frozen, 0))
    specs = tensor_specs(config)
    state = {name: torch.zeros(spec.shape) for name, spec in specs.items()}
    for name, tensor in parameters.items():
        if name in own and own[name].trainable:
            state[state_name("param", name)] = tensor
    layout = Layout(
        specs, {"a/0": frozenset(shard for spec in specs.values() for shard in spec.shards)}
    )
    receipt = write_shards(
        CheckpointPart(storage, 9, "a/0"), state, layout, assign_writers(layout)["a/0"]
    )
    scalars = {"model.pretrained": weights_identity(section.pretrained)}
    manifest = commit_checkpoint(
        storage, 9, layout, [receipt], CheckpointFacts(scalars, saved_document(section))
    )
    return manifest, parameters


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("case", ENDS)
def test_trained_ends_are_exported(
    case: str, multiple: int, storage: Storage, tmp_path: Path
) -> None:
    """With and without rows that pad the vocabulary."""
    check_exports(*ENDS[case], multiple, storage, tmp_path)


def test_new_tokens_are_exported_with_the_adapter(storage: Storage, tmp_path: Path) -> None:
    """peft loads the adapter over the base with as many tokens, and the merged model has them."""
    base = pretrained_base("llama", tmp_path / "base")
    section = ModelSection(
        pretrained=str(base), adapter=ENDS["saved"][1], vocabulary_size=75, vocabulary_multiple=8
    )
    manifest, parameters = trained(section, storage)
    config = load_config(section)
    (stage,) = stage_chain(config, parameters, [3])
    tokens = torch.arange(63, 75).reshape(2, 6)
    with torch.no_grad():
        logits = stage(tokens)[..., :75]
    export_checkpoint(storage, manifest, tmp_path / "adapter")
    grown = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(75)
    export_checkpoint(storage, manifest, tmp_path / "merged", ExportOptions(merge=True))
    for loaded in (
        PeftModel.from_pretrained(grown, tmp_path / "adapter"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ):
        with torch.no_grad():
            torch.testing.assert_close(loaded(tokens).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "adapter",
    [
        AdapterSection(rank=2),
        AdapterSection(rank=2, targets="down_proj", modules_to_save=("k_norm", "embed_tokens")),
    ],
    ids=["all-linear", "saved"],
)
@pytest.mark.parametrize("name", MULTIMODAL)
def test_an_adapter_of_a_text_part_is_exported_for_the_whole_base(
    name: str, adapter: AdapterSection, storage: Storage, tmp_path: Path
) -> None:
    """Wrong: names of the text model, which peft does not find in the base and leaves out."""
    if adapter.modules_to_save and name != "gemma3":
        adapter = replace(adapter, modules_to_save=("norm", "embed_tokens"))
    torch.manual_seed(0)
    config = MULTIMODAL[name]()
    base = tmp_path / "base"
    write_random(AutoModelForImageTextToText.from_config(config), base)
    section = ModelSection(pretrained=str(base), adapter=adapter)
    manifest, parameters = trained(section, storage)
    (stage,) = stage_chain(load_config(section), parameters, [3])
    with torch.no_grad():
        logits = stage(TOKENS)
    export_checkpoint(storage, manifest, tmp_path / "adapter")
    export_checkpoint(storage, manifest, tmp_path / "merged", ExportOptions(merge=True))
    whole = AutoModelForImageTextToText.from_pretrained(base)
    for loaded in (
        PeftModel.from_pretrained(whole, tmp_path / "adapter"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ):
        with torch.no_grad():
            found = loaded.eval()(TOKENS, use_cache=False).logits
        assert (found - logits).abs().max() / logits.abs().max() < 1e-5
    going_on = replace(section, adapter=AdapterSection(from_=str(tmp_path / "adapter")))
    check_logits(first_logits(going_on, TOKENS), loaded, TOKENS)


@pytest.mark.parametrize("name", CASES)
def test_stock_peft_and_transformers_load_what_was_trained(
    name: str, storage: Storage, tmp_path: Path
) -> None:
    check_exports(name, CASES[name], 1, storage, tmp_path)


def check_exports(
    name: str, adapter_section: AdapterSection, multiple: int, storage: Storage, tmp_path: Path
) -> None:
    base = pretrained_base(name, tmp_path / "base")
    section = ModelSection(
        pretrained=str(base), adapter=adapter_section, vocabulary_multiple=multiple
    )
    manifest, parameters = trained(section, storage)
    config = load_config(section)
    (stage,) = stage_chain(config, parameters, [3])
    with torch.no_grad():
        logits = stage(TOKENS)[..., : config.vocab_size]

    adapter = export_checkpoint(storage, manifest, tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(base)
    whole.load_state_dict(with_base(config, dict(whole.named_parameters())), strict=False)
    loaded = PeftModel.from_pretrained(whole, tmp_path / "adapter")
    with torch.no_grad():
        # A merged map adds up in another order than the map and its update.
        tolerance = 2e-5 * max(1.0, logits.abs().max().item())
        torch.testing.assert_close(loaded(TOKENS).logits, logits, rtol=1e-5, atol=tolerance)
    assert adapter.files == ("adapter_model.safetensors",)
    assert not (tmp_path / "adapter" / "config.json").exists()
    document = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert document["base_model_name_or_path"] == str(base)

    export_checkpoint(
        storage, manifest, tmp_path / "merged", ExportOptions(merge=True, max_shard_bytes=20_000)
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, logits, rtol=1e-5, atol=tolerance)
        plain = AutoModelForCausalLM.from_pretrained(base)(TOKENS).logits
    assert (plain - logits).abs().max() > 1e-2, "the adapter changes nothing"
    assert "adapter" not in (tmp_path / "merged" / "config.json").read_text()

    # The export begins another run.
    going_on = replace(section, adapter=AdapterSection(from_=str(tmp_path / "adapter")))
    again = load_config(going_on)
    names = [key for key, spec in family_of(again).parameter_specs(again).items() if spec.trainable]
    assert set(names) <= set(parameters)
    for each, tensor in first_weights(going_on, again, names, 0):
        # Rows that pad the vocabulary are zeros.
        expected = torch.where(tensor == 0, 0.0, parameters[each])
        torch.testing.assert_close(tensor, expected)


def test_an_adapter_of_a_base_in_four_bits_is_merged_with_the_values_that_it_trained_on(
    storage: Storage, tmp_path: Path
) -> None:
    check_exports("llama", replace(CASES["llama"], base="nf4"), 1, storage, tmp_path)


def test_another_base_is_refused(storage: Storage, tmp_path: Path) -> None:
    section = ModelSection(
        pretrained=str(pretrained_base("llama", tmp_path / "base")), adapter=CASES["llama"]
    )
    manifest, _ = trained(section, storage)
    torch.manual_seed(6)
    other = AutoModelForCausalLM.from_config(load_config(ModelSection(config=TINY["llama"])))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="is not the base of this adapter"):
        export_checkpoint(
            storage,
            manifest,
            tmp_path / "out",
            ExportOptions(merge=True, base=str(tmp_path / "other")),
        )


def test_a_whole_model_has_nothing_to_merge(storage: Storage, tmp_path: Path) -> None:
    section = ModelSection(
        pretrained=str(pretrained_base("llama", tmp_path / "base")), adapter=CASES["llama"]
    )
    manifest, _ = trained(section, storage)
    document = {k: v for k, v in manifest.model_config.items() if k != "autohet_adapter"}
    whole = msgspec.structs.replace(manifest, model_config=document)
    with pytest.raises(ConfigError, match="so there is nothing to merge; leave --merge out"):
        export_checkpoint(storage, whole, tmp_path / "out", ExportOptions(merge=True))


def test_specs_of_a_base_are_those_of_the_library(tmp_path: Path) -> None:
    section = ModelSection(
        pretrained=str(pretrained_base("llama", tmp_path / "base")), adapter=CASES["llama"]
    )
    specs = family_of(load_config(section)).parameter_specs(load_config(section))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    frozen = {name: spec.shape for name, spec in specs.items() if not spec.trainable}
    assert frozen == {name: tuple(each.shape) for name, each in base.named_parameters()}
