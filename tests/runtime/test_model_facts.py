"""Facts that planning derives from a model once: what they depend on, and what a store may do."""

import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from autohet.cli.main import main
from autohet.runtime.facts import fact_store, model_facts
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from planner.errors import ConfigError, InfeasibleError
from tests.harness.tiny_models import TINY


def job(model: dict[str, Any] | None = None, **training: Any) -> Job:
    return Job.from_document(
        {
            "name": "m",
            "model": model or {"config": TINY["llama"]},
            "training": {"global_batch_sequences": 2, "sequence_length": 8, **training},
        }
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, in a process that remembers nothing."""
    monkeypatch.setenv("AUTOHET_MODEL_CACHE", str(tmp_path / "models"))
    forget()
    return tmp_path / "models"


def forget() -> None:
    fact_store.remembered.clear()


@pytest.fixture
def derivations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the specs that are derived."""
    found: list[str] = []
    derive = model_facts.derive_spec

    def count(of: Job) -> Any:
        found.append(of.name)
        return derive(of)

    monkeypatch.setattr(model_facts, "derive_spec", count)
    return found


WARM_PLAN = """
import sys
from autohet.cli.main import main
code = main(sys.argv[1:])
assert code == 0, code
print("imported", [name for name in ("ray", "torch", "transformers") if name in sys.modules])
"""


CLUSTER = {
    "cluster_name": "c",
    "head_node_type": "head",
    "available_node_types": {
        "head": {"node_config": {"InstanceType": "m5.large"}, "resources": {"CPU": 2}},
        "a10g": {"node_config": {"InstanceType": "g5.xlarge"}, "max_workers": 2},
    },
}


def plan_arguments(folder: Path) -> list[str]:
    """Return arguments that plan pipelines and a program for a model of one block."""
    model = {"config": {**TINY["llama"], "num_hidden_layers": 1}}
    training = {"global_batch_sequences": 2, "sequence_length": 8, "precision": "fp32"}
    (folder / "job.yaml").write_text(yaml.safe_dump({"model": model, "training": training}))
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    files = ["--job", str(folder / "job.yaml"), "--cluster", str(folder / "cluster.yaml")]
    return ["plan", *files, "--compare", "varuna,hap", "--json"]


def test_a_second_plan_imports_neither_torch_nor_transformers_nor_ray(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pipelines and a program, planned here and again in a new process: the plans are equal."""
    arguments = plan_arguments(tmp_path)
    assert main(arguments) == 0
    first = capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-c", WARM_PLAN, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    second, imported = done.stdout.split("imported")
    assert imported == " []\n"
    found = [json.loads(out) for out in (first, second)]
    plans = [[each["plan"] for each in document["results"]] for document in found]
    assert plans[0] == plans[1]
    assert found[0]["launch"]["head"] == "head"
    assert found[0]["launch"] == found[1]["launch"]


def test_a_stored_fact_is_the_derived_one(store: Path, derivations: list[str]) -> None:
    first = planning_inputs(job())
    graph = model_facts.decoder(job(), 2)
    forget()
    second = planning_inputs(job())
    again = model_facts.decoder(job(), 2)
    assert first.spec == second.spec
    assert graph.graph.nodes == again.graph.nodes
    assert graph.graph.axes == again.graph.axes
    assert graph.split_dims == again.split_dims
    assert derivations == ["m"]


CHANGES: list[dict[str, Any]] = [
    {"model": {"config": {**TINY["llama"], "num_hidden_layers": 2}}},
    {"model": {"config": TINY["llama"], "vocabulary_multiple": 64}},
    {"precision": "fp32"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_changes_the_spec_is_derived_anew(
    store: Path, derivations: list[str], change: dict[str, Any]
) -> None:
    before = model_facts.planned_spec(job())
    after = model_facts.planned_spec(job(**change))
    assert before != after
    assert len(derivations) == 2


def test_another_release_or_another_program_derives_anew(
    store: Path, derivations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_facts.planned_spec(job())
    versions = fact_store.versions()
    for changed in ("torch", "transformers", "code"):
        others = {**versions, changed: "other"}
        monkeypatch.setattr(fact_store, "versions", partial(dict, others))
        model_facts.planned_spec(job())
    assert len(derivations) == 4


def test_a_changed_checkpoint_derives_anew(
    store: Path, tmp_path: Path, derivations: list[str]
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for layers in (2, 3):
        document = {**TINY["llama"], "num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(document | {"note": "x" * layers}))
        spec = model_facts.planned_spec(job({"pretrained": str(folder)}))
        assert spec.num_layers == layers
    assert len(derivations) == 2


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "no document"])
def test_a_damaged_document_is_derived_anew(
    store: Path, derivations: list[str], damage: str
) -> None:
    spec = model_facts.planned_spec(job())
    (path,) = store.iterdir()
    content = path.read_bytes()
    changed = {
        "truncated": content[:-20],
        "flipped": content.replace(b'"hidden_size":32', b'"hidden_size":33'),
        "empty": b"",
        "no document": b"\xff\x00",
    }[damage]
    assert changed != content
    path.write_bytes(changed)
    forget()
    assert model_facts.planned_spec(job()) == spec
    assert derivations == ["m", "m"]
    assert path.read_bytes() == content


def test_a_store_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOHET_MODEL_CACHE", str(tmp_path / "file"))
    forget()
    assert model_facts.planned_spec(job()).num_layers == 3


def test_the_store_can_be_switched_off(
    tmp_path: Path, derivations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOHET_MODEL_CACHE", "off")
    monkeypatch.setenv("AUTOHET_CACHE", str(tmp_path))
    model_facts.planned_spec(job())
    model_facts.planned_spec(job())
    assert derivations == ["m", "m"]
    assert not list(tmp_path.iterdir())


def test_the_store_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOHET_MODEL_CACHE", raising=False)
    monkeypatch.delenv("AUTOHET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert fact_store.directory() == Path("/x/autohet/models")
    monkeypatch.setenv("AUTOHET_CACHE", "/shared")
    assert fact_store.directory() == Path("/shared/models")


def test_the_oldest_documents_are_removed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fact_store, "MAX_DOCUMENTS", 2)
    for number in range(4):
        fact_store.recall(int, {"number": number}, partial(int, number))
        for path in store.iterdir():
            state = path.stat()
            os.utime(path, (state.st_atime - 10, state.st_mtime - 10))
    forget()
    assert len(list(store.iterdir())) == 2
    assert fact_store.recall(int, {"number": 3}, lambda: -1) == 3
    assert fact_store.recall(int, {"number": 0}, lambda: -1) == -1


def test_warnings_are_logged_again(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong: a key without effect is spoken of once, and never again."""
    of = job({"config": {**TINY["llama"], "embedding_multiplier_of_mine": 3}})
    for _ in range(2):
        caplog.clear()
        forget()
        with caplog.at_level(logging.WARNING):
            model_facts.planned_spec(of)
        assert "embedding_multiplier_of_mine have no effect" in caplog.text


def test_an_error_is_not_stored(store: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="unknown to transformers"):
            model_facts.planned_spec(job({"config": {"model_type": "llamaa"}}))
    assert not store.exists()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"config": TINY["llama"], "adapter": {"rank": 4}}, "weights are frozen"),
        ({"config": TINY["llama"], "vocabulary_multiple": 64}, "pads its vocabulary"),
        ({"config": TINY["mixtral"]}, "which experts see a token"),
        ({"config": {"model_type": "opt"}}, "model_type 'opt' cannot be trained"),
    ],
)
def test_a_model_without_a_program_says_why(
    store: Path, model: dict[str, Any], reason: str
) -> None:
    for _ in range(2):
        with pytest.raises(InfeasibleError, match=reason):
            model_facts.decoder(job(model), 2)
