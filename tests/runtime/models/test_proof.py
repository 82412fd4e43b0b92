"""Families of a user's own, `model.family: auto`, and the proof that names what differs."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autohet.cli.main import main
from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.decoder_check import check_decoder
from autohet.runtime.models.family import Family
from autohet.runtime.models.layers.logits import UNCHANGED
from autohet.runtime.models.proof import prove_model, require_proof, short_config
from autohet.runtime.models.registry import FAMILIES
from planner.errors import ConfigError
from tests.harness.tiny_models import (
    LLAMA_LIKE,
    TINY,
    batch,
    random_parameters,
    stage_chain,
    tiny_config,
)

TINY_ARCEE = {"model_type": "arcee", **LLAMA_LIKE}
OWN_FAMILY = """
from autohet.runtime.models import Family

FAMILY = Family("arcee")
"""


@pytest.fixture(autouse=True)
def known_families() -> Iterator[None]:
    """What one job makes known stays with it."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def source(config: dict[str, Any], family: str | None) -> Any:
    return ModelSection(config=config, family=family)


def write_job(folder: Path, config: dict[str, Any], family: str) -> Path:
    document = {
        "name": "own",
        "model": {"config": config, "family": family},
        "training": {"global_batch_sequences": 4, "sequence_length": 16, "precision": "fp32"},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(document))
    return path


def test_a_family_beside_the_job_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documented example (docs/guides/own_model.md)."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_model.py").write_text(OWN_FAMILY)
    monkeypatch.chdir(tmp_path)
    job = write_job(tmp_path, TINY_ARCEE, "my_package.my_model:FAMILY")
    assert main(["check-model", str(job), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"]
    assert {case["tp_degree"] for case in document["cases"]} == {1, 2, 4}
    cuts = {tuple(case["layers_by_stage"]) for case in document["cases"]}
    assert cuts == {(3,), (1, 2), (2, 1), (1, 1, 1)}


def test_the_answer_names_dropouts_that_it_does_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"attention_dropout": 0.1, "resid_pdrop": 0.2}
    model = "autohet.runtime.models.families.phi3:FAMILY"
    job = write_job(tmp_path, {**TINY["phi3"], **rates}, model)
    assert main(["check-model", str(job)]) == 0
    answer = capsys.readouterr().out
    places = "attention weights 0.1, self_attn.o_proj 0.2, mlp.down_proj 0.2"
    assert f"dropout: not checked ({places})" in answer
    assert "cases, without dropout)" in answer
    assert not prove_model(tiny_config("olmo2"), degrees=(1,)).dropouts


def test_a_forgotten_scale_is_named_by_its_place() -> None:
    config = tiny_config("granite")
    FAMILIES["granite"] = replace(FAMILIES["granite"], embedding_scale=lambda config, _: 1.0)
    with pytest.raises(ConfigError, match=r"the input of model\.layers\.0"):
        require_proof(config)


def test_a_forgotten_softcap_of_logits_is_seen() -> None:
    config = tiny_config("gemma3_text")
    FAMILIES["gemma3_text"] = Family("gemma3_text", logit_adjustment=lambda _: UNCHANGED)
    proof = prove_model(config, degrees=(1,))
    assert not proof.passed


def test_another_decoder_is_read_off_the_librarys_plans() -> None:
    config = load_config(source(TINY_ARCEE, "auto"))
    require_proof(config)
    assert FAMILIES["arcee"].token_embedding == "model.embed_tokens"


TINY_MIXTURE = {
    **LLAMA_LIKE,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
OF_EACH_RULE: dict[str, dict[str, Any]] = {
    "afmoe": {"num_experts": 4, "num_dense_layers": 1, "head_dim": 8, "sliding_window": 8},
    "cohere": {"logit_scale": 0.3},
    "flex_olmo": {"num_experts": 4},
    "gemma": {"head_dim": 8},
    "glm4_moe_lite": {
        "n_routed_experts": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 24},
}
"""Whole attention, logits, norms over all heads, scales, latent attention, shared experts.

All model types that pass are recorded by scripts/benchmarks/quality/model_types.py.
"""


@pytest.mark.parametrize("model_type", OF_EACH_RULE)
def test_the_rules_derive_a_family(model_type: str) -> None:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    document = {**TINY_MIXTURE, **tokens, **OF_EACH_RULE[model_type], "model_type": model_type}
    known = CONFIG_MAPPING[model_type]().to_dict()
    document = {key: value for key, value in document.items() if key in known}
    proof = prove_model(load_config(source({**document, "model_type": model_type}, "auto")), (1, 2))
    assert proof.passed, proof.to_document()
    assert {case.tp_degree for case in proof.cases} == {1, 2}


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("no_such_module:FAMILY", "cannot be imported"),
        ("json:loads", "must be a Family"),
        ("autohet.runtime.models.families.qwen3:FAMILY", "is for model_type 'qwen3'"),
    ],
)
def test_a_wrong_family_is_named(family: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(source(TINY_ARCEE, family))


@pytest.mark.parametrize(
    ("model_type", "says"),
    [("opt", "no pipeline and tensor-parallel plan"), ("phi", "is not that of an embedding")],
)
def test_what_the_plans_cannot_cut_is_refused(model_type: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(source({"model_type": model_type}, "auto"))


def library_model(name: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(name))


def test_weights_shared_between_blocks_are_refused() -> None:
    family, config, model = FAMILIES["olmo2"], tiny_config("olmo2"), library_model("olmo2")
    layers: Any = model.get_submodule("model.layers")
    layers[2].mlp = layers[0].mlp
    with pytest.raises(ConfigError, match=r"shares model\.layers\.2\.mlp.*model\.layers\.0"):
        check_decoder(config, model, family.layers, family.parts_beside_blocks, None)


def test_parameters_that_no_stage_would_hold_are_refused() -> None:
    family, config, model = FAMILIES["olmo2"], tiny_config("olmo2"), library_model("olmo2")
    model.get_submodule("model").register_module("projection", nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match=r"model\.projection\.weight outside"):
        check_decoder(config, model, family.layers, family.parts_beside_blocks, None)


def test_a_block_with_two_outputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

    forward = Olmo2DecoderLayer.forward

    def two_outputs(self: Any, *arguments: Any, **named: Any) -> Any:
        out = forward(self, *arguments, **named)
        return out, out

    config = tiny_config("olmo2")
    (stage,) = stage_chain(config, random_parameters(config), [3])
    monkeypatch.setattr(Olmo2DecoderLayer, "forward", two_outputs)
    with pytest.raises(ConfigError, match="olmo2 has 2 outputs"):
        stage(batch(config)[0])


@pytest.mark.parametrize("name", ["cohere2", "gemma2", "gemma3_text", "smollm3"])
def test_a_short_model_has_every_type_of_layer(name: str) -> None:
    config = tiny_config(name)
    config.num_hidden_layers = 12
    config.layer_types = ["sliding_attention"] * 11 + ["full_attention"]
    if hasattr(config, "no_rope_layers"):
        config.no_rope_layers = [1] * 12
    assert set(short_config(config).layer_types) == {"sliding_attention", "full_attention"}
