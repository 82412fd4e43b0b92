"""`ray up` with the files as they are shipped, on moto's EC2, IAM, SSM, SQS and S3 and instances that are namespaces with their own sshd.

What that cannot show, and what stands in for it: `tests/harness/aws_machines.py`. The long form is `slow`; its record is
scripts/benchmarks/results/aws_launch.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MIXED = ROOT / "cluster_configs" / "aws-mixed-spot.yaml"
ALONE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def missing() -> str | None:
    """What this machine lacks for the test; None where it can run."""
    for program in ("/usr/sbin/sshd", "ssh", "rsync", "ip", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is missing (Debian: apt-get install openssh-server openssh-client rsync iproute2)"
    return (
        None
        if subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode == 0
        else "namespaces need root"
    )


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(420),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def launch(directory: Path, form: str, timeout_s: float, file: Path = MIXED) -> dict[str, Any]:
    """Run a form of tests/harness/aws_launch.py; what it saw."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_ADDRESS", "RAY_AUTH_"))
    }
    command = [*ALONE, sys.executable, "-m", "tests.harness.aws_launch", str(directory), str(file), form]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    for place in Path("/tmp").glob("ray_ssh_*"):
        shutil.rmtree(place, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((directory / "seen.json").read_text())


def test_ray_up_as_shipped_starts_head_and_floor_and_ray_down_ends_them(tmp_path: Path) -> None:
    seen = launch(tmp_path, "short", 400)
    assert [(i["type"], i["state"]) for i in seen["instances"]] == [
        ("m6i.2xlarge", "terminated"),
        ("g5.2xlarge", "terminated"),
    ]
    assert all(i["image"].startswith("resolve:ssm:/aws/service/deeplearning/ami/x86_64/") for i in seen["instances"])
    assert "g5-floor" in seen["status"]
    assert "InvalidAuthToken" in seen["token_wanted"], "the cluster answers without the token"
    assert not seen["token_told"], "the token is in an argument or in what a command printed"
    setup = [
        line for line in (tmp_path / "commands.log").read_text().splitlines() if "baked with the same pins" in line
    ]
    assert setup


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
