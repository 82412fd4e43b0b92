"""Published config.json files and checkpoints: equal to the library's own model, or refused by
name. The judge is `AutoModelForCausalLM.from_pretrained` on the same directory.
"""

import dataclasses
import functools
import inspect
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config, read_config
from autohet.runtime.models.config_keys import (
    DECODER_KEYS,
    OLDER_SPELLINGS,
    REFUSED,
    WITHOUT_EFFECT,
)
from autohet.runtime.models.families import BUILT_IN
from autohet.runtime.models.pretrained import pretrained_parameters
from autohet.runtime.models.registry import FAMILIES, family_of
from planner.errors import ConfigError
from tests.harness.published_configs import EXPECTED_REFUSALS, PUBLISHED, shrunk
from tests.harness.selection import one_of_each
from tests.harness.tiny_models import AUTO, TINY, stage_chain

TOLERANCE = 2e-5
LENGTH = 12


def stored_buffers(model: Any) -> list[tuple[str, torch.Tensor]]:
    stored = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def write_checkpoint(folder: Path, document: dict[str, Any]) -> None:
    """Random weights of the library's model for a config.json, which is written as it is given."""
    (folder / "config.json").write_text(json.dumps(document))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(parameter.shape, generator=generator) * 0.3
        for name, parameter in [*model.named_parameters(), *stored_buffers(model)]
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def change_tensors(folder: Path, change: Any) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def source(folder: Path) -> Any:
    return ModelSection(config=None, pretrained=str(folder), revision=None)


def parameter_specs(model: Any) -> dict[str, Any]:
    config = load_config(model)
    return family_of(config).parameter_specs(config)


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    config = load_config(source(folder))
    family = family_of(config)
    names = family.parameter_specs(config)
    parameters = dict(pretrained_parameters(str(folder), config, family, names))
    hidden = tokens
    for stage in stage_chain(config, parameters, [1] * family.num_layers(config)):
        hidden = stage(hidden)
    return hidden.detach()


TOKENS = torch.arange(2 * LENGTH).reshape(2, LENGTH)


def library_logits(folder: Path) -> torch.Tensor:
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return stock(TOKENS, use_cache=False).logits


def assert_equal_to_the_library(folder: Path, expected: torch.Tensor | None = None) -> None:
    """`expected`: the library's logits, where the caller has them."""
    if expected is None:
        expected = library_logits(folder)
    found = our_logits(folder, TOKENS)
    assert (found - expected).abs().max() / expected.abs().max() < TOLERANCE


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - set(EXPECTED_REFUSALS)))
def test_a_published_config_is_the_librarys_model(name: str, tmp_path: Path) -> None:
    document = shrunk(name)
    write_checkpoint(tmp_path, document)
    assert_equal_to_the_library(tmp_path)
    pasted = load_config(ModelSection(config=document))
    of_file = load_config(source(tmp_path))
    differing = {k for k, v in pasted.to_dict().items() if of_file.to_dict().get(k, v) != v}
    assert differing <= {"_name_or_path"}


@pytest.mark.parametrize("name", sorted(EXPECTED_REFUSALS))
def test_other_published_configs_are_refused_by_name(name: str, tmp_path: Path) -> None:
    document = shrunk(name)
    (tmp_path / "config.json").write_text(json.dumps(document))
    for model in (
        source(tmp_path),
        ModelSection(config=document),
    ):
        with pytest.raises(ConfigError, match=EXPECTED_REFUSALS[name]):
            parameter_specs(model)


@functools.cache
def sources_of_modules(model_type: str) -> list[str]:
    """Code of the library's classes that a decoder of this type is made of."""
    config = AutoConfig.for_model(**TINY[model_type])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    classes = {base for module in model.modules() for base in type(module).__mro__}
    own = {each for each in classes if each.__module__.startswith("transformers.models.")}
    return [inspect.getsource(each) for each in own]


def keys_of_the_library(model_type: str) -> tuple[set[str], set[str]]:
    """Fields of the library's config class, and keys that its modules read."""
    code = "".join(sources_of_modules(model_type))
    read = set(re.findall(r"config\.([a-z]\w*)\b(?!\()", code))
    read |= set(re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", code))
    fields = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    return fields, read - {"to_dict"}


UNREAD = {"olmoe": {"sliding_window"}}
"""Keys that the library's modules read, and that have no effect all the same."""


@pytest.mark.parametrize("model_type", sorted(BUILT_IN))
def test_every_key_of_the_librarys_class_and_modules_is_classified(model_type: str) -> None:
    """A key that a later release of transformers adds, or that we left out, fails here."""
    fields, read = keys_of_the_library(model_type)
    family = BUILT_IN[model_type]
    classified = family.config_keys | UNREAD.get(model_type, set()) | WITHOUT_EFFECT | set(REFUSED)
    assert fields | read <= classified
    assert not family.config_keys & (WITHOUT_EFFECT | set(REFUSED))


READ_BY_THE_CONFIG_CLASS = OLDER_SPELLINGS | {
    "original_max_position_embeddings",  # moved into rope_parameters by RotaryEmbeddingConfigMixin
    "qk_head_dim",  # set by DeepSeek's class, and saved
    "rope_local_base_freq",  # moved into rope_parameters by Gemma's class
    "sliding_window_pattern",  # turned into layer_types by Cohere's and Gemma's classes
}
"""Keys that are no fields, and that no module reads: the class turns them into fields."""


@pytest.mark.parametrize("model_type", sorted(BUILT_IN))
def test_every_key_of_a_family_is_the_librarys(model_type: str) -> None:
    """A job's key that the library does not know would have no effect and give no warning."""
    fields, read = keys_of_the_library(model_type)
    aliases = CONFIG_MAPPING[model_type].attribute_map
    known = fields | read | set(aliases) | set(aliases.values()) | READ_BY_THE_CONFIG_CLASS
    unknown = sorted(BUILT_IN[model_type].config_keys - known)
    assert not unknown, f"remove {unknown} from config_keys: transformers' {model_type} has none"


OTHER_SPELLINGS = frozenset(
    {"no_rope_layer_interval", "qk_head_dim", "rope_local_base_freq", "sliding_window_pattern"}
)
"""Keys from which the library makes other fields, which the example gives."""
OF_ONE_MODULE = frozenset(
    {"activation_function", "hidden_activation", "layer_norm_eps", "layer_norm_epsilon"}
)
"""Keys that one module of the library reads for itself, whatever stage it is in."""
SHOWN_ELSEWHERE: dict[str, set[str]] = {
    "gemma3_text": {"attention_bias"},  # as gemma2, whose example has it
    "gpt2": {"n_inner", "scale_attn_by_inverse_layer_idx"},  # LEFT_OVER
    "mixtral": {"num_experts_per_tok"},  # its default, 2 of 6 experts, shows
    "olmoe": {"clip_qkv"},  # a clamp of each element on its own
    "qwen3": {  # LEFT_OVER, and qwen2's windows
        "attention_bias",
        "max_window_layers",
        "sliding_window",
        "use_sliding_window",
    },
    "qwen3_moe": {  # mlp_only_layers chooses dense blocks too; windows are those of mixtral
        "decoder_sparse_step",
        "sliding_window",
        "use_sliding_window",
    },
}
"""Keys of older families that their tiny models leave at the default, with the reason."""


def is_shown(key: str, model_type: str) -> bool:
    """True if a tiny model of the type gives the key a value with an effect.

    A switch that is on by default has one.
    """
    default = getattr(CONFIG_MAPPING[model_type](), key, None)
    if default is True:
        return True
    documents = [each for each in TINY.values() if each["model_type"] == model_type]
    return any(
        getattr(AutoConfig.for_model(**document), key, None) != default for document in documents
    )


@pytest.mark.parametrize("model_type", sorted(BUILT_IN))
def test_the_example_shows_every_special_key(model_type: str) -> None:
    """At its default a key proves nothing: parity tests pass with a hook that ignores it."""
    family = BUILT_IN[model_type]
    special = family.config_keys - DECODER_KEYS - OTHER_SPELLINGS - OF_ONE_MODULE
    special -= set(family.dropouts)  # test_dropout.py sets each of them
    special -= SHOWN_ELSEWHERE.get(model_type, set())
    hidden = sorted(key for key in special if not is_shown(key, model_type))
    assert not hidden, f"give the example of {model_type} values other than the default of {hidden}"


LEFT_OVER: dict[str, Any] = {
    "sliding_window": 3,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "attention_bias": True,
    "mlp_bias": True,
    "head_dim": 4,
    "num_key_value_heads": 1,
    "padded_vocab_size": 128,
    "partial_rotary_factor": 0.5,
    "n_inner": 20,
    "scale_attn_by_inverse_layer_idx": True,
    "tie_word_embeddings": True,
    "rope_theta": 77.0,
    "original_max_position_embeddings": 8,
    "attention_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "multi_query": True,
    "reorder_and_upcast_attn": True,
    "output_attentions": True,
    "is_decoder": False,
    "pad_token_id": 4,
    "qk_layernorm": True,
    "attn_implementation": "eager",
}


LEFT_OVER_OF_AUTO = (
    "attention_bias",
    "embedding_multiplier",
    "head_dim",
    "layer_types",
    "partial_rotary_factor",
    "sliding_window",
)
LEFT_OVER_CASES = [
    (model_type, key)
    for model_type in sorted(BUILT_IN)
    for key in (LEFT_OVER_OF_AUTO if model_type in AUTO else sorted(LEFT_OVER))
]


@pytest.mark.parametrize(("model_type", "key"), LEFT_OVER_CASES)
def test_a_left_over_key_is_the_librarys_or_refused(
    model_type: str, key: str, tmp_path: Path
) -> None:
    document = {**TINY[model_type], "num_hidden_layers": 2}
    if model_type in AUTO and "layer_types" in document:
        document["layer_types"] = [*document["layer_types"][:1], "full_attention"]
    if "no_rope_layers" in document:
        document["no_rope_layers"] = [1, 0]
    if model_type == "gpt2":
        document = {**TINY[model_type], "n_layer": 2}
    for other in ("sliding_window", "use_sliding_window", "max_window_layers"):
        document.pop(other, None)
    document[key] = LEFT_OVER[key]
    try:
        write_checkpoint(tmp_path, document)
    except Exception:  # noqa: BLE001
        pytest.skip("the library itself does not build this")
    try:
        load_config(source(tmp_path))
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert not refusal or key in refusal
    if refusal:
        return
    try:
        expected = library_logits(tmp_path)
    except Exception:  # noqa: BLE001
        with pytest.raises((ConfigError, RuntimeError)):
            our_logits(tmp_path, TOKENS)
        return
    assert_equal_to_the_library(tmp_path, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "rope_type 'mrope'"),
        ({"rope_scaling": {"rope_type": "llama4", "factor": 2.0}}, "rope_type 'llama4'"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_rotary_embeddings_that_the_library_cannot_compute_are_refused_by_their_key(
    model_type: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({**TINY[model_type], **change})


@pytest.mark.parametrize("model_type", sorted(BUILT_IN))
def test_a_tied_config_beside_a_head_that_differs_has_two_tensors(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, {**TINY[model_type], "tie_word_embeddings": False})
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"tie_word_embeddings": True}))
    assert_equal_to_the_library(tmp_path)
    assert not load_config(source(tmp_path)).tie_word_embeddings
    assert "trained as two tensors" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "stored"),
    one_of_each(product(sorted(BUILT_IN), ["both", "head", "embedding"])),
)
def test_a_tied_head_may_be_stored_in_any_way(model_type: str, stored: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**TINY[model_type], "tie_word_embeddings": True})
    name = f"{FAMILIES[model_type].token_embedding}.weight"

    def store(state: dict[str, torch.Tensor]) -> None:
        if stored != "embedding":
            state["lm_head.weight"] = state[name].clone()
        if stored == "head":
            del state[name]

    change_tensors(tmp_path, store)
    assert load_config(source(tmp_path)).tie_word_embeddings
    assert_equal_to_the_library(tmp_path)


def quantize_fp8(folder: Path, block: int, **more: Any) -> None:
    """Store all projections as fp8 with a scale for each block, as published fp8 models do."""

    def quantize(state: dict[str, torch.Tensor]) -> None:
        for name in [each for each in state if each.endswith("proj.weight")]:
            weight = state[name]
            rows, columns = weight.shape
            tiles = weight.reshape(rows // block, block, columns // block, block)
            scales = tiles.abs().amax(dim=(1, 3)) / 448
            state[name] = (
                (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(rows, columns)
            )
            state[f"{name}_scale_inv"] = scales

    change_tensors(folder, quantize)
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    } | more
    (folder / "config.json").write_text(json.dumps(document))


def dequantized_copy(folder: Path, into: Path) -> None:
    """What the library's own operation makes of fp8 weights, as a plain checkpoint."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    state = load_file(folder / "model.safetensors")
    operation = Fp8Dequantize(None)
    for scale in [name for name in state if name.endswith("_scale_inv")]:
        name = scale.removesuffix("_scale_inv")
        state[name] = operation._dequantize_one(state[name], state.pop(scale), torch.float32)
    into.mkdir()
    save_file(state, into / "model.safetensors", {"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    del document["quantization_config"]
    (into / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_fp8_weights_are_dequantized_as_the_library_does(model_type: str, tmp_path: Path) -> None:
    document = {**TINY[model_type], "hidden_size": 32, "intermediate_size": 48}
    write_checkpoint(tmp_path, document)
    quantize_fp8(tmp_path, 16)
    dequantized_copy(tmp_path, tmp_path / "plain")
    tokens = torch.arange(LENGTH).unsqueeze(0)
    expected = our_logits(tmp_path / "plain", tokens)
    assert_equal_to_the_library(tmp_path / "plain")
    assert torch.equal(our_logits(tmp_path, tokens), expected)
    assert not hasattr(load_config(source(tmp_path)), "quantization_config")


def fp8_maps(
    folder: Path, shape: tuple[int, int], block: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """A checkpoint with fp8 maps of random scales whose blocks only their shapes tell.

    Returns the maps, dequantized element by element.
    """
    document = {**TINY["llama"], "hidden_size": shape[1], "intermediate_size": shape[0]}
    write_checkpoint(folder, document | {"num_attention_heads": 1, "num_key_value_heads": 1})
    generator = torch.Generator().manual_seed(1)
    expected = {}

    def quantize(state: dict[str, torch.Tensor]) -> None:
        for name in [each for each in state if "up_proj" in each or "gate_proj" in each]:
            stored = state[name].to(torch.float8_e4m3fn)
            grid = [-(-length // size) for length, size in zip(shape, block, strict=True)]
            scales = torch.rand(grid, generator=generator) + 0.5
            state[name], state[f"{name}_scale_inv"] = stored, scales
            expected[name] = stored.float().clone()
            for row in range(shape[0]):
                for column in range(shape[1]):
                    expected[name][row, column] *= scales[row // block[0], column // block[1]]

    change_tensors(folder, quantize)
    return expected


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((50, 24), (1, 24)),  # a scale for each row
        ((130, 16), (8, 16)),  # ceil(130 / 17) is 8, and 7.6 rows would be no size
        ((50, 34), (3, 34)),
        ((37, 24), (37, 1)),
        ((61, 40), (4, 2)),
    ],
)
def test_fp8_blocks_without_a_size_are_known_where_shapes_leave_one(
    shape: tuple[int, int], block: tuple[int, int], tmp_path: Path
) -> None:
    expected = fp8_maps(tmp_path, shape, block)
    config = load_config(source(tmp_path))
    found = dict(pretrained_parameters(str(tmp_path), config, FAMILIES["llama"], list(expected)))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("shape", "block"), [((40, 24), (16, 24)), ((48, 32), (16, 16)), ((300, 16), (128, 16))]
)
def test_fp8_blocks_of_which_several_fit_are_refused(
    shape: tuple[int, int], block: tuple[int, int], tmp_path: Path
) -> None:
    fp8_maps(tmp_path, shape, block)
    with pytest.raises(ConfigError, match="put it back, with weight_block_size"):
        our_logits(tmp_path, torch.arange(LENGTH).unsqueeze(0))


def test_fp8_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**TINY["llama"], "intermediate_size": 48})
    quantize_fp8(tmp_path, 16, weight_block_size=[128, 128])
    with pytest.raises(ConfigError, match="blocks of"):
        our_logits(tmp_path, torch.arange(LENGTH).unsqueeze(0))


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"load_in_8bit": True},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "quark"},
        {"quant_method": "torchao"},
        {"quant_method": "fbgemm_fp8"},
    ],
    ids=lambda each: each.get("quant_method", "unnamed"),
)
def test_other_quantized_checkpoints_are_refused_by_name(
    quantization: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, TINY["llama"])
    document = {**TINY["llama"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(document))
    name = quantization.get("quant_method", "an unnamed method")
    with pytest.raises(ConfigError, match=f"quantized by {name}"):
        load_config(source(tmp_path))


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.mlp.up_proj.SCB",
        "model.layers.0.mlp.up_proj.weight.absmax",
        "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
        "model.layers.0.mlp.up_proj.qweight",
        "model.layers.0.mlp.up_proj.weight_packed",
    ],
)
def test_scales_without_a_quantization_config_are_refused(tensor: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY["llama"])
    change_tensors(tmp_path, lambda state: state.update({tensor: torch.ones(50)}))
    with pytest.raises(ConfigError, match=re.escape(tensor)):
        load_config(source(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_without_their_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY["llama"])
    name = "model.layers.1.self_attn.q_proj.weight"
    change_tensors(tmp_path, lambda state: state.update({name: state[name].to(dtype)}))
    with pytest.raises(ConfigError, match=r"layers\.1.*without scales"):
        our_logits(tmp_path, torch.arange(LENGTH).unsqueeze(0))


def test_tensors_that_are_not_used_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, TINY["llama"])
    extra = {
        "model.layers.3.mlp.up_proj.weight": torch.ones(2, 2),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    change_tensors(tmp_path, lambda state: state.update(extra))
    assert_equal_to_the_library(tmp_path)
    assert "2 tensors are no parameters" in caplog.text
    assert "layers.0.self_attn.q_proj.bias" in caplog.text


def test_a_checkpoint_that_lacks_a_tensor_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path, TINY["llama"])
    change_tensors(tmp_path, lambda state: state.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.up_proj"):
        load_config(source(tmp_path))
