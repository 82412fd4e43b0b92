"""Exports of every family and rope type give equal logits in transformers 4.56 and 5."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from recovery.storage.open import open_storage
from tests.harness.chat_tokenizer import save_chat_tokenizer
from tests.harness.tiny_models import AUTO
from tests.runtime.state.test_export import (
    OF_OTHER_FAMILIES,
    TINY,
    YARN,
    exported,
    job_of,
    model_of,
)

OLDER = ("transformers==4.56.2", "tokenizers==0.22.0", "huggingface-hub==0.34.4")
"""An older transformers that readers of exports have, and what it imports, as pip installs them."""
READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, __version__
assert __version__.startswith("4."), __version__
for out in sys.argv[1:]:
    try:
        model = AutoModelForCausalLM.from_pretrained(out).eval()
        with torch.no_grad():
            torch.save(model(torch.arange(24).reshape(2, 12)).logits, out + "/logits.pt")
        assert len(AutoTokenizer.from_pretrained(out)("ab")["input_ids"]) == 2
        GenerationConfig.from_pretrained(out)
        assert model.config.use_cache and model.config.architectures
    except Exception as error:
        open(out + "/error", "w").write(repr(error))
"""
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 4.0, 5.0, 6.0]}


def _cases_of_older() -> dict[str, dict[str, Any]]:
    """Every family that transformers 4.56 has, and every rope type."""
    ropes: dict[str, dict[str, Any]] = {
        "longrope": {**LONG, "original_max_position_embeddings": 8, "factor": 8.0},
        "dynamic": {"factor": 2.0},
        "yarn": YARN,
    }
    cases = TINY | OF_OTHER_FAMILIES
    for rope_type, more in ropes.items():
        rope = {"rope_type": rope_type, "rope_theta": 500.0, **more}
        cases |= {f"llama-{rope_type}": {**TINY["llama"], "rope_parameters": rope}}
    for name in ("cohere2", "deepseek_v3", "gemma3_text", "glm4", "gpt_oss", "phi3", "smollm3"):
        cases |= {f"{name}-special": dict(AUTO[name])}
    # 4.56 has these as constants.
    cases["gpt_oss-special"] |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    return {name: case for name, case in cases.items() if case["model_type"] not in NEWER}


NEWER = ("ministral", "ministral3", "qwen3_5_text", "vaultgemma")
"""Model types that transformers 4.56 has not."""
OF_OLDER = _cases_of_older()


@pytest.fixture(scope="session")
def older_transformers() -> Path:
    """A directory with transformers 4.56, installed once beside the environment's packages.

    AUTOHET_TRANSFORMERS_4 names one that is installed already.
    """
    given = os.environ.get("AUTOHET_TRANSFORMERS_4")
    if given:
        return Path(given)
    root = Path(sys.prefix) / "older_transformers"
    folder = root / "4.56.2"
    if not folder.exists():
        fresh = root / str(os.getpid())
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(fresh), *OLDER]
        installed = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
        if installed.returncode:
            pytest.skip(f"pip installs no transformers 4.56 here: {installed.stderr[-300:]}")
        # Another process may have been faster.
        with contextlib.suppress(OSError):
            fresh.rename(folder)
    return folder


@pytest.fixture(scope="module")
def read_by_older(older_transformers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of all cases, each with the logits or the error of transformers 4.56."""
    root = tmp_path_factory.mktemp("exports")
    outs = []
    for case in OF_OLDER:
        folder = root / case
        storage = open_storage(str(folder / "durable"))
        tokenizer = "bytes"
        if case == "llama":
            # As transformers 5 saves one, in a form that 4.56 refuses.
            library = save_chat_tokenizer(folder / "tokenizer", texts=())
            library.add_special_tokens({"additional_special_tokens": ["<tool>"]})
            library.save_pretrained(folder / "tokenizer")
            tokenizer = str(folder / "tokenizer")
        outs.append(str(exported(storage, folder, job_of(folder, tokenizer), OF_OLDER[case])))
    paths = f"{older_transformers}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", READER, *outs]
    subprocess.run(command, check=True, env=environment, timeout=600)
    return root


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", sorted(OF_OLDER))
def test_transformers_4_and_5_give_equal_logits(case: str, read_by_older: Path) -> None:
    """Wrong: rope parameters that one of the two does not read."""
    out = read_by_older / case / "out"
    assert not (out / "error").exists(), (out / "error").read_text()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = model_of(OF_OLDER[case])(tokens).logits
        newer = AutoModelForCausalLM.from_pretrained(out).eval()(tokens).logits
    for found in (torch.load(out / "logits.pt"), newer):
        assert (found - expected).abs().max() / expected.abs().max() < 1e-5
