"""The shipped IAM policies: a stolen head or spot node changes nothing of others."""

import json
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

ROOT = Path(__file__).parents[2]
AWS = ROOT / "cluster_configs" / "aws"
READ_ONLY = ("ec2:Describe", "ssm:GetParameters")
OWN_TAG = {"StringLike": {"aws:ResourceTag/ray-cluster-name": "autohet-*"}}
REQUESTED_TAG = {"StringLike": {"aws:RequestTag/ray-cluster-name": "autohet-*"}}


@cache
def prepare() -> Any:
    path = str(ROOT / "scripts" / "aws" / "prepare")
    return SourceFileLoader("prepare_script", path).load_module()


def statements(name: str) -> list[dict[str, Any]]:
    """Of the policy as `scripts/aws/prepare` fills it in for an account without projects."""
    values = {"BUCKET": "runs", "REGION": "us-east-1", "ACCOUNT": "123456789012"}
    return list(json.loads(prepare().read_policy(f"{name}-policy.json", values, []))["Statement"])


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


@pytest.mark.parametrize("name", ["worker", "driver", "head"])
def test_what_changes_something_names_its_resources(name: str) -> None:
    for statement in statements(name):
        if "*" in as_list(statement["Resource"]):
            for action in as_list(statement["Action"]):
                assert action.startswith(READ_ONLY), statement["Sid"]


def test_the_head_touches_instances_of_its_own_clusters_alone() -> None:
    """Each statement about existing or new instances has the tag that Ray gives its nodes."""
    for statement in statements("head"):
        actions = as_list(statement["Action"])
        instances = [arn for arn in as_list(statement["Resource"]) if ":instance/" in arn]
        if not instances:
            continue
        condition = statement["Condition"]
        if actions == ["ec2:RunInstances"]:
            assert condition == REQUESTED_TAG
        elif condition == {"StringEquals": {"ec2:CreateAction": "RunInstances"}}:
            assert actions == ["ec2:CreateTags"]
        else:
            assert condition == OWN_TAG
    allowed = {action for s in statements("head") for action in as_list(s["Action"])}
    assert not any("SecurityGroup" in action or "KeyPair" in action for action in allowed)


def test_the_head_may_launch_into_a_reservation_and_from_a_template() -> None:
    """A capacity block is a reservation that instances are launched into."""
    allowed = [
        arn.split(":")[-1]
        for statement in statements("head")
        if as_list(statement["Action"]) == ["ec2:RunInstances"]
        for arn in as_list(statement["Resource"])
    ]
    assert {"capacity-reservation/*", "launch-template/*"} <= set(allowed)


def test_only_the_driver_deletes() -> None:
    deleting = [s for s in statements("worker") if "s3:DeleteObject" in as_list(s["Action"])]
    assert [s["Resource"] for s in deleting] == ["arn:aws:s3:::runs/*/reader-*.lease"]
    every = [a for n in ("worker", "driver", "head") for s in statements(n) for a in s["Action"]]
    assert "s3:DeleteObjectVersion" not in every, "a deleted checkpoint can be brought back"


@pytest.mark.parametrize("path", sorted(AWS.parent.glob("aws-*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_cluster_has_the_name_that_the_heads_conditions_want(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["cluster_name"].startswith("autohet-")


@mock_aws
def test_the_security_group_opens_nodes_to_each_other_and_ssh_to_one_range() -> None:
    ec2 = boto3.client("ec2", region_name="us-east-1")
    (vpc,) = ec2.describe_vpcs()["Vpcs"]
    formation = boto3.client("cloudformation", region_name="us-east-1")
    given = {"VpcId": vpc["VpcId"], "SshFrom": "203.0.113.0/24"}
    parameters = [{"ParameterKey": k, "ParameterValue": v} for k, v in given.items()]
    template = (AWS / "security-group.yaml").read_text()
    formation.create_stack(StackName="s", TemplateBody=template, Parameters=parameters)
    (output,) = formation.describe_stacks(StackName="s")["Stacks"][0]["Outputs"]
    (group,) = ec2.describe_security_groups(GroupIds=[output["OutputValue"]])["SecurityGroups"]
    rules = {
        (
            rule["IpProtocol"],
            rule.get("FromPort") if rule["IpProtocol"] == "tcp" else None,
            *(source["CidrIp"] for source in rule["IpRanges"]),
            *(source["GroupId"] for source in rule["UserIdGroupPairs"]),
        )
        for rule in group["IpPermissions"]
    }
    assert rules == {("tcp", 22, "203.0.113.0/24"), ("-1", None, group["GroupId"])}
