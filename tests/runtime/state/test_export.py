"""An exported checkpoint is a model that transformers loads with the same logits."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from autohet.runtime.job import Job, ModelSection
from autohet.runtime.models.config import saved_document
from autohet.runtime.models.families import BUILT_IN
from autohet.runtime.models.layers.experts import CORRECTION_BIAS
from autohet.runtime.state.export import INDEX_NAME, ExportOptions, export_checkpoint
from autohet.runtime.state.model_files import model_files
from planner.errors import ConfigError
from recovery.checkpoint.commit import (
    CheckpointFacts,
    CheckpointPart,
    commit_checkpoint,
    write_shards,
)
from recovery.checkpoint.manifest import Manifest
from recovery.state.layout import Layout, TensorSpec, assign_writers
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage
from tests.harness.chat_tokenizer import (
    CHATML,
    MARKED,
    save_chat_tokenizer,
    special_tokens_of,
    trl_template,
)
from tests.harness.tiny_models import MIXTURES

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "rope_theta": 77.0},
    "llama-tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "llama-3.1": {"model_type": "llama", **SIZES, "rope_parameters": LLAMA3_ROPE},
    "llama-linear": {
        "model_type": "llama",
        **SIZES,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_theta": 500.0,
    },
    "mistral": {
        "model_type": "mistral",
        **SIZES,
        "rope_theta": 1e6,
        "sliding_window": 5,
        "head_dim": 16,
    },
    "mistral-no-window": {"model_type": "mistral", **SIZES, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SIZES, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen2-windows": {"model_type": "qwen2", **SIZES, **WINDOWS, "rope_theta": 1e6},
    "qwen2-yarn": {"model_type": "qwen2", **SIZES, "rope_scaling": YARN, "rope_theta": 1e6},
    "qwen3": {"model_type": "qwen3", **SIZES, "rope_theta": 1e6, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt2-untied": {"model_type": "gpt2", **GPT2, "tie_word_embeddings": False},
}
TIED = ("llama-tied", "qwen2", "gpt2")


def model_of(case: str | dict[str, Any]) -> Any:
    """A model of a case, or of a config, with weights of its own."""
    config = dict((TINY | OF_OTHER_FAMILIES)[case] if isinstance(case, str) else case)
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


def correction_biases(model: Any) -> list[tuple[str, torch.Tensor]]:
    """The routers' biases, which are buffers of the library."""
    return [(name, each) for name, each in model.named_buffers() if name.endswith(CORRECTION_BIAS)]


def _checkpoint(
    storage: Storage,
    model: Any,
    rows: int = 0,
    scalars: Mapping[str, str] | None = None,
    **more: Any,
) -> Manifest:
    """The model's parameters (a tied weight once, as named_parameters has it) as a checkpoint of
    one worker.
    """
    tensors = [*model.named_parameters(), *correction_biases(model)]
    state = {f"param/{name}": tensor.detach() for name, tensor in tensors}
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
    saved = model.config.to_dict()
    receipt = write_shards(
        CheckpointPart(storage, 9, "a/0"), state, layout, assign_writers(layout)["a/0"]
    )
    return commit_checkpoint(
        storage, 9, layout, [receipt], CheckpointFacts(scalars or {}, saved | more)
    )


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "durable"))


@pytest.mark.parametrize("case", sorted(TINY))
def test_rows_that_pad_the_vocabulary_are_not_exported(
    case: str, storage: Storage, tmp_path: Path
) -> None:
    model, out = model_of(case), tmp_path / "out"
    summary = export_checkpoint(
        storage, _checkpoint(storage, model, 320, padded_vocab_size=320), out
    )
    assert summary.num_bytes == sum(4 * parameter.numel() for parameter in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.arange(12).unsqueeze(0)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert "padded_vocab_size" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("case", [*sorted(TINY), *MIXTURES])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 10_000])
def test_from_pretrained_gives_equal_logits(
    case: str, max_shard_bytes: int, storage: Storage, tmp_path: Path
) -> None:
    model = model_of(case)
    out = tmp_path / "out"
    summary = export_checkpoint(
        storage, _checkpoint(storage, model), out, ExportOptions(max_shard_bytes=max_shard_bytes)
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (case in TIED)
    sharded = max_shard_bytes < 1 << 30
    assert (out / INDEX_NAME).exists() == sharded
    assert (len(summary.files) > 1) == sharded
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".safetensors") == sorted(
        summary.files
    )
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_biases_of_routers_stay_in_fp32(storage: Storage, tmp_path: Path) -> None:
    """As in the library, whose models in bf16 keep and load them so."""
    model = model_of("deepseek_v3")
    for _, bias in correction_biases(model):
        bias.copy_(1.0 + 1e-3 * torch.rand(bias.shape))
    export_checkpoint(
        storage, _checkpoint(storage, model), tmp_path / "out", ExportOptions("bfloat16")
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    pairs = list(zip(correction_biases(loaded), correction_biases(model), strict=True))
    assert pairs
    for (name, found), (_, expected) in pairs:
        assert torch.equal(found, expected), name


def test_dtype_is_cast_and_from_pretrained_keeps_it(storage: Storage, tmp_path: Path) -> None:
    model = model_of("llama")
    summary = export_checkpoint(
        storage, _checkpoint(storage, model), tmp_path / "out", ExportOptions("bfloat16")
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
    manifest = _checkpoint(storage, model_of("llama"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "model.safetensors").write_text("theirs")
    with pytest.raises(ConfigError, match="not an empty directory"):
        export_checkpoint(storage, manifest, full)
    with pytest.raises(ConfigError, match="float64"):
        export_checkpoint(storage, manifest, tmp_path / "new", ExportOptions("float64"))
    assert (full / "model.safetensors").read_text() == "theirs"
    assert not (tmp_path / "new").exists()


def job_of(tmp_path: Path, tokenizer: str, **model: Any) -> Job:
    return Job.from_document(
        {
            "name": "tiny",
            "model": model or {"config": TINY["llama"]},
            "training": {"global_batch_sequences": 2, "sequence_length": 8, "steps": 1},
            "data": {"source": str(tmp_path), "tokenizer": tokenizer},
        }
    )


def word_tokenizer(folder: Path) -> Any:
    """A tokenizer of the tokenizers library, saved by transformers as a directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, "a": 2, "rose": 3, "is": 4}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{{ messages[0]['content'] }}",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def exported(
    storage: Storage, tmp_path: Path, job: Job, case: str | dict[str, Any] = "llama"
) -> Path:
    model = model_of(case)
    files = model_files(job, model.config.to_dict())
    out = tmp_path / "out"
    export_checkpoint(storage, _checkpoint(storage, model, scalars=files.store(storage)), out)
    return out


@pytest.mark.parametrize("given", ["directory", "file", "file-alone"])
def test_the_tokenizer_of_the_data_lies_beside_the_weights(
    given: str, storage: Storage, tmp_path: Path
) -> None:
    original = word_tokenizer(tmp_path / "words")
    named = tmp_path / "words"
    if given == "file-alone":
        named = tmp_path / "alone"
        named.mkdir()
        (named / "tokenizer.json").write_bytes((tmp_path / "words/tokenizer.json").read_bytes())
    name = named if given == "directory" else named / "tokenizer.json"
    out = exported(storage, tmp_path, job_of(tmp_path, str(name)))
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded("a rose is a rose")["input_ids"] == original("a rose is a rose")["input_ids"]
    assert loaded.eos_token_id == 1
    if given != "file-alone":
        message = [{"role": "user", "content": "is"}]
        assert loaded.apply_chat_template(message, tokenize=False) == "is"
    assert GenerationConfig.from_pretrained(out).eos_token_id == 1


def test_a_model_of_bytes_has_a_tokenizer_of_bytes(storage: Storage, tmp_path: Path) -> None:
    out = exported(storage, tmp_path, job_of(tmp_path, "bytes"))
    loaded = AutoTokenizer.from_pretrained(out)
    text = "Größe \u0100 1\n\t\u20ac \U0001f600 "
    assert loaded(text)["input_ids"] == list(text.encode())
    assert loaded.decode(list(text.encode())) == text
    assert (loaded.eos_token_id, GenerationConfig.from_pretrained(out).eos_token_id) == (0, 0)


def test_the_generation_config_of_a_pretrained_model_is_kept(
    storage: Storage, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    model_of("llama").save_pretrained(source)
    (source / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    out = exported(storage, tmp_path, job_of(tmp_path, "bytes", pretrained=str(source)))
    assert GenerationConfig.from_pretrained(out).temperature == 0.7


def test_the_config_is_what_the_library_saves_and_can_be_pasted(
    storage: Storage, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    model = model_of("llama-3.1")
    model.config.attention_dropout = 0.25
    model.save_pretrained(source)
    saved = json.loads((source / "config.json").read_text())
    section = ModelSection(pretrained=str(source))
    assert saved_document(section)["use_cache"] is True
    document = saved_document(section)
    out = tmp_path / "out"
    export_checkpoint(storage, _checkpoint(storage, model, **document), out)
    written = json.loads((out / "config.json").read_text())
    assert {key: written.get(key) for key in saved} == saved
    pasted = ModelSection(config=written)
    assert saved_document(pasted)["rope_parameters"] == document["rope_parameters"]


def test_the_template_that_the_data_was_trained_by_is_exported(
    storage: Storage, tmp_path: Path
) -> None:
    word_tokenizer(tmp_path / "words")
    job = job_of(tmp_path, str(tmp_path / "words"))
    assert job.data is not None
    template = "{{ messages[0]['role'] }}"
    chat = replace(job.data, kind="chat", chat_template=template)
    out = exported(storage, tmp_path, replace(job, data=chat))
    message = [{"role": "user", "content": "is"}]
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded.apply_chat_template(message, tokenize=False) == "user"


def test_a_tokenizer_that_only_the_nodes_have_stops_no_job(
    storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = exported(storage, tmp_path, job_of(tmp_path, str(tmp_path / "on-the-nodes")))
    assert "on-the-nodes' is not on this machine" in caplog.text
    assert AutoModelForCausalLM.from_pretrained(out) is not None
    assert not (out / "tokenizer.json").exists()


ALWAYS_TIED = {"cohere2", "gemma2"}
"""Families without a weight of their own for the output."""
OF_OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    family: {
        **SIZES,
        "model_type": family,
        "pad_token_id": 0,
        "tie_word_embeddings": family in ALWAYS_TIED,
        **more,
    }
    for family, more in {
        "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
        },
        "gemma2": {"head_dim": 16},
        "gemma3_text": {"head_dim": 16},
        "glm4": {"head_dim": 16},
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        "granite": {},
        "mixtral": {"num_local_experts": 4},
        "olmo2": {},
        "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
        "phi3": {},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "qwen3_5_text": {
            "mtp_num_hidden_layers": 1,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "smollm3": {},
        "starcoder2": {},
        **{
            name: {**family.example, "num_hidden_layers": 2, "layer_types": None}
            for name, family in BUILT_IN.items()
            if family.example is not None
        },
    }.items()
}


def byte_level_tokenizer(folder: Path) -> None:
    """A tokenizer as GPT-2, Qwen and Llama 3 have it, with a token beyond its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(["a rose is a rose is a rose"] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>").save_pretrained(folder)


def sentence_piece_tokenizer(folder: Path) -> None:
    """A tokenizer as Llama 2 and Mistral have it: pieces, with a token for each other byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    inner = Tokenizer(model)
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **named).save_pretrained(folder)


needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="gguf is not installed"
)


@needs_gguf
@pytest.mark.parametrize("kind", ["bytes", "byte-level", "sentence-piece"])
def test_llama_cpps_readers_take_the_exported_directory(
    kind: str, storage: Storage, tmp_path: Path
) -> None:
    """Its converter reads vocabulary, merges, special tokens, sampling defaults and sizes."""
    import gguf
    from gguf.vocab import BpeVocab, LlamaHfVocab

    make = {"byte-level": byte_level_tokenizer, "sentence-piece": sentence_piece_tokenizer}.get(
        kind
    )
    if make is not None:
        make(tmp_path / "tokenizer")
    name = "bytes" if make is None else str(tmp_path / "tokenizer")
    out = exported(storage, tmp_path, job_of(tmp_path, name))
    original = AutoTokenizer.from_pretrained(out)
    vocabulary = LlamaHfVocab(out) if kind == "sentence-piece" else BpeVocab(out)
    tokens = list(vocabulary.all_tokens())
    assert len(tokens) == vocabulary.vocab_size == len(original)
    special = gguf.SpecialVocab(out, load_merges=True, n_vocab=vocabulary.vocab_size)
    assert special.special_token_ids["eos"] == original.eos_token_id
    assert bool(special.merges) == (kind != "bytes")
    metadata = gguf.Metadata.load(None, out, None, 20_000)
    assert metadata.name is not None


def test_every_family_has_a_case() -> None:
    cases = [*TINY.values(), *OF_OTHER_FAMILIES.values()]
    assert {case["model_type"] for case in cases} == set(BUILT_IN)


OWN = "{{ messages[0]['content'] }} of my own"


@pytest.mark.parametrize("given", [None, OWN])
@pytest.mark.parametrize("form", ["config", "named in config", "file", "named files"])
def test_the_chat_template_of_an_export_is_the_tokenizers_own_unless_the_job_asks(
    form: str, given: str | None, storage: Storage, tmp_path: Path
) -> None:
    folder = tmp_path / "chat"
    named: dict[str, str] = {"default": CHATML, "tool_use": MARKED}
    save_chat_tokenizer(folder, named if form == "named files" else CHATML)
    if "config" in form:
        (folder / "chat_template.jinja").unlink()
        path = folder / "tokenizer_config.json"
        template: Any = CHATML
        if form.startswith("named"):
            template = [{"name": name, "template": each} for name, each in named.items()]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    job = job_of(tmp_path, str(folder))
    assert job.data is not None
    data = replace(job.data, kind="chat", chat_template=given)
    out = exported(storage, tmp_path, replace(job, data=data))
    expected = AutoTokenizer.from_pretrained(folder).chat_template if given is None else given
    assert AutoTokenizer.from_pretrained(out).chat_template == expected


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("qwen2_5", ["<|im_end|>"]),
        ("qwen3", ["<|im_end|>"]),
        ("llama3", ["<|eot_id|>"]),
        ("gemma", ["<end_of_turn>"]),
        ("phi3", ["<|end|>"]),
        ("gptoss", ["<|return|>"]),
        ("glm4moe", ["<|user|>", "<|observation|>"]),
        ("deepseekv3", ["<｜end▁of▁sentence｜>"]),
        ("cohere", ["<|END_OF_TURN_TOKEN|>"]),
    ],
)
def test_generation_ends_where_the_turns_trained_on_end(
    template: str, ends: list[str], storage: Storage, tmp_path: Path
) -> None:
    """`ends`: end tokens of the published chat models' generation configs, beside the base's."""
    source = trl_template(template)
    tokenizer = save_chat_tokenizer(tmp_path / "chat", source, special_tokens_of(source))
    tokenizer.bos_token = "<s>"
    tokenizer.save_pretrained(tmp_path / "chat")
    base = tmp_path / "base"
    model_of("llama").save_pretrained(base)
    own = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = {"eos_token_id": own, "temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(config))
    job = job_of(tmp_path, str(tmp_path / "chat"), pretrained=str(base))
    assert job.data is not None
    job = replace(job, data=replace(job.data, kind="chat"))
    found = GenerationConfig.from_pretrained(exported(storage, tmp_path, job))
    assert found.eos_token_id == [own, *tokenizer.convert_tokens_to_ids(ends)]
    assert found.temperature == 0.6


@pytest.mark.parametrize("own", [2, [2, 1], None])
def test_generation_ends_with_the_end_of_documents_too(
    own: int | list[int] | None, storage: Storage, tmp_path: Path
) -> None:
    word_tokenizer(tmp_path / "words")
    base = tmp_path / "base"
    model_of("llama").save_pretrained(base)
    path = base / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": own, "_from_model_config": True}))
    out = exported(
        storage, tmp_path, job_of(tmp_path, str(tmp_path / "words"), pretrained=str(base))
    )
    expected = {2: [2, 1], None: 1}[own] if not isinstance(own, list) else own
    assert GenerationConfig.from_pretrained(out).eos_token_id == expected
    if isinstance(own, list):
        assert (out / path.name).read_bytes() == path.read_bytes()
