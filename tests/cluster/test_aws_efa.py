"""scripts/aws/efa against moto, whose instance types are EC2's own answers: the interfaces that it
writes, what it refuses, and what Ray's launcher makes of the file. That `ray up` starts a cluster
from it: tests/cluster/test_aws_launch.py.
"""

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import boto3
import pytest
import yaml

from planner.inputs.cluster import cluster_from_document
from tests.harness.aws_network import make_private_subnet, public_subnet
from tests.harness.aws_scripts import run_script
from tests.harness.s3_server import S3Server, s3_server
from tests.harness.waits import HANG_S

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
FILE = ROOT / "cluster_configs" / "aws-p5-p4d.yaml"
EFAS = {"p5": 32, "p4d": 4, "p4d-floor": 4}
"""EC2 user guide: p5.48xlarge 3,200 Gbit/s by 32 network cards, p4d.24xlarge 400 by four."""


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        urllib.request.urlopen(
            urllib.request.Request(f"{running.endpoint}/moto-api/reset", method="POST"),
            timeout=HANG_S,
        ).close()
        yield running


def ec2_of(server: S3Server) -> Any:
    return boto3.client("ec2", endpoint_url=server.endpoint, region_name="us-east-1")


def write_efas(file: Path, subnet: str) -> CompletedProcess[str]:
    return run_script("efa", str(file), "--subnet", subnet)


def with_efa(server: S3Server) -> dict[str, Any]:
    subnet = make_private_subnet(ec2_of(server))
    done = write_efas(FILE, subnet)
    assert done.returncode == 0, done.stderr
    assert write_efas(FILE, subnet).stdout == done.stdout, "a second time changes nothing"
    return yaml.safe_load(done.stdout)


def test_each_gpu_node_has_an_efa_on_every_card_and_one_address(server: S3Server) -> None:
    document = with_efa(server)
    for name, count in EFAS.items():
        config = document["available_node_types"][name]["node_config"]
        first, *rest = config["NetworkInterfaces"]
        assert (first["InterfaceType"], first["NetworkCardIndex"], first["DeviceIndex"]) == (
            "interface",
            0,
            0,
        )
        assert [
            one["NetworkCardIndex"] for one in rest if one["InterfaceType"] == "efa-only"
        ] == list(range(count))
        assert (
            len(
                {
                    (one["NetworkCardIndex"], one["DeviceIndex"])
                    for one in config["NetworkInterfaces"]
                }
            )
            == count + 1
        )
        assert not any("AssociatePublicIpAddress" in one for one in config["NetworkInterfaces"])
        assert config.get("Placement") == (
            {"GroupName": "autohet"} if name != "p4d-floor" else None
        )
    planned = {
        kind.name: kind.inter_node_bytes_per_s
        for kind in cluster_from_document(document).node_types
    }
    assert planned == {"p5": 3200e9 / 8, "p4d": 400e9 / 8, "p4d-floor": 400e9 / 8}
    starts = [
        command for command in document["worker_start_ray_commands"] if "ray start" in command
    ]
    assert all("RAY_AUTH_MODE=token" in start and "FI_PROVIDER=efa" in start for start in starts)


def test_the_group_allows_all_traffic_from_and_to_itself(server: S3Server) -> None:
    with_efa(server)
    (group,) = ec2_of(server).describe_security_groups(
        Filters=[{"Name": "group-name", "Values": ["autohet-efa"]}]
    )["SecurityGroups"]

    def allows_itself(rules: list[dict[str, Any]]) -> bool:
        return any(
            pair["GroupId"] == group["GroupId"]
            for rule in rules
            if rule["IpProtocol"] == "-1"
            for pair in rule["UserIdGroupPairs"]
        )

    assert allows_itself(group["IpPermissions"])
    assert allows_itself(group["IpPermissionsEgress"]), "a rule for 0.0.0.0/0 is not enough for EFA"
    ssh = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
    assert [one["CidrIp"] for rule in ssh for one in rule["IpRanges"]] == ["172.31.0.0/16"], (
        "ssh from the network alone"
    )


def test_rays_launcher_leaves_the_interfaces_alone(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.util import prepare_config, validate_config

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    document = with_efa(server)
    config = prepare_config(document)
    validate_config(config)
    made = bootstrap_aws(config)["available_node_types"]
    groups = {group for kind in made.values() for group in kind["node_config"]["SecurityGroupIds"]}
    subnets = {subnet for kind in made.values() for subnet in kind["node_config"]["SubnetIds"]}
    assert len(groups) == len(subnets) == 1, "head and workers meet in one group and one subnet"
    for name in EFAS:
        interfaces = made[name]["node_config"]["NetworkInterfaces"]
        assert (
            interfaces == document["available_node_types"][name]["node_config"]["NetworkInterfaces"]
        )


@pytest.mark.parametrize("name", ["aws-mixed-spot", "aws-cheap-spot"])
def test_a_file_with_nodes_that_have_no_efa_is_refused(server: S3Server, name: str) -> None:
    done = write_efas(
        ROOT / "cluster_configs" / f"{name}.yaml", make_private_subnet(ec2_of(server))
    )
    assert done.returncode == 1
    assert "has no EFA, and NCCL joins GPUs over one kind of network only" in done.stderr
    assert done.stdout == ""


def test_a_subnet_that_ec2_or_the_setup_could_not_use_is_refused(server: S3Server) -> None:
    ec2 = ec2_of(server)
    refused = write_efas(FILE, public_subnet(ec2))
    assert refused.returncode == 1
    assert (
        "gives public addresses, which EC2 refuses to instances with several interfaces"
        in refused.stderr
    )
    closed = write_efas(FILE, make_private_subnet(ec2, nat=False))
    assert closed.returncode == 1
    assert "has no route to a NAT gateway" in closed.stderr
