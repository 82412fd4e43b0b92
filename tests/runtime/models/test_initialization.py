"""First weights: the same bits whatever is asked for together, the library's rule, and checkpoints
read exactly.
"""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.pretrained import pretrained_parameters
from autohet.runtime.models.registry import family_of, stage_parameter_names
from planner.errors import ConfigError
from tests.harness.tiny_models import TINY, tiny_config


@pytest.mark.parametrize("name", TINY)
def test_a_stage_draws_the_same_bits_as_the_whole_model(name):
    config = tiny_config(name)
    whole = dict(initial_parameters(config, family_of(config).parameter_specs(config), seed=7))
    torch.rand(3)  # the caller's own randomness has no part in it
    for first, count in ((0, 1), (1, 2)):
        names = stage_parameter_names(config, first, count)
        part = dict(initial_parameters(config, names, seed=7))
        assert set(part) == set(names)
        assert all(torch.equal(part[n], whole[n]) for n in names)


def test_the_callers_random_state_is_left_alone():
    config = tiny_config("llama")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    list(initial_parameters(config, ["model.norm.weight", "lm_head.weight"], seed=0))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("name", TINY)
def test_each_tensor_follows_the_librarys_own_rule(name):
    config = tiny_config(name)
    ours = dict(initial_parameters(config, family_of(config).parameter_specs(config), seed=0))
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    for key, tensor in ours.items():
        expected = theirs[key].detach()
        assert tensor.dtype == torch.float32
        if expected.std() > 0 and expected.numel() < 16:  # too few for a comparison
            assert 0 < tensor.std() < 3 * max(config.initializer_range, expected.std()), key
        elif expected.std() == 0:
            assert torch.equal(tensor, expected), key
        else:
            assert tensor.std().item() == pytest.approx(expected.std().item(), rel=0.2), key
            assert not torch.equal(tensor, expected)


def test_layers_and_seeds_draw_different_numbers():
    config = tiny_config("llama")
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]
    drawn = [
        dict(initial_parameters(config, names, seed))[name] for seed in (0, 1) for name in names
    ]
    assert all(not torch.equal(drawn[i], drawn[j]) for i in range(6) for j in range(i))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_saved_checkpoint_is_read_back_exactly(name, tmp_path):
    config = tiny_config(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (
        len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 5
    )
    read = dict(
        pretrained_parameters(
            str(tmp_path), config, family_of(config), family_of(config).parameter_specs(config)
        )
    )
    assert all(torch.equal(read[n], p) for n, p in model.named_parameters())
    assert set(read) == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_checkpoint_of_the_decoder_alone_has_names_without_its_prefix(name, tmp_path):
    """As OpenAI's GPT-2 is published: `wte.weight`, not `transformer.wte.weight`."""
    config = tiny_config(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.base_model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        assert not any(key.startswith(family_of(config).base + ".") for key in stored.keys())  # noqa: SIM118
    read = dict(
        pretrained_parameters(
            str(tmp_path), config, family_of(config), family_of(config).parameter_specs(config)
        )
    )
    assert set(read) == {n for n, _ in model.named_parameters()}
    assert all(torch.equal(read[n], p) for n, p in model.named_parameters())


def test_an_untied_head_is_not_invented(tmp_path):
    config = tiny_config("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).base_model.save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match=r"no tensor lm_head\.weight"):
        list(pretrained_parameters(str(tmp_path), config, family_of(config), ["lm_head.weight"]))


def test_an_index_that_names_a_file_that_is_gone(tmp_path):
    config = tiny_config("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=gone.name):
        list(pretrained_parameters(str(tmp_path), config, family_of(config), ["model.norm.weight"]))


def test_of_a_file_and_an_index_the_file_is_read_as_the_library_does(tmp_path):
    """An older export in several files was left beside a newer one."""
    config = tiny_config("llama")
    for size in ("20KB", "1GB"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(tmp_path / size, max_shard_size=size)
    for stale in (tmp_path / "20KB").iterdir():
        if stale.name.startswith("model"):
            stale.rename(tmp_path / "1GB" / stale.name)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "1GB", dtype=torch.float32)
    specs = family_of(config).parameter_specs(config)
    read = dict(pretrained_parameters(str(tmp_path / "1GB"), config, family_of(config), specs))
    assert all(torch.equal(read[name], tensor) for name, tensor in theirs.named_parameters())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "no index of safetensors"),
        ("[]", "no index of safetensors"),
        ("{}", "no index of safetensors"),
        ('{"weight_map": ["a"]}', "no index of safetensors"),
        ('{"weight_map": {"model.norm.weight": 1}}', "no index of safetensors"),
        ('{"weight_map": {"model.norm.weight": "../a.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"model.norm.weight": "/a.safetensors"}}', "outside its directory"),
    ],
)
def test_a_damaged_index_is_named(index, message, tmp_path):
    config = tiny_config("llama")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=message):
        list(pretrained_parameters(str(tmp_path), config, family_of(config), ["model.norm.weight"]))


def test_weights_that_a_clone_did_not_fetch_are_named(tmp_path):
    config = tiny_config("llama")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(ConfigError, match=r"pointer of Git LFS.*git lfs pull"):
        list(pretrained_parameters(str(tmp_path), config, family_of(config), ["model.norm.weight"]))


def test_a_bf16_checkpoint_becomes_fp32_masters(tmp_path):
    config = tiny_config("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    ((_, tensor),) = pretrained_parameters(
        str(tmp_path), config, family_of(config), ["model.norm.weight"]
    )
    assert tensor.dtype == torch.float32


def test_wrong_checkpoints_are_named(tmp_path):
    config = tiny_config("llama")
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        list(pretrained_parameters(str(tmp_path), config, family_of(config), ["model.norm.weight"]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    wider = tiny_config("llama", intermediate_size=60)
    with pytest.raises(ConfigError, match="shape"):
        list(
            pretrained_parameters(
                str(tmp_path), wider, family_of(wider), ["model.layers.0.mlp.up_proj.weight"]
            )
        )
    deeper = tiny_config("llama", num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"model\.layers\.3"):
        list(
            pretrained_parameters(
                str(tmp_path), deeper, family_of(deeper), ["model.layers.3.mlp.up_proj.weight"]
            )
        )
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="no readable safetensors"):
        list(pretrained_parameters(str(tmp_path), config, family_of(config), ["model.norm.weight"]))
