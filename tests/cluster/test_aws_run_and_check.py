"""scripts/aws/run ends the cluster with the job; scripts/aws/check asks before any purchase."""

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import chdir, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from ray.autoscaler._private.aws import config as aws_config

from tests.harness.aws_scripts import run_script
from tests.harness.s3_server import s3_server
from tests.harness.waits import wait_until

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[2]
RAY = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$1 $2" in
    "dashboard "*) exec sleep "${TUNNEL_SECONDS:-60}" ;;
    "job submit")
        case "$*" in *--runtime-env*) cat "$6" > "$CALLS.environment" ;; esac
        [ -z "$JOB_ID" ] || echo "Job '$JOB_ID' submitted successfully"
        [ "${JOB_SECONDS:-0}" = 0 ] || sleep "$JOB_SECONDS"
        exit "${JOB_CODE:-0}" ;;
    "job status") echo "${JOB_STATUS:-Status for job 'x': RUNNING}" ;;
    "up "*) exit "${UP_CODE:-0}" ;;
    "down "*) exit "${DOWN_CODE:-0}" ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A `ray` that writes down what it is asked, a job and a cluster file."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text(RAY)
    (tmp_path / "bin" / "ray").chmod(0o755)
    (tmp_path / "job.yaml").write_text("{}")
    (tmp_path / "cluster.yaml").write_text("cluster_name: c\n")
    return tmp_path


def start(
    place: Path, *arguments: str, directory: str = ".", **environment: str
) -> subprocess.Popen[bytes]:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "CALLS": str(place / "calls"), "POLL_S": "0.05", **environment}
    command = [str(ROOT / "scripts" / "aws" / "run"), "job.yaml", "cluster.yaml", *arguments]
    return subprocess.Popen(command, cwd=place / directory, env={**os.environ, **environment})


def calls(place: Path) -> list[str]:
    file = place / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_the_cluster_ends_with_the_job(place: Path) -> None:
    run = start(place, "--storage", "s3://b/p")
    assert run.wait(60) == 0
    said = calls(place)
    assert said[0] == "up -y cluster.yaml"
    submit = "job submit --working-dir . -- autohet train --job job.yaml --storage s3://b/p"
    assert submit in said
    assert said[-1] == "down -y cluster.yaml"


@pytest.mark.parametrize("environment", [{"JOB_CODE": "3"}, {"UP_CODE": "3"}])
def test_it_ends_where_the_job_or_the_launch_fails(
    place: Path, environment: dict[str, str]
) -> None:
    assert start(place, **environment).wait(60) == 3
    assert calls(place)[-1] == "down -y cluster.yaml"


def test_it_ends_where_somebody_interrupts_and_is_kept_where_asked(place: Path) -> None:
    run = start(place, JOB_SECONDS="2")
    deadline = time.monotonic() + 30
    while not any(call.startswith("job submit") for call in calls(place)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143
    assert calls(place)[-1] == "down -y cluster.yaml"
    (place / "calls").unlink()
    assert start(place, JOB_CODE="1", KEEP="1").wait(60) == 1
    assert not any(call.startswith("down") for call in calls(place))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_stops_the_job_before_the_cluster(place: Path, number: signal.Signals) -> None:
    run = start(place, JOB_SECONDS="30", JOB_ID="raysubmit_1")
    wait_until(lambda: any(call.startswith("job submit") for call in calls(place)), "the job")
    time.sleep(0.2)  # until its id is read
    run.send_signal(number)
    assert run.wait(60) == 128 + number
    assert calls(place)[-2:] == ["job stop raysubmit_1", "down -y cluster.yaml"]


def test_a_lost_connection_reopens_the_tunnel_and_stops_the_job(place: Path) -> None:
    """`ray job submit` fails as it does when its connection breaks, while the job runs on."""
    run = start(place, JOB_SECONDS="1", JOB_CODE="1", JOB_ID="raysubmit_1", TUNNEL_SECONDS="1.5")
    assert run.wait(60) == 1
    said = calls(place)
    assert said[-2:] == ["job stop raysubmit_1", "down -y cluster.yaml"]


@pytest.mark.parametrize(
    ("status", "code"), [("Job 'raysubmit_1' failed", 7), ("Job 'raysubmit_1' succeeded", 0)]
)
def test_a_job_that_has_ended_is_not_stopped(place: Path, status: str, code: int) -> None:
    run = start(place, JOB_CODE="7", JOB_ID="raysubmit_1", JOB_STATUS=status)
    assert run.wait(60) == code
    assert not any(call.startswith("job stop") for call in calls(place))


def test_a_cluster_that_does_not_end_is_an_error(place: Path) -> None:
    assert start(place, DOWN_CODE="5").wait(60) == 1


def test_a_port_that_another_ray_has_is_never_asked(place: Path) -> None:
    """Whoever answers at 8265 would train the job, beside the cluster that is paid for."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert start(place, PORT=port).wait(60) == 2
        assert calls(place) == []
    with suppress(OSError), socket.create_server(("127.0.0.1", 8265)):
        assert start(place).wait(60) == 0
        (tunnel,) = [call for call in calls(place) if call.startswith("dashboard")]
        assert " 8265 " not in tunnel


def test_the_environment_of_a_job_goes_in_a_file_and_not_in_arguments(place: Path) -> None:
    run = start(place, HF_TOKEN="hf_secret", PASS_ENV="MORE", MORE="1")
    assert run.wait(60) == 0
    assert "hf_secret" not in "".join(calls(place))
    passed = json.loads((place / "calls.environment").read_text())
    assert passed == {"env_vars": {"HF_TOKEN": "hf_secret", "MORE": "1"}}


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("/etc/hostname", "by a path relative to it"),
        ("../job.yaml", "by a path relative to it"),
        ("runs/job.yaml", "left out of what the head gets"),
    ],
)
def test_a_job_that_the_head_will_not_have_is_refused(place: Path, job: str, words: str) -> None:
    (place / "work" / "runs").mkdir(parents=True)
    (place / "job.yaml").rename(place / "work" / "runs" / "job.yaml")
    (place / "job.yaml").touch()
    (place / "work" / ".rayignore").write_text("runs/\n")
    (place / "work" / "cluster.yaml").touch()
    code, stderr = refused(place, job, "cluster.yaml")
    assert code == 2
    assert words in stderr
    assert calls(place) == []


def test_a_directory_above_rays_limit_is_refused_with_what_is_largest(place: Path) -> None:
    work = place / "work"
    work.mkdir()
    (work / "job.yaml").touch()
    (work / "cluster.yaml").write_text("cluster_name: c\n")
    with (work / "weights.bin").open("wb") as file:
        file.truncate(101 << 20)
    code, stderr = refused(place, "job.yaml", "cluster.yaml")
    assert code == 2
    assert "weights.bin (101 MiB)" in stderr
    (work / ".rayignore").write_text("weights.bin\n")
    assert start(place, directory="work").wait(60) == 0


def refused(place: Path, *arguments: str) -> tuple[int, str]:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    with chdir(place / "work"):
        done = run_script("run", *arguments, PATH=path, CALLS=str(place / "calls"))
    return done.returncode, done.stderr


def test_the_head_ends_its_own_cluster_and_no_other() -> None:
    """A cluster that is up is another's to use, too: `run` does not start on it."""
    autostop: Any = SourceFileLoader(
        "autostop", str(ROOT / "scripts" / "aws" / "autostop")
    ).load_module()
    with s3_server() as server:
        ec2 = boto3.client("ec2", endpoint_url=server.endpoint, region_name=REGION)

        def launch(name: str, count: int) -> list[str]:
            tags = [{"Key": "ray-cluster-name", "Value": name}]
            answer = ec2.run_instances(
                ImageId="ami-12c6146b",
                MinCount=count,
                MaxCount=count,
                TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
            )
            return [each["InstanceId"] for each in answer["Instances"]]

        head, *_ = launch("autohet-mine", 3)
        others = launch("autohet-mine-too", 2)
        autostop.end_instances(ec2, head, 0.01)
        running = [{"Name": "instance-state-name", "Values": ["running"]}]
        found = ec2.describe_instances(Filters=running)["Reservations"]
        assert sorted(i["InstanceId"] for r in found for i in r["Instances"]) == sorted(others)


def test_a_cluster_that_is_up_is_refused(place: Path) -> None:
    (place / "work").mkdir()
    (place / "work" / "job.yaml").touch()
    (place / "work" / "cluster.yaml").write_text(CLUSTER.replace("us-west-2", REGION))
    with s3_server() as server:
        ec2 = boto3.client("ec2", endpoint_url=server.endpoint, region_name=REGION)
        tags = [{"Key": "ray-cluster-name", "Value": "c"}]
        made = ec2.run_instances(
            ImageId="ami-12c6146b",
            MinCount=1,
            MaxCount=1,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
        )
        code, stderr = refused(place, "job.yaml", "cluster.yaml")
        assert (code, calls(place)) == (2, [])
        assert "is up already" in stderr
        ec2.terminate_instances(InstanceIds=[made["Instances"][0]["InstanceId"]])
        assert start(place, "--idle-minutes", "45", directory="work").wait(60) == 0
        (timer,) = [call for call in calls(place) if call.startswith("exec cluster.yaml")]
        assert "autostop --idle-minutes 45 " in timer
        assert calls(place)[-1] == "down -y cluster.yaml"
        assert "45" not in next(call for call in calls(place) if call.startswith("job submit"))


def test_a_file_that_is_not_there_starts_nothing(place: Path) -> None:
    (place / "job.yaml").unlink()
    assert start(place).wait(60) == 2
    assert calls(place) == []


@pytest.mark.parametrize(
    ("text", "port", "words"),
    [
        ("cluster_name: c\n", "8265 NAME", "PASS_ENV names NAME, which nobody has set"),
        ("a: [\n", "", "cluster.yaml: the file is no YAML"),
        ("- a\n", "", "is no file for `ray up`"),
        ("apiVersion: ray.io/v1\nkind: RayCluster\n", "", "is no file for `ray up`"),
        ("cluster_name: c\nprovider: {type: aws}\n", "", "You must specify a region"),
        ("cluster_name: c\n", "70000", "PORT is '70000'"),
    ],
)
def test_what_ray_up_would_not_take_is_refused_in_one_sentence(
    text: str, port: str, words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: a traceback, or `ray up` and `ray down` that fail, and "look for instances"."""
    (place / "work").mkdir()
    (place / "work" / "job.yaml").touch()
    (place / "work" / "cluster.yaml").write_text(text)
    port, _, name = port.partition(" ")
    monkeypatch.setenv("PORT", port)
    monkeypatch.setenv("PASS_ENV", name)
    for key in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(key, raising=False)
    code, stderr = refused(place, "job.yaml", "cluster.yaml")
    assert (code, calls(place)) == (2, [])
    assert words in stderr
    assert len(stderr.splitlines()) == 1


REGION = "eu-west-1"
"""Region of the tests that launch instances; moto keeps them for the others."""
CLUSTER = """
cluster_name: c
max_workers: 4
provider: {type: aws, region: us-west-2}
head_node_type: head
available_node_types:
  head: {node_config: {InstanceType: m5.large, ImageId: ami-12c6146b}}
  gpu:
    max_workers: 3
    node_config:
      InstanceType: g5.xlarge
      ImageId: ami-12c6146b
      InstanceMarketOptions: {MarketType: spot}
"""


def check_script() -> Any:
    return SourceFileLoader("check_script", str(ROOT / "scripts" / "aws" / "check")).load_module()


@pytest.mark.parametrize(
    ("instance", "spot", "code"),
    [
        ("p5.48xlarge", True, "L-C4BD4855"),
        ("p5en.48xlarge", True, "L-C4BD4855"),
        ("p5.48xlarge", False, "L-417A185B"),
        ("p4d.24xlarge", True, "L-7212CCBC"),
        ("p6-b200.48xlarge", True, None),
        ("g6e.12xlarge", True, "L-3819A6DF"),
        ("gr6.4xlarge", False, "L-DB2E81BA"),
        ("trn1.32xlarge", True, "L-6B0D517C"),
        ("m6i.2xlarge", False, "L-1216C47A"),
        ("inf2.xlarge", False, "L-1945791B"),
        ("im4gn.large", True, "L-34B43A08"),
        ("u-6tb1.metal", False, None),
    ],
)
def test_each_family_has_the_quota_that_aws_counts_it_under(
    instance: str, spot: bool, code: str | None
) -> None:
    assert check_script().quota_code(instance, spot) == code


class DryRuns:
    """EC2's dry run, which refuses one subnet."""

    meta = SimpleNamespace(region_name="us-east-1")

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def run_instances(self, **asked: Any) -> None:
        self.asked.append(asked)
        code = "InvalidSubnetID.NotFound" if asked.get("SubnetId") == "b" else "DryRunOperation"
        raise ClientError({"Error": {"Code": code, "Message": "m"}}, "RunInstances")


def test_each_subnet_and_the_rest_of_a_node_config_are_in_the_dry_run() -> None:
    check, ec2 = check_script(), DryRuns()
    reserved = {"CapacityReservationTarget": {"CapacityReservationId": "cr-1"}}
    config = {
        "InstanceType": "g5.xlarge",
        "SubnetIds": ["a", "b"],
        "SecurityGroupIds": ["sg-1"],
        "CapacityReservationSpecification": reserved,
        "KeyName": "ray's",
    }
    assert check.launch_answer(ec2, config).startswith("InvalidSubnetID.NotFound")
    assert [asked["SubnetId"] for asked in ec2.asked] == ["a", "b"]
    assert ec2.asked[0]["SecurityGroupIds"] == ["sg-1"]
    assert ec2.asked[0]["CapacityReservationSpecification"] == reserved
    assert "KeyName" not in ec2.asked[0]
    assert check.launch_answer(ec2, config | {"SubnetIds": ["a"]}) == "ok"


def test_the_image_of_a_dry_run_is_the_one_that_ray_would_take() -> None:
    """Wrong: a made-up image, which EC2 refuses whatever the file says."""
    check, ec2 = check_script(), DryRuns()
    default = aws_config.DEFAULT_AMI["us-east-1"]
    for config in ({}, {"ImageId": "latest_dlami"}, {"ImageId": "ami-1"}, {"LaunchTemplate": {}}):
        assert check.launch_answer(ec2, config) == "ok"
    assert [asked.get("ImageId") for asked in ec2.asked] == [default, default, "ami-1", None]
    ec2.meta = SimpleNamespace(region_name="mars-1")
    assert "Ray has none for mars-1" in check.launch_answer(ec2, {})


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({"State": "expired"}, ["it is expired"]),
        ({"InstanceType": "p4d.24xlarge"}, ["it is of p4d.24xlarge"]),
        ({"TotalInstanceCount": 1}, ["it has 1 instances, the file up to 2"]),
    ],
)
def test_a_capacity_block_must_be_there_for_the_files_nodes(
    changed: dict[str, Any], wrong: list[str]
) -> None:
    block = {"State": "scheduled", "InstanceType": "p5.48xlarge", "TotalInstanceCount": 2}

    class Reservations:
        def describe_capacity_reservations(self, CapacityReservationIds: list[str]) -> Any:
            assert CapacityReservationIds == ["cr-1"]
            return {"CapacityReservations": [block | changed]}

    target = {"CapacityReservationTarget": {"CapacityReservationId": "cr-1"}}
    config = {"InstanceType": "p5.48xlarge", "CapacityReservationSpecification": target}
    check = check_script()
    assert check.reservation_of(Reservations(), config, 2)["wrong"] == wrong
    assert check.reservation_of(Reservations(), {"InstanceType": "p5.48xlarge"}, 2) is None


def test_check_says_what_stands_in_the_way_and_launches_nothing(tmp_path: Path) -> None:
    """moto knows no quotas and no placement scores: what is not answered is said to be so."""
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    with s3_server() as server:
        s3 = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
        s3.create_bucket(Bucket="elsewhere")
        arguments = (str(file), "--json", "--bucket", "elsewhere")
        done = run_script("check", *arguments, **server.environment)
        ec2 = boto3.client("ec2", endpoint_url=server.endpoint, region_name="us-west-2")
        assert not ec2.describe_instances()["Reservations"]
    assert done.returncode == 1, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["identity"].startswith("arn:aws:")
    assert any("bucket elsewhere is in us-east-1" in each for each in found["fails"])
    assert len(found["default_vpc"]) == 1
    assert (found["types"]["gpu"]["nodes"], found["types"]["head"]["nodes"]) == (3, 1)
    assert found["types"]["gpu"]["vcpus"] == 12
    assert found["types"]["gpu"]["launch"] == "ok"
    assert found["types"]["gpu"]["spot_usd_per_hour"]
