"""Loads of experts as a pretrained model routes the job's data, beside the library's routing."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from autohet.cli.main import main
from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.models.layers.experts import is_dense, num_experts
from autohet.runtime.profiling.routing import SEQUENCES, why_unmeasured
from autohet.runtime.step.batches import Batches
from planner.cost.layers.experts import load_spread
from tests.harness.tiny_models import AUTO, random_parameters, tiny_config

CPU = torch.device("cpu")


def job_of(root: Path, model: dict[str, Any], **sections: Any) -> Path:
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    document = {
        "name": "m",
        "model": model,
        "training": {
            "global_batch_sequences": 2,
            "sequence_length": 16,
            "precision": "fp32",
            "device": "cpu",
        },
        "data": {"source": str(root / "text.txt"), "cache": str(root / "cache")},
        **sections,
    }
    path = root / "job.yaml"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job with a saved tiny qwen3_moe, of whose three blocks the second is dense."""
    config = tiny_config("qwen3_moe", vocab_size=256)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(random_parameters(config))
    model.save_pretrained(tmp_path / "model")
    return job_of(tmp_path, {"pretrained": str(tmp_path / "model")})


def librarys_spread(path: Path) -> float:
    """The mean spread of the tokens that the library's routers send to each expert."""
    job = Job.from_yaml(str(path))
    assert job.data is not None
    model: Any = AutoModelForCausalLM.from_pretrained(job.model.pretrained, dtype=torch.float32)
    counts: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        if not is_dense(model.config, layer):
            block.mlp.gate.register_forward_hook(
                lambda _, args, out, layer=layer: counts.update({layer: out[2]})
            )
    dataset = prepare_dataset(job.data, job.training.sequence_length)
    tokens, _ = Batches(dataset, job.training.seed, SEQUENCES, CPU)(0, range(SEQUENCES))
    with torch.no_grad():
        model(tokens)
    experts = num_experts(model.config) or 0
    loads = [torch.bincount(each.flatten(), minlength=experts) for each in counts.values()]
    assert len(loads) == 2
    return sum(load_spread(each.tolist()) for each in loads) / len(loads)


def test_the_command_measures_the_models_own_routing(
    job: Path, tmp_path: Path, capsys: Any
) -> None:
    """Rows of blocks with experts have it; those of dense blocks have none."""
    table = tmp_path / "profile.csv"
    files = ["--job", str(job), "--out", str(table), "--device", "cpu"]
    assert main(["profile", *files, "--microbatches", "1", "--repeats", "1", "--json"]) == 0
    expected = pytest.approx(librarys_spread(job))
    document = json.loads(capsys.readouterr().out)
    assert document["expert_load_spread"] == expected
    assert document["exact_products"] == {"cpu": True}
    loads = document["largest_rank_load_by_tp_degree"]
    assert list(loads) == ["2", "4"]
    assert 1 < loads["2"] < loads["4"]
    with table.open() as file:
        rows = {row["layer"]: row["expert_load_spread"] for row in csv.DictReader(file)}
    assert set(rows) == {"embedding", "block:0", "block:1", "head"}
    assert float(rows.pop("block:0")) == expected
    assert set(rows.values()) == {""}


def test_unmeasured_loads_have_a_reason(job: Path, tmp_path: Path) -> None:
    pretrained = Job.from_yaml(str(job))
    config = load_config(pretrained.model)
    assert why_unmeasured(pretrained, config) is None
    without = Job.from_yaml(
        str(job_of(tmp_path, {"pretrained": pretrained.model.pretrained}, data=None))
    )
    assert "no data" in str(why_unmeasured(without, config))
    scratch = Job.from_yaml(str(job_of(tmp_path, {"config": AUTO["qwen3_moe"]})))
    assert "from scratch" in str(why_unmeasured(scratch, config))
    assert "dense" in str(why_unmeasured(pretrained, tiny_config("llama")))
