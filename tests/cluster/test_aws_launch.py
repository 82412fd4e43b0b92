"""`ray up` with the files as they are shipped, on moto's EC2, IAM, SSM, SQS and S3 and instances
that are namespaces with their own sshd.

What that cannot show, and what stands in for it: `tests/harness/aws_machines.py`. The long form is
`slow`; its record is scripts/benchmarks/results/aws_launch.json.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.inputs.catalogue import instance_types

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "cluster_configs"
MIXED = CONFIGS / "aws-mixed-spot.yaml"
ALONE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def missing() -> str | None:
    """What this machine lacks for the test; None where it can run."""
    for program in ("/usr/sbin/sshd", "ssh", "rsync", "ip", "nsenter"):
        if shutil.which(program) is None:
            return (
                f"{program} is missing (Debian: apt-get install openssh-server openssh-client rsync"
                " iproute2)"
            )
    return (
        None
        if subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode == 0
        else "namespaces need root"
    )


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def launch(directory: Path, form: str, timeout_s: float, file: Path = MIXED) -> dict[str, Any]:
    """Run a form of tests/harness/aws_launch.py; what it saw."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "RAY_ADDRESS", "RAY_AUTH_"))
    }
    command = [
        *ALONE,
        sys.executable,
        "-m",
        "tests.harness.aws_launch",
        str(directory),
        str(file),
        form,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    for place in Path("/tmp").glob("ray_ssh_*"):
        shutil.rmtree(place, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((directory / "seen.json").read_text())


def test_ray_up_starts_head_and_floor_and_ray_down_ends_them(tmp_path: Path) -> None:
    seen = launch(tmp_path, "short", 400)
    assert [(i["type"], i["state"]) for i in seen["instances"]] == [
        ("m6i.2xlarge", "terminated"),
        ("g5.2xlarge", "terminated"),
    ]
    assert all(
        i["image"].startswith("resolve:ssm:/aws/service/deeplearning/ami/x86_64/")
        for i in seen["instances"]
    )
    assert "g5-floor" in seen["status"]
    assert "InvalidAuthToken" in seen["token_wanted"], "the cluster answers without the token"
    assert not seen["token_told"], "the token is in an argument or in what a command printed"
    setup = [
        line
        for line in (tmp_path / "commands.log").read_text().splitlines()
        if "baked with the same pins" in line
    ]
    assert setup


NODE_TYPES = {
    "aws-mixed-spot": {
        "p4d": "p4d.24xlarge",
        "g6e": "g6e.12xlarge",
        "g5": "g5.2xlarge",
        "g5-floor": "g5.2xlarge",
    },
    "aws-p5-p4d": {"p5": "p5.48xlarge", "p4d": "p4d.24xlarge", "p4d-floor": "p4d.24xlarge"},
    "aws-cheap-spot": {
        "g5": "g5.xlarge",
        "g6": "g6.xlarge",
        "g4dn": "g4dn.xlarge",
        "g6-floor": "g6.xlarge",
    },
}


def test_every_aws_file_is_launched() -> None:
    assert {path.stem for path in CONFIGS.glob("aws-*.yaml")} == set(NODE_TYPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NODE_TYPES)
def test_each_node_type_is_launched_as_its_labels_say(name: str, tmp_path: Path) -> None:
    seen = launch(tmp_path, "whole", 800, CONFIGS / f"{name}.yaml")
    check_whole(seen, NODE_TYPES[name])
    assert len(seen["public_addresses"]) == len(seen["instances"])


@pytest.mark.slow
def test_the_same_of_the_file_with_efa_interfaces(tmp_path: Path) -> None:
    seen = launch(tmp_path, "efa", 800, CONFIGS / "aws-p5-p4d.yaml")
    check_whole(seen, NODE_TYPES["aws-p5-p4d"])
    assert not seen["public_addresses"]


def check_whole(seen: dict[str, Any], node_types: dict[str, str]) -> None:
    """What the whole form saw, against the node types that the file is known to have."""
    assert seen["ok"]
    assert "8 steps" in seen["job_log"]
    assert "will kill this job 3 s after" not in seen["job_log"], (
        "the head leaves a stopped job time for its checkpoint"
    )
    assert any("step-00000008" in key for key in seen["checkpoints"]), seen["checkpoints"]
    instances = {instance["node_type"]: instance for instance in seen["instances"]}
    assert {name: i["type"] for name, i in instances.items()} == {
        "head": "m6i.2xlarge",
        **node_types,
    }
    assert len(seen["instances"]) == len(instances), "one node of each type was asked for"
    assert {i["state"] for i in seen["instances"]} == {"terminated"}
    assert {name for name, i in instances.items() if i["market"] != "spot"} == {
        "head",
        seen["floor"],
    }
    nodes = {node["ip"]: node for node in seen["nodes"]}
    for instance in instances.values():
        check_node(nodes[instance["ip"]], instance)


def check_node(node: dict[str, Any], instance: dict[str, Any]) -> None:
    """The file's labels and resources, as the node in the cluster has them, are true of the
    instance that EC2 launched.
    """
    labels = node["labels"]
    known = instance_types().get(instance["type"])
    assert labels["ray.io/node-group"] == instance["node_type"]
    assert labels["ray.io/market-type"] == instance["market"]
    if known is not None:
        assert known.gpu_type.startswith(labels["ray.io/accelerator-type"])
        assert node["gpus"] == known.num_gpus
    else:
        assert node["gpus"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_an_interruption_a_termination_and_their_replacements(tmp_path: Path) -> None:
    seen = launch(tmp_path, "long", 1100)
    assert seen["ok"]
    changes = [change["cause"] for change in seen["summary"]["reconfigurations"]]
    assert changes.count("notice") == 1, changes
    assert changes.count("death") == 1, changes
    assert changes.count("arrival") >= 2, changes
    assert seen["summary"]["steps_lost"] == 0
    assert {i["state"] for i in seen["instances"]} == {"terminated"}
