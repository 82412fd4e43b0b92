"""Node types that cannot compute a job's precision are neither planned on nor bought, instead of
ending the job at its start.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from autohet.cli.main import main
from autohet.runtime.job import Job
from autohet.runtime.precision import able_part, computes
from planner.cluster import Cluster, cluster_from_yaml
from planner.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "cluster_configs"
WITHOUT_BF16 = ["P40", "P100", "V100", "T4", "RTX-2080", "TITAN-RTX"]
"""Pascal, Volta and Turing; units for bf16 came with Ampere (NVIDIA's CUDA programming guide,
compute capability 8.0).
"""


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
    assert computes(job_of(), gpu_type) is (gpu_type not in WITHOUT_BF16)
    assert computes(job_of("fp32"), gpu_type)
    assert computes(job_of("fp16"), gpu_type)


def test_types_without_the_precision_are_left_out_in_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "autohet"):
        left = able_part(cheap(), job_of())
    assert {kind.gpu_type for kind in left.node_types} == {"A10G", "L4"}
    (told,) = caplog.messages
    assert "training.precision is bf16, which g4dn (T4) cannot compute" in told
    assert able_part(cheap(), job_of("fp32")) == cheap()


def test_where_no_type_is_left_or_one_is_asked_for_the_job_is_refused() -> None:
    cluster = cheap()
    only = Cluster("old", tuple(kind for kind in cluster.node_types if kind.gpu_type == "T4"))
    with pytest.raises(
        ConfigError,
        match=r"is bf16, which g4dn.* \(T4\) cannot compute; set training\.precision to fp32",
    ):
        able_part(only, job_of())
    with pytest.raises(ConfigError, match="cannot compute"):
        able_part(cluster, job_of(elastic={"request_nodes": {"g4dn": 2}}))


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
