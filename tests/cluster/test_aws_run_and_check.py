"""scripts/aws/run ends the cluster with the job; scripts/aws/check asks before any purchase."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest

from tests.harness.s3_server import s3_server
from tests.harness.waits import HANG_S

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[2]
RAY = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$1 $2" in
    "dashboard "*) exec sleep 60 ;;
    "job submit") [ "${JOB_SECONDS:-0}" = 0 ] || sleep "$JOB_SECONDS"; exit "${JOB_CODE:-0}" ;;
    "up "*) exit "${UP_CODE:-0}" ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A `ray` that writes down what it is asked, a job and a cluster file."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text(RAY)
    (tmp_path / "bin" / "ray").chmod(0o755)
    for name in ("job.yaml", "cluster.yaml"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def start(place: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "CALLS": str(place / "calls"), "POLL_S": "0.05", **environment}
    command = [str(ROOT / "scripts" / "aws" / "run"), "job.yaml", "cluster.yaml", *arguments]
    return subprocess.Popen(command, cwd=place, env={**os.environ, **environment})


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


def test_a_file_that_is_not_there_starts_nothing(place: Path) -> None:
    (place / "job.yaml").unlink()
    assert start(place).wait(60) == 2
    assert calls(place) == []


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


def test_check_says_what_stands_in_the_way_and_launches_nothing(tmp_path: Path) -> None:
    """moto knows no quotas and no placement scores: what is not answered is said to be so."""
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    script = str(ROOT / "scripts" / "aws" / "check")
    with s3_server() as server:
        s3 = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
        s3.create_bucket(Bucket="elsewhere")
        done = subprocess.run(
            [sys.executable, script, str(file), "--json", "--bucket", "elsewhere"],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
            env={**os.environ, **server.environment},
        )
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
