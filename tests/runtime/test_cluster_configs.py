"""Every file of cluster_configs/: accepted by Ray's own launcher code, by the planner, and by the
job reader.
"""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from autohet.runtime.job import Job
from autohet.runtime.step.precision import without_incapable_nodes
from planner.inputs.cluster import cluster_from_yaml

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "cluster_configs"
AWS = CONFIGS / "aws-mixed-spot.yaml"
AWS_FILES = sorted(CONFIGS.glob("aws-*.yaml"))
EMULATED = CONFIGS / "local-emulated.yaml"
JOBS = sorted((CONFIGS / "jobs").glob("*.yaml"))


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def prepared(path: Path) -> dict[str, Any]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(copy.deepcopy(load(path)))
    validate_config(config)
    return config


@pytest.mark.parametrize("path", AWS_FILES, ids=lambda path: path.stem)
def test_aws_clusters_pass_rays_validation(path: Path) -> None:
    config = prepared(path)
    kinds = dict(config["available_node_types"])
    assert "InstanceMarketOptions" not in kinds.pop(config["head_node_type"])["node_config"]
    floor = {name for name in kinds if name.endswith("-floor")}
    assert all(
        kinds[name]["min_workers"] == 1
        and "InstanceMarketOptions" not in kinds[name]["node_config"]
        for name in floor
    )
    spot = [kind["node_config"] for name, kind in kinds.items() if name not in floor]
    assert floor
    assert all(config["InstanceMarketOptions"]["MarketType"] == "spot" for config in spot)
    assert all(
        kind["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
        for kind in kinds.values()
    )


# Facts, with their sources: NVIDIA's CUDA 13.0 release notes (driver), AWS's Deep Learning AMI
# notes (driver and instance families of the Ubuntu 24.04 base image, NVIDIA driver 580.105 from
# December 2025 on). EFA: cluster_configs/README.md.
MINIMUM_DRIVER_OF_CUDA_13 = (580, 65, 6)
DRIVER_OF_BASE_IMAGE = (580, 105)
FAMILIES_OF_BASE_IMAGE = {"g4dn", "g5", "g6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"}
WITH_EFA = {"p4d.24xlarge", "p5.48xlarge"}


@pytest.mark.parametrize("path", AWS_FILES, ids=lambda path: path.stem)
def test_aws_files_agree_with_what_is_known_of_images_and_instances(path: Path) -> None:
    document = load(path)
    setup = (CONFIGS / "aws" / "setup.sh").read_text()
    (minimum,) = re.findall(r"^MINIMUM_DRIVER=(\S+)", setup, re.MULTILINE)
    assert tuple(map(int, minimum.split("."))) == MINIMUM_DRIVER_OF_CUDA_13 <= DRIVER_OF_BASE_IMAGE
    assert len(document["provider"]["availability_zone"].split(",")) > 1
    for name, kind in document["available_node_types"].items():
        config = kind["node_config"]
        assert "base-oss-nvidia-driver-gpu-ubuntu-24.04" in config["ImageId"], name
        if name == document["head_node_type"]:
            continue
        assert config["InstanceType"].split(".")[0] in FAMILIES_OF_BASE_IMAGE
        assert not {"ray.io/availability-zone", "autohet.io/zone"} & set(kind["labels"]), (
            "a zone of several is read live"
        )
        if (
            config["InstanceType"] in WITH_EFA
        ):  # launched with one ordinary interface, which carries 100 Gbit/s
            assert kind["labels"]["autohet.io/inter-node-gbps"] == "100"
    assert document["available_node_types"].keys() == {
        kind.name for kind in cluster_from_yaml(path).node_types
    } | {"head"}


@pytest.mark.parametrize("path", AWS_FILES, ids=lambda path: path.stem)
def test_every_floor_takes_part_in_every_job_and_binds_nobody_to_its_zone(path: Path) -> None:
    training = {"global_batch_sequences": 8, "sequence_length": 128}
    document = {"model": {"config": {"model_type": "gpt2"}}, "training": training}
    job = Job.from_document({**document, "parallelism": {"compute_formats": "off"}})
    usable = {
        kind.name for kind in without_incapable_nodes(cluster_from_yaml(path), job).node_types
    }
    kinds = load(path)["available_node_types"]
    floor = {name for name in kinds if name.endswith("-floor")}
    assert floor <= usable, "a job of the default precision cannot use what always stands"
    assert not any("Placement" in kinds[name]["node_config"] for name in floor), (
        "a cluster placement group is of one zone"
    )


@pytest.mark.parametrize("path", AWS_FILES, ids=lambda path: path.stem)
def test_aws_nodes_want_the_token_and_no_file_tells_a_secret(path: Path) -> None:
    config = prepared(path)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert [
            ("RAY_AUTH_MODE=token" in command) for command in commands if "ray start" in command
        ] == [True]
    assert "RAY_AUTH_MODE=token" in (CONFIGS / "aws" / "setup.sh").read_text(), (
        "people's shells on a node want it too"
    )
    assert config["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert not re.search(r"AKIA|aws_secret|auth_token: [0-9a-f]{8}", path.read_text())


def test_both_readmes_have_the_same_lines() -> None:
    """Those of the first are run as they are written (tests/cluster/test_aws_launch.py)."""
    short = commands_of(ROOT / "README.md", "### On a cluster")
    assert len(short) == 7
    assert short == commands_of(CONFIGS / "README.md", "## On AWS")


def commands_of(path: Path, heading: str) -> list[str]:
    """The first block of commands below a heading, without their comments and spaces that only
    align.
    """
    block = re.search(r"(?:^    .*\n)+", path.read_text().split(heading, 1)[1], re.MULTILINE)
    assert block is not None
    lines = block.group().replace("\\\n", " ").splitlines()
    return [re.sub(r" +", " ", re.sub(r" +# .*", "", line)).strip() for line in lines]


def test_cuda_wheels_are_pinned_beside_the_cpu_ones() -> None:
    lines = [
        line
        for line in (ROOT / "constraints-cuda.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pins = dict(line.split("==") for line in lines)
    assert pins["cuda-toolkit"].startswith("13.0."), "torch 2.13's wheel is built for CUDA 13.0"
    assert {"nvidia-nccl-cu13", "nvidia-cudnn-cu13", "triton"} <= set(pins)
    ours = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert not ours & set(pins), "one home for each pin"


def test_rays_validation_can_fail() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import validate_config

    document = load(AWS)
    document["max_worker"] = 3
    with pytest.raises(ValidationError, match="max_worker"):
        validate_config(document)


@pytest.mark.parametrize("path", AWS_FILES, ids=lambda path: path.stem)
def test_aws_heads_detect_deaths_fast_and_leave_a_stopped_job_time_for_its_checkpoint(
    path: Path,
) -> None:
    (start,) = [
        command for command in prepared(path)["head_start_ray_commands"] if "ray start" in command
    ]
    for setting in (
        "RAY_AUTH_MODE=token",
        "RAY_JOB_STOP_WAIT_TIME_S=600",
        "RAY_health_check_period_ms=500",
        "RAY_health_check_failure_threshold=3",
    ):
        assert setting in start
    assert start.index("export") < start.index("ray start")
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start


def test_aws_node_types_offer_what_their_instances_have() -> None:
    """GPUs in `resources` must be those of the catalogue's instance, or Ray would start too many
    workers or too few.
    """
    by_name = {kind.name: kind for kind in cluster_from_yaml(AWS).node_types}
    document = load(AWS)["available_node_types"]
    facts = {
        name: (kind.gpu_type, kind.num_gpus, kind.max_nodes, kind.spot, kind.zone)
        for name, kind in by_name.items()
    }
    assert facts == {
        "p4d": ("A100-40", 8, 2, True, ""),
        "g6e": ("L40S", 4, 4, True, ""),
        "g5": ("A10G", 1, 8, True, ""),
        "g5-floor": ("A10G", 1, 1, False, ""),
    }
    assert {name: document[name]["resources"]["GPU"] for name in by_name} == {
        "p4d": 8,
        "g6e": 4,
        "g5": 1,
        "g5-floor": 1,
    }
    assert by_name["p4d"].inter_node_bytes_per_s == 100e9 / 8
    assert load(AWS)["max_workers"] == sum(kind.max_nodes for kind in by_name.values())


def test_emulated_cluster_passes_rays_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's wheel lacks the defaults of this provider, so the file itself, which is complete,
    stands in for them.
    """
    from ray.autoscaler._private import providers

    defaults = tmp_path / "example.yaml"
    shutil.copy(EMULATED, defaults)
    monkeypatch.setitem(providers._DEFAULT_CONFIGS, "fake_multinode", lambda: str(defaults))
    assert prepared(EMULATED)["available_node_types"]["a10g"]["max_workers"] == 3


def test_emulated_fleet_has_seven_workers_of_three_types() -> None:
    fleet = cluster_from_yaml(EMULATED).fleet()
    types = [fleet.gpu_type(worker) for worker in fleet.workers]
    assert {name: types.count(name) for name in types} == {"A100-40": 2, "L40S": 2, "A10G": 3}
    for name, kind in load(EMULATED)["available_node_types"].items():
        assert kind["resources"]["CPU"] <= 4, name


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_jobs_load(path: Path) -> None:
    job = Job.from_yaml(path)
    assert job.name == {"llama-8b-plan": "llama-8b"}.get(path.stem, path.stem)
    assert Job.from_document(job.to_document()) == job
    if "plan" not in path.stem:
        job.require_training()


@pytest.mark.parametrize(
    "path", [path for path in JOBS if "config" in load(path)["model"]], ids=lambda path: path.stem
)
def test_model_configs_hold_only_keys_that_transformers_knows(path: Path) -> None:
    """transformers keeps unknown keys in silence; a misspelt one here would train another model."""
    from transformers import AutoConfig

    config = dict(load(path)["model"]["config"])
    known = AutoConfig.for_model(config["model_type"])
    assert [key for key in config if not hasattr(known, key)] == []
    built = AutoConfig.for_model(config.pop("model_type"), **config)
    assert built.hidden_size % built.num_attention_heads == 0


AS_THEY_STAND = [path for path in JOBS if "plan" not in path.stem and path.stem != "demo-chat"]


@pytest.mark.parametrize("path", AS_THEY_STAND, ids=lambda path: path.stem)
def test_jobs_train_as_they_stand(path: Path) -> None:
    """Their data is on every machine, and no bucket of somebody else's is named: storage is asked
    for at the start.
    """
    job = Job.from_yaml(path)
    assert job.require_training().sources == ("builtin:python-stdlib",)
    assert job.checkpoint.storage is None


DEMOS = ["demo.yaml", "demo-chat.yaml"]


@pytest.mark.parametrize("name", DEMOS)
def test_demo_speeds_name_the_types_of_its_fleet(name: str) -> None:
    emulation = Job.from_yaml(CONFIGS / "jobs" / name).emulation
    assert emulation is not None
    types = {kind.gpu_type for kind in cluster_from_yaml(EMULATED).node_types}
    assert set(emulation.relative_speed_by_gpu_type) == types


@pytest.mark.parametrize("name", DEMOS)
def test_demo_script_names_node_types_of_its_fleet(name: str) -> None:
    script = Job.from_yaml(CONFIGS / "jobs" / name).elastic.script
    assert [event.event for event in script] == ["notice", "death", "arrival"]
    assert {event.node_type for event in script} <= {
        kind.name for kind in cluster_from_yaml(EMULATED).node_types
    }
