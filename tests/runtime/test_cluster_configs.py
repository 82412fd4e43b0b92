"""Every file of cluster_configs/: accepted by Ray's own launcher code, by the planner, and by the job reader."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from autohet.runtime.job import Job
from planner.cluster import cluster_from_yaml

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "cluster_configs"
AWS = CONFIGS / "aws-mixed-spot.yaml"
EMULATED = CONFIGS / "local-emulated.yaml"
JOBS = sorted((CONFIGS / "jobs").glob("*.yaml"))


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def prepared(path: Path) -> dict[str, Any]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(copy.deepcopy(load(path)))
    validate_config(config)
    return config


def test_aws_cluster_passes_rays_validation() -> None:
    config = prepared(AWS)
    workers = {name: kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]}
    assert set(workers) == {"p4d", "g6e", "g5"}
    assert all(kind["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot" for kind in workers.values())
    assert all(kind["node_config"]["MetadataOptions"]["HttpTokens"] == "required" for kind in workers.values())
    assert "InstanceMarketOptions" not in config["available_node_types"]["head"]["node_config"]


def test_rays_validation_can_fail() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import validate_config

    document = load(AWS)
    document["max_worker"] = 3
    with pytest.raises(ValidationError, match="max_worker"):
        validate_config(document)


def test_aws_head_starts_with_fast_death_detection_and_autoscaler_v2() -> None:
    (start,) = [command for command in prepared(AWS)["head_start_ray_commands"] if "ray start" in command]
    for setting in (
        "RAY_enable_autoscaler_v2=1",
        "RAY_health_check_period_ms=500",
        "RAY_health_check_failure_threshold=3",
    ):
        assert setting in start
    assert start.index("export") < start.index("ray start")
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start


def test_aws_node_types_offer_what_their_instances_have() -> None:
    """GPUs in `resources` must be those of the catalogue's instance, or Ray would start too many workers or too few."""
    by_name = {kind.name: kind for kind in cluster_from_yaml(AWS).node_types}
    document = load(AWS)["available_node_types"]
    facts = {
        name: (kind.gpu_type, kind.num_gpus, kind.max_nodes, kind.spot, kind.zone) for name, kind in by_name.items()
    }
    assert facts == {
        "p4d": ("A100-40", 8, 2, True, "us-east-1d"),
        "g6e": ("L40S", 4, 4, True, "us-east-1d"),
        "g5": ("A10G", 1, 8, True, "us-east-1d"),
    }
    assert {name: document[name]["resources"]["GPU"] for name in by_name} == {"p4d": 8, "g6e": 4, "g5": 1}
    assert by_name["p4d"].inter_node_bytes_per_s == 100e9 / 8
    assert load(AWS)["max_workers"] == sum(kind.max_nodes for kind in by_name.values())


def test_emulated_cluster_passes_rays_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's wheel lacks the defaults of this provider, so the file itself, which is complete, stands in for them."""
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


@pytest.mark.parametrize("path", [path for path in JOBS if "config" in load(path)["model"]], ids=lambda path: path.stem)
def test_model_configs_hold_only_keys_that_transformers_knows(path: Path) -> None:
    """transformers keeps unknown keys in silence; a misspelt one here would train another model."""
    from transformers import AutoConfig

    config = dict(load(path)["model"]["config"])
    known = AutoConfig.for_model(config["model_type"])
    assert [key for key in config if not hasattr(known, key)] == []
    built = AutoConfig.for_model(config.pop("model_type"), **config)
    assert built.hidden_size % built.num_attention_heads == 0


def test_demo_speeds_name_the_types_of_its_fleet() -> None:
    emulation = Job.from_yaml(CONFIGS / "jobs" / "demo.yaml").emulation
    assert emulation is not None
    types = {kind.gpu_type for kind in cluster_from_yaml(EMULATED).node_types}
    assert set(emulation.relative_speed_by_gpu_type) == types


def test_demo_script_names_node_types_of_its_fleet() -> None:
    script = Job.from_yaml(CONFIGS / "jobs" / "demo.yaml").elastic.script
    assert [event.event for event in script] == ["notice", "death", "arrival"]
    assert {event.node_type for event in script} <= {kind.name for kind in cluster_from_yaml(EMULATED).node_types}
