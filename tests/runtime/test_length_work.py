"""The work of rows by the lengths of their documents, against counts of FLOPs."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from autohet.runtime.data import prepare_dataset
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import DataSection, Job
from autohet.runtime.job.model import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.step.length_work import length_work, squared_share, with_lengths
from planner.plans.model_spec import LayerSpec, ModelSpec
from tests.runtime.data.test_dataset import write_jsonl
from tests.runtime.models.test_pieces import BEGINS, LLAMA, begins_of


def test_relative_work_is_that_of_the_flops() -> None:
    config = load_config(ModelSection(config=LLAMA))
    work = length_work(config, 20, 130.0)
    products = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 44
    block = LayerSpec(parameters=products, matmul_parameters=products, attention_width=32)

    def flops(lengths: list[int]) -> float:
        return sum(block.forward_flops(length) for length in lengths)

    lengths = [b - a for places in BEGINS for a, b in pairwise([*places, 20])]
    assert squared_share(begins_of()) == pytest.approx(sum(n**2 for n in lengths) / 800)
    average = 2 * (2.0 * products * 20 + 4.0 * 130 * 32)
    assert work.relative(begins_of()) == pytest.approx(flops(lengths) / average)
    one = torch.zeros(1, 20, dtype=torch.bool)
    assert squared_share(one) == 1.0


def test_the_planner_counts_attention_of_documents() -> None:
    layer = LayerSpec(parameters=100, matmul_parameters=100, attention_width=64)
    spec = ModelSpec("m", "llama", 64, 10, 4, 4, 10, False, 4, layer, (layer,) * 2, layer)
    wanted = 2 * (layer.forward_flops(8) + 0)
    found = with_lengths(spec, 16, 2 * 8**2)
    assert found.blocks[0].forward_flops(16) == pytest.approx(wanted)


def test_a_job_s_plan_has_the_lengths_of_its_data(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * 15] * 200)
    data = {"source": str(source), "cache": str(tmp_path / "cache"), "isolate_documents": True}
    document = {
        "model": {"config": LLAMA},
        "training": {"global_batch_sequences": 4, "sequence_length": 255, "device": "cpu"},
        "data": data,
    }
    unknown = planning_inputs(Job.from_document(document)).spec
    dataset = prepare_dataset(DataSection(**data), 255)  # type: ignore[arg-type]
    assert dataset.facts.mean_squared_length == pytest.approx(16 * 16**2, rel=0.01)
    known = planning_inputs(Job.from_document(document)).spec
    assert known.blocks[0].score_share == pytest.approx(1 / 16, rel=0.01)
    assert known.blocks[0].attention_width == unknown.blocks[0].attention_width
    assert known.training_flops(255) < unknown.training_flops(255)
