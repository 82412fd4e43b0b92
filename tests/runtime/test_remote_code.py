"""Code that a model's or tokenizer's repository brings never runs unless the job says so."""

import ast
import json
from pathlib import Path

import pytest

from autohet.runtime.data.tokenization import load_tokenizer
from autohet.runtime.job import Job
from autohet.runtime.models.skeleton import skeleton
from planner.errors import ConfigError
from tests.harness.tiny_models import tiny_config

ROOT = Path(__file__).parents[2]
LOADERS = {"from_pretrained", "from_config"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A tokenizer whose class lies beside it, and leaves a trace when it is imported."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    config = {"model_type": "odd", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizers_code_does_not_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left open, transformers asks at the terminal, and a "y" runs it."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code: true"):
        load_tokenizer(str(repository))
    assert not (tmp_path / "ran").exists()


def test_it_runs_where_the_job_says_so(repository: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, AttributeError)):
        load_tokenizer(str(repository), trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_a_config_that_names_code_builds_the_librarys_own_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks at the terminal"))
    config = tiny_config("llama")
    config.auto_map = {"AutoModelForCausalLM": "evil--repo.Model"}
    assert type(skeleton(config)).__module__.startswith("transformers.models.llama")


def test_the_job_says_so_by_one_key() -> None:
    document = {
        "model": {"config": {"model_type": "gpt2"}, "trust_remote_code": True},
        "training": {"global_batch_sequences": 8, "sequence_length": 16},
        "data": {"source": "x"},
    }
    job = Job.from_document(document)
    assert job.data is not None
    assert job.data.trust_remote_code
    assert Job.from_document(job.to_document()) == job
    del document["model"]["trust_remote_code"]
    assert not Job.from_document(document).data.trust_remote_code


def test_no_call_leaves_it_open() -> None:
    """Every call of transformers' loaders says what it trusts; peft's run no code."""
    for path in sorted((ROOT / "autohet").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or "PeftModel" in ast.unparse(node.func):
                continue
            if getattr(node.func, "attr", "") in LOADERS:
                named = {keyword.arg for keyword in node.keywords}
                assert "trust_remote_code" in named, f"{path}:{node.lineno}"
