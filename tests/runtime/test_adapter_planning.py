"""Plans of adapters: what is frozen takes its stored format, and no gradient of its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autohet.cli.main import main
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from planner.cost.memory.training_bytes import TokensOnRank, memory_terms
from planner.cost.parameters import OURS, framework_parameters
from planner.inputs.catalogue import find_gpu_type
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.plan import Plan

ROOT = Path(__file__).parents[2]
JOB = ROOT / "cluster_configs" / "jobs" / "lora-8b-plan.yaml"


def document(*, adapter: bool) -> dict[str, Any]:
    """The job of the READMEs, or the same with all weights trained."""
    found: dict[str, Any] = yaml.safe_load(JOB.read_text())
    if not adapter:
        del found["model"]["adapter"]
        found["training"]["offload"] = "off"  # in host memory its optimizer state would fit
    return found


def job_of(*, adapter: bool) -> Job:
    return Job.from_document(document(adapter=adapter))


def cluster_of(instance: str) -> dict[str, Any]:
    kind = {"resources": {}, "max_workers": 1, "node_config": {"InstanceType": instance}}
    return {
        "cluster_name": "c",
        "provider": {"type": "aws", "region": "us-east-1"},
        "available_node_types": {"gpu": kind},
    }


def planned(tmp_path: Path, capsys: Any, instance: str, *, adapter: bool) -> Any:
    job, cluster = tmp_path / "job.yaml", tmp_path / "cluster.yaml"
    job.write_text(yaml.safe_dump(document(adapter=adapter)))
    cluster.write_text(yaml.safe_dump(cluster_of(instance)))
    main(["plan", "--job", str(job), "--cluster", str(cluster), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("instance", "what"), [("g6e.4xlarge", "one L40S"), ("g5.12xlarge", "four A10G")]
)
def test_an_adapter_of_8b_fits_where_8b_itself_does_not(
    tmp_path: Path, capsys: Any, instance: str, what: str
) -> None:
    found = planned(tmp_path, capsys, instance, adapter=True)
    assert found["feasible"], (what, found["reason"])
    limits = found["predicted"]["memory_limit_bytes_by_worker"]
    for worker, used in found["predicted"]["memory_bytes_by_worker"].items():
        assert used <= limits[worker]
    assert not planned(tmp_path, capsys, instance, adapter=False)["feasible"]


def in_four_bits() -> dict[str, Any]:
    found = document(adapter=True)
    found["model"]["adapter"]["base"] = "nf4"
    return found


def test_a_base_of_8b_in_four_bits_fits_one_t4(tmp_path: Path, capsys: Any) -> None:
    assert not planned(tmp_path, capsys, "g4dn.xlarge", adapter=True)["feasible"]
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(in_four_bits()))
    main(["plan", "--job", str(job), "--cluster", str(tmp_path / "cluster.yaml"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["feasible"], found["reason"]
    assert found["predicted"]["usd_per_hour"] > 0


def test_weights_in_four_bits_take_their_codes_and_scales_and_time_to_dequantize() -> None:
    """Once in the forward and once in the backward pass, by the bytes moved. Wrong: the backward's
    part is halved with the products that frozen weights do not need.
    """
    every_block = [2 * 4096 * 4096, 2 * 1024 * 4096, 3 * 4096 * 14336]
    weights = sum(every_block)
    fleet = Fleet(0, (Node("here", NodeType("here", "L40S", 1, 44 << 30, 1e11, 1e9)),))
    inputs = [
        planning_inputs(Job.from_document(each))
        for each in (document(adapter=True), in_four_bits())
    ]
    times, state_bytes = [], []
    for each in inputs:
        model = each.cost_model(fleet).layer_times.model_in("bf16")
        times.append(model.times("L40S", 1, 1, "none"))
        parameters = framework_parameters(OURS, each.parameters)
        on_rank = TokensOnRank(2048, 2048, "bf16", 1)
        state_bytes.append(memory_terms(each.spec, on_rank, "none", parameters).state_bytes[1])
    device = find_gpu_type("L40S")
    assert device is not None
    held = 0.5 + 1 / 64 + 4 / (64 * 256)
    assert state_bytes[0] - state_bytes[1] == pytest.approx(weights * (2 - held))
    rate = device.memory_bytes_per_s * inputs[0].parameters.memory_efficiency
    for direction in ("forward_s", "backward_s"):
        plain, quantized = (getattr(each, direction) for each in times)
        assert quantized[1] - plain[1] == pytest.approx(weights * (held + 2) / rate)
        assert quantized[-1] == plain[-1]


def test_a_wrong_target_ends_the_readmes_command_in_one_sentence(
    tmp_path: Path, capsys: Any
) -> None:
    guide = (ROOT / "docs" / "guides" / "adapters.md").read_text()
    assert f"autohet plan --job {JOB.relative_to(ROOT)}" in guide
    wrong = document(adapter=True)
    wrong["model"]["adapter"]["targets"] = ["q_prj"]
    job, cluster = tmp_path / "job.yaml", tmp_path / "cluster.yaml"
    job.write_text(yaml.safe_dump(wrong))
    cluster.write_text(yaml.safe_dump(cluster_of("g6e.4xlarge")))
    assert main(["plan", "--job", str(job), "--cluster", str(cluster)]) == 2
    error = capsys.readouterr().err
    assert "'q_prj' matches no linear map of the blocks; the nearest is q_proj" in error


def test_state_of_an_adapter_is_its_own_and_the_rest_takes_two_bytes() -> None:
    inputs = planning_inputs(job_of(adapter=True))
    full, spec = planning_inputs(job_of(adapter=False)).spec, inputs.spec
    config = load_config(job_of(adapter=True).model)
    layout = layout_of_plan(one_worker(config), config)
    assert spec.parameters * 12 == layout.num_bytes
    assert spec.parameters == 41_943_040  # peft's count for rank 16 of all seven maps
    layers = (spec.embedding, *spec.blocks, spec.head)
    assert sum(layer.frozen_parameters for layer in layers) == full.parameters
    on_rank = TokensOnRank(2048, 2048, "bf16", 1)
    terms = memory_terms(spec, on_rank, "none", framework_parameters(OURS, inputs.parameters))
    assert terms.state_bytes.sum() == 2 * full.parameters + 18 * spec.parameters
    assert terms.optimizer_bytes.sum() == 12 * spec.parameters
    offloaded = terms.offload()
    assert offloaded.state_bytes.sum() == 2 * full.parameters + 6 * spec.parameters
    assert offloaded.host_bytes.sum() == 12 * spec.parameters


def test_a_stage_of_another_format_keeps_a_copy_of_what_is_frozen() -> None:
    """fp8 casts factors of its products from bf16."""
    inputs = planning_inputs(job_of(adapter=True))
    parameters = framework_parameters(OURS, inputs.parameters)
    frozen = sum(layer.frozen_parameters for layer in inputs.spec.layers)
    found = {
        compute: memory_terms(
            inputs.spec, TokensOnRank(2048, 2048, compute, 1), "none", parameters
        ).state_bytes.sum()
        for compute in ("bf16", "fp8", "fp16")
    }
    assert found["fp8"] == found["bf16"]
    assert found["fp16"] == found["bf16"] + 2 * frozen


def test_adapters_of_a_job_in_bf16_are_planned_on_t4s(tmp_path: Path, capsys: Any) -> None:
    found = planned(tmp_path, capsys, "g4dn.metal", adapter=True)
    assert found["feasible"], found["reason"]
    stages = [stage for each in found["plan"]["pipelines"] for stage in each["stages"]]
    assert {stage["compute"] for stage in stages} == {"fp16"}
    limits = found["predicted"]["memory_limit_bytes_by_worker"]
    for worker, used in found["predicted"]["memory_bytes_by_worker"].items():
        assert 2 * 2 * 8e9 / 8 < used <= limits[worker]


def test_a_checkpoint_of_an_adapter_is_under_a_hundredth_of_the_whole_models() -> None:
    sizes = []
    for adapter in (True, False):
        config = load_config(job_of(adapter=adapter).model)
        sizes.append(layout_of_plan(one_worker(config), config).num_bytes)
    assert sizes[0] < 0.01 * sizes[1]


def test_a_backward_pass_of_frozen_blocks_costs_about_a_forward_pass() -> None:
    spec = planning_inputs(job_of(adapter=True)).spec
    full = planning_inputs(job_of(adapter=False)).spec
    for block in spec.blocks:
        assert 1.0 < 2 * block.backward_share < 1.2
    assert spec.training_flops(2048) < 0.75 * full.training_flops(2048)
    assert all(block.backward_share == 1.0 for block in full.blocks)


def one_worker(config: Any) -> Plan:
    stage = {"first_layer": 0, "num_layers": config.num_hidden_layers, "workers": ["w/0"]}
    pipeline = {"num_microbatches": 16, "stages": [stage]}
    return Plan.from_document(
        {
            "version": 1,
            "model": "m",
            "global_batch_sequences": 16,
            "microbatch_sequences": 1,
            "sequence_length": 2048,
            "pipelines": [pipeline],
        }
    )


def test_a_reference_costs_one_forward_pass_more() -> None:
    """Its forward takes as long as the trained one; the backward stays, recomputation too."""
    sections = document(adapter=True)
    length = sections["training"]["sequence_length"]
    plain = planning_inputs(Job.from_document(sections))
    sections["training"]["objective"] = "dpo"
    paired = planning_inputs(Job.from_document(sections))
    for one, other in zip(plain.spec.layers, paired.spec.layers, strict=True):
        more = other.training_flops(length) - one.training_flops(length)
        assert more == pytest.approx(one.forward_flops(length))
    kind = NodeType("here", "H200", 2, 140 << 30, 1e11, 1e9)
    fleet = Fleet(0, (Node("here", kind),))
    for recompute in ("none", "full"):
        for degree in (1, 2):
            times = [
                each.cost_model(fleet)
                .layer_times.model_in("bf16")
                .times("H200", degree, 2, recompute)
                for each in (plain, paired)
            ]
            np.testing.assert_allclose(times[1].forward_s, 2 * times[0].forward_s)
            np.testing.assert_allclose(times[1].backward_s, times[0].backward_s)
