"""An exported checkpoint is a model that transformers loads with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autohet.runtime.state.export import INDEX_NAME, export_checkpoint
from planner.errors import ConfigError
from recovery.checkpoint.commit import assign_writers, commit_checkpoint, write_shards
from recovery.checkpoint.manifest import Manifest
from recovery.state.layout import Layout, TensorSpec
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage

TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 67,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 67,
        "n_positions": 16,
    },
}
TINY["llama_tied"] = {**TINY["llama"], "tie_word_embeddings": True}


def _model(case: str) -> Any:
    config = dict(TINY[case])
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    ).eval()


def _spec(name: str, parameter: torch.Tensor) -> TensorSpec:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return TensorSpec(name, shape, "float32")
    dim = 1 if "o_proj" in name or "down_proj" in name else 0
    return TensorSpec(name, shape, "float32", dim, (0, shape[dim] // 3, shape[dim]))


def _checkpoint(storage: Storage, model: Any, rows: int = 0, **more: Any) -> Manifest:
    """The model's parameters (a tied weight once, as named_parameters has it) as a checkpoint of
    one worker.
    """
    state = {f"param/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name in (
        "param/lm_head.weight",
        "param/model.embed_tokens.weight",
        "param/transformer.wte.weight",
    ):
        if rows and name in state:
            state[name] = torch.cat(
                [state[name], torch.full((rows - len(state[name]), state[name].shape[1]), 7.0)]
            )
    state["exp_avg/lm_head.weight"] = torch.zeros(6, 4)
    specs = {name: _spec(name, tensor) for name, tensor in state.items()}
    layout = Layout(
        specs, {"a/0": frozenset(shard for spec in specs.values() for shard in spec.shards)}
    )
    receipt = write_shards(storage, 9, "a/0", state, layout, assign_writers(layout)["a/0"])
    return commit_checkpoint(
        storage, 9, layout, [receipt], {}, json.loads(model.config.to_json_string()) | more
    )


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "durable"))


@pytest.mark.parametrize("case", sorted(TINY))
def test_rows_that_pad_the_vocabulary_are_not_exported(
    case: str, storage: Storage, tmp_path: Path
) -> None:
    model, out = _model(case), tmp_path / "out"
    summary = export_checkpoint(
        storage, _checkpoint(storage, model, 128, padded_vocab_size=128), out
    )
    assert summary.num_bytes == sum(4 * parameter.numel() for parameter in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.arange(12).unsqueeze(0)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert "padded_vocab_size" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("case", sorted(TINY))
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 10_000])
def test_from_pretrained_gives_equal_logits(
    case: str, max_shard_bytes: int, storage: Storage, tmp_path: Path
) -> None:
    model = _model(case)
    out = tmp_path / "out"
    summary = export_checkpoint(
        storage, _checkpoint(storage, model), out, max_shard_bytes=max_shard_bytes
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (case != "llama")
    sharded = max_shard_bytes < 1 << 30
    assert (out / INDEX_NAME).exists() == sharded
    assert (len(summary.files) > 1) == sharded
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".safetensors") == sorted(
        summary.files
    )
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_dtype_is_cast_and_from_pretrained_keeps_it(storage: Storage, tmp_path: Path) -> None:
    model = _model("llama")
    summary = export_checkpoint(
        storage, _checkpoint(storage, model), tmp_path / "out", dtype="bfloat16"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for (name, parameter), original in zip(
        loaded.named_parameters(), model.parameters(), strict=True
    ):
        assert parameter.dtype == torch.bfloat16, name
        assert torch.equal(parameter, original.to(torch.bfloat16))
    assert summary.num_bytes == sum(p.numel() for p in model.parameters()) * 2


def test_what_cannot_be_exported_is_the_users_mistake_and_writes_nothing(
    storage: Storage, tmp_path: Path
) -> None:
    manifest = _checkpoint(storage, _model("llama"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "model.safetensors").write_text("theirs")
    with pytest.raises(ConfigError, match="not an empty directory"):
        export_checkpoint(storage, manifest, full)
    with pytest.raises(ConfigError, match="float64"):
        export_checkpoint(storage, manifest, tmp_path / "new", dtype="float64")
    assert (full / "model.safetensors").read_text() == "theirs"
    assert not (tmp_path / "new").exists()
