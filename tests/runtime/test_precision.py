"""GPU types compute a job in its precision, or in fp16; types that may do neither are not used."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autohet.cli.main import main
from autohet.cli.profile import measured_format
from autohet.control.planning.proposals import PlanProposal
from autohet.driver.loop.planning import make_planning
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import AdapterSection, Job
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.parallel.borders import border_dtype
from autohet.runtime.step.precision import (
    check_computes,
    computes,
    format_of,
    other_formats,
    without_incapable_nodes,
)
from planner.cost.stage_formats import StageFormats
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_yaml
from planner.inputs.fleet import Fleet, Node
from planner.inputs.profile import ProfileKey

CONFIGS = Path(__file__).parents[2] / "cluster_configs"
WITHOUT_BF16 = ["P40", "P100", "V100", "T4", "RTX-2080", "TITAN-RTX"]
"""Pascal, Volta and Turing; units for bf16 came with Ampere (NVIDIA's CUDA programming guide,
compute capability 8.0).
"""


AUTO = {"compute_formats": "auto"}
OFF = {"compute_formats": "off"}


def job_of(precision: str = "bf16", **sections: Any) -> Job:
    training = {
        "global_batch_sequences": 8,
        "sequence_length": 128,
        "steps": 100,
        "precision": precision,
    }
    return Job.from_document(
        {"model": {"config": {"model_type": "gpt2"}}, "training": training, **sections}
    )


def cheap() -> Cluster:
    return cluster_from_yaml(CONFIGS / "aws-cheap-spot.yaml")


@pytest.mark.parametrize(
    "gpu_type", [*WITHOUT_BF16, "A10G", "L4", "A100", "H100", "CPU", "something-new"]
)
def test_bf16_is_known_of_every_type(gpu_type: str) -> None:
    off = job_of(parallelism=OFF)
    assert computes(off, gpu_type) is (gpu_type not in WITHOUT_BF16)
    assert computes(job_of(), gpu_type)
    assert computes(job_of("fp32"), gpu_type)
    assert computes(job_of("fp16"), gpu_type)


def test_types_without_the_precision_are_left_out_in_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "autohet"):
        left = without_incapable_nodes(cheap(), job_of(parallelism=OFF))
    assert {kind.gpu_type for kind in left.node_types} == {"A10G", "L4"}
    (told,) = caplog.messages
    assert "training.precision is bf16, which g4dn (T4) cannot compute" in told
    assert without_incapable_nodes(cheap(), job_of("fp32")) == cheap()


def test_where_no_type_is_left_or_one_is_asked_for_the_job_is_refused() -> None:
    cluster = cheap()
    only = Cluster("old", tuple(kind for kind in cluster.node_types if kind.gpu_type == "T4"))
    with pytest.raises(
        ConfigError,
        match=r"is bf16, which g4dn.* \(T4\) cannot compute; set training\.precision to fp32, or"
        r" parallelism\.compute_formats to auto",
    ):
        without_incapable_nodes(only, job_of(parallelism=OFF))
    with pytest.raises(ConfigError, match="cannot compute"):
        without_incapable_nodes(
            cluster, job_of(parallelism=OFF, elastic={"request_nodes": {"g4dn": 2}})
        )


def test_emulated_gpus_and_cpus_compute_everything() -> None:
    assert computes(job_of(emulation={"relative_speed_by_gpu_type": {"T4": 1.0}}), "T4")
    training = {"global_batch_sequences": 8, "sequence_length": 128, "steps": 100, "device": "cpu"}
    assert computes(
        Job.from_document({"model": {"config": {"model_type": "gpt2"}}, "training": training}), "T4"
    )


def test_autohet_plan_leaves_them_out_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = tmp_path / "job.yaml"
    model = (
        "{config: {model_type: gpt2, n_layer: 4, n_embd: 64, n_head: 4, vocab_size: 128,"
        " n_positions: 32}}"
    )
    job.write_text(
        f"model: {model}\ntraining: {{global_batch_sequences: 8, sequence_length: 32}}\n"
        "parallelism: {compute_formats: off}\n"
    )
    assert (
        main(
            ["plan", "--job", str(job), "--cluster", str(CONFIGS / "aws-cheap-spot.yaml"), "--json"]
        )
        == 0
    )
    assert "g4dn (T4) cannot compute" in caplog.text
    assert "g4dn" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("formats", "sections", "refusal"),
    [
        ("on", {}, "parallelism.compute_formats"),
        ({"T4": "int8"}, {}, "parallelism.compute_formats"),
        ({"T4": "fp8"}, {}, "compute_formats.T4 is fp8, for which .* use fp32 or fp16, or leave"),
        ({"T4": "fp16"}, {"precision": "fp32"}, "training.precision is fp32.*leave.*set training"),
        ({"T4": "fp16"}, {"precision": "fp16"}, "training.precision is fp16"),
        ({"H100": "fp8"}, {"device": "cpu"}, "H100 is fp8, for which the CPU that emulates it"),
        ({"T4": "fp16"}, {"spmd": True}, "parallelism.spmd is true, .*one format"),
    ],
)
def test_formats_that_a_job_may_not_name_are_refused(
    formats: Any, sections: dict[str, Any], refusal: str
) -> None:
    parallelism = {"compute_formats": formats}
    if "spmd" in sections:
        parallelism["spmd"] = sections.pop("spmd")
    training = {"global_batch_sequences": 8, "sequence_length": 128, "steps": 9, **sections}
    document = {"model": {"config": {"model_type": "gpt2"}}, "training": training}
    with pytest.raises(ConfigError, match=refusal):
        Job.from_document({**document, "parallelism": parallelism})


def test_off_is_a_word_in_yaml_too(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {config: {model_type: gpt2}}\n"
        "training: {global_batch_sequences: 8, sequence_length: 8, offload: off}\n"
        "parallelism: {compute_formats: off}\n"
    )
    job = Job.from_yaml(path)
    assert (job.training.offload, job.parallelism.compute_formats) == ("off", "off")
    path.write_text(path.read_text().replace("compute_formats: off", "spmd: off"))
    assert Job.from_yaml(path).parallelism.spmd is False


@pytest.mark.parametrize("gpu_type", WITHOUT_BF16)
def test_under_auto_types_without_bf16_compute_in_fp16(gpu_type: str) -> None:
    assert format_of(job_of(parallelism=AUTO), gpu_type) == "fp16"
    assert job_of() == job_of(parallelism=AUTO), "auto is not the default"
    assert format_of(job_of(parallelism=OFF), gpu_type) is None
    assert format_of(job_of("fp32", parallelism=AUTO), gpu_type) == "fp32"
    assert format_of(job_of(parallelism={**AUTO, "spmd": True}), gpu_type) is None


def test_a_mapping_names_some_types_and_the_others_are_as_under_auto() -> None:
    job = job_of(parallelism={"compute_formats": {"H100": "fp8", "a10g": "fp16"}})
    types = ["H100-80", "A10G", "T4", "A100-80"]
    assert other_formats(job, types) == {"H100-80": "fp8", "A10G": "fp16", "T4": "fp16"}
    assert format_of(job, "A100-80") == "bf16"
    assert other_formats(job_of("fp32", parallelism=AUTO), types) == {}


def test_fp8_is_chosen_by_name_alone() -> None:
    for gpu_type in ("H100-80", "H200", "L40S", "B200"):
        assert format_of(job_of(parallelism=AUTO), gpu_type) == "bf16"


def test_emulated_types_compute_what_is_named_and_else_the_jobs_precision() -> None:
    emulation = {"relative_speed_by_gpu_type": {"T4": 1.0, "V100": 2.0, "mine": 1.0}}
    job = job_of(emulation=emulation, parallelism={"compute_formats": {"T4": "fp16"}})
    assert [format_of(job, each) for each in ("T4", "V100", "mine")] == ["fp16", "bf16", "bf16"]
    profile = planning_inputs(job).profile
    assert profile is not None
    fp16, bf16 = (
        profile.layers(ProfileKey("", "T4", dtype, 128, 1))["block"] for dtype in ("fp16", "bf16")
    )
    assert fp16[1].forward_s == bf16[1].forward_s


def test_types_that_compute_in_fp16_stay_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "autohet"):
        assert without_incapable_nodes(cheap(), job_of(parallelism=AUTO)) == cheap()
    assert caplog.messages == ["Computing in fp16 on g4dn (T4)"]
    caplog.clear()
    named = {"compute_formats": {"V100": "fp16"}}
    with caplog.at_level(logging.WARNING, "autohet"):
        without_incapable_nodes(cheap(), job_of(parallelism=named))
    (told,) = caplog.messages
    assert told.startswith(
        "Without effect: parallelism.compute_formats names V100, which is no GPU"
    )
    one = without_incapable_nodes(cheap(), job_of(parallelism=AUTO), one_format=True)
    assert {kind.gpu_type for kind in one.node_types} == {"A10G", "L4"}


def test_a_running_job_plans_its_formats_and_replans_them() -> None:
    """Wrong: a stage that moves to other GPUs after a death keeps the format of the lost ones."""
    config = {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 256,
        "n_head": 4,
        "vocab_size": 512,
        "n_positions": 128,
    }
    parallelism = {**AUTO, "min_pipelines": 2, "microbatch_sequences": 2, "max_tp_degree": 1}
    job = replace(
        job_of(parallelism=parallelism), model=Job.from_document(_model_document(config)).model
    )
    planning = make_planning(job)
    kinds = {kind.gpu_type: kind for kind in cheap().node_types}
    nodes = (Node("old", kinds["T4"]), Node("new-0", kinds["A10G"]), Node("new-1", kinds["A10G"]))
    current: PlanProposal | None = None
    for living in (nodes[:2], nodes[1:], nodes[::2]):
        current = planning.propose(Fleet(0, living), current)
        for stage in (s for p in current.plan.pipelines for s in p.stages):
            is_old = stage.workers[0].startswith("old")
            assert stage.compute == ("fp16" if is_old else None)
        has_old = nodes[0] in living
        assert (" stages in fp16" in current.headline) == has_old


def _model_document(config: dict[str, Any]) -> dict[str, Any]:
    training = {"global_batch_sequences": 8, "sequence_length": 128}
    return {"model": {"config": config}, "training": training}


@pytest.mark.parametrize(
    ("one", "other", "width"),
    [
        ("bf16", "bf16", 2),
        ("fp8", "bf16", 2),
        ("fp8", "fp8", 2),
        ("fp32", "fp32", 4),
        ("fp32", "bf16", 4),
        ("fp16", "fp16", 4),
        ("bf16", "fp16", 4),
    ],
)
def test_planned_borders_are_as_wide_as_the_runtimes(one: str, other: str, width: int) -> None:
    formats = StageFormats(cheap().fleet(), "bf16", {}, 1, scales_gradients=True)
    for ends in ((one, other), (other, one)):
        assert formats.border_bytes(1, *ends) == width
        assert border_dtype(*(COMPUTE_DTYPES[each] for each in ends)).itemsize == width


def test_a_job_with_an_adapter_has_the_formats_of_one_without() -> None:
    """Frozen weights are stored in the job's precision; each stage casts them to its own."""
    model = Job.from_document(_model_document({"model_type": "gpt2"})).model
    adapted = replace(model, adapter=AdapterSection())
    for formats in ("auto", {"H100": "fp8"}):
        job = replace(job_of(parallelism={"compute_formats": formats}), model=adapted)
        assert format_of(job, "T4") == "fp16"
        assert format_of(job, "A100-80") == "bf16"
        assert format_of(job, "H100") == ("bf16" if formats == "auto" else "fp8")
    off = replace(job_of(parallelism=OFF), model=adapted)
    with pytest.raises(ConfigError, match=r"set training\.precision to fp32, or parallelism\.comp"):
        check_computes(off, "T4")


@pytest.mark.parametrize(
    ("gpu_type", "formats", "measured"),
    [
        ("T4", "auto", "fp16"),
        ("A100-80", "auto", "bf16"),
        ("T4", "off", "bf16"),
        ("A100-80", {"A100-80": "fp16"}, "fp16"),
        ("H100-80", {"H100-80": "fp8"}, "bf16"),
    ],
)
def test_a_type_is_measured_in_the_format_in_which_it_computes(
    gpu_type: str, formats: Any, measured: str
) -> None:
    """fp8 is estimated from bf16."""
    assert measured_format(job_of(parallelism={"compute_formats": formats}), gpu_type) == measured
