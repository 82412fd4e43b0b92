"""`autohet sky`: task files and prices without a cloud, and one line for a mistake."""

import json
from pathlib import Path

import pytest
import yaml

from autohet.cli.main import main

LINK = {"between": ["us-east-1", "us-west-2"], "gbps": 5, "latency-ms": 60, "usd-per-gb": 0.02}
JOB = {
    "model": {
        "config": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 256}
    },
    "training": {"global_batch_sequences": 4, "sequence_length": 16, "precision": "fp32"},
    "elastic": {"min_workers": 4},
}
EAST = ("--region", "us-east-1=s3://bucket-east/job")
WEST = ("--region", "us-west-2=s3://bucket-west/job")


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(Path(__file__).parents[2])
    types = {
        "head": {"node_config": {"InstanceType": "m6i.large"}, "max_workers": 0},
        "g6e": {"node_config": {"InstanceType": "g6e.12xlarge"}, "max_workers": 1},
        "g5": {"node_config": {"InstanceType": "g5.2xlarge"}, "max_workers": 3},
    }
    cluster = {
        "cluster_name": "c",
        "provider": {"type": "aws", "region": "us-east-1"},
        "max_workers": 4,
        "head_node_type": "head",
        "available_node_types": types,
        "metadata": {"autohet.io/zone-links": [LINK]},
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


def sky(documents: Path, *options: str) -> int:
    job, cluster = str(documents / "tiny.yaml"), str(documents / "cluster.yaml")
    out = str(documents / "tasks")
    return main(["sky", "--job", job, "--cluster", cluster, "--out", out, *options])


def test_a_dry_run_writes_a_task_for_each_region(
    documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = ("--image", "us-west-2=ami-1")
    assert sky(documents, *EAST, *WEST, *image, "--dry-run", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usd_per_gb"] == [{"regions": ["us-east-1", "us-west-2"], "usd_per_gb": 0.02}]
    assert answer["left_out"] == {"g5": "1 GPUs are fewer than elastic.min_workers, 4"}
    west = yaml.safe_load(Path(answer["tasks"]["us-west-2"]).read_text())
    (machine,) = west["resources"]["any_of"]
    assert (machine["instance_type"], machine["image_id"]) == ("g6e.12xlarge", "ami-1")
    assert "--storage s3://bucket-west/job" in west["run"]
    east = yaml.safe_load(Path(answer["tasks"]["us-east-1"]).read_text())
    assert "image_id" not in east["resources"]["any_of"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*EAST, "--region", "eu-west-1=s3://bucket-eu/job"), "has no link between them"),
        (("--region", "us-east-1=/data/job"), "name an s3:// URI"),
        (("--region", "us-east-1"), "NAME=VALUE"),
        ((*EAST, *EAST), "twice"),
        ((*EAST, "--image", "us-west-2=ami-1"), "which no --region names"),
        ((*EAST, "--nodes", "0"), "at least 1"),
        ((*EAST, "--nodes", "2"), "g6e: its max_workers is 1"),
    ],
)
def test_a_mistake_is_exit_code_2_and_one_line(
    documents: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sky(documents, *options, "--dry-run") == 2
    error = capsys.readouterr().err
    assert error.startswith("autohet sky: ")
    assert message in error


def test_a_machine_without_skypilot_is_told_how_to_get_it(
    documents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(documents))
    assert sky(documents, *EAST) == 2
    assert "pipx install 'skypilot[aws]'" in capsys.readouterr().err


def test_a_folder_that_nodes_cannot_install_is_refused(
    documents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(documents)
    assert sky(documents, *EAST, "--dry-run") == 2
    assert "in a checkout of this project" in capsys.readouterr().err
