"""What runs on real daemons in namespaces of their own: Slurm's with scripts/slurm/autohet.sbatch,
and a Ray head with scripts/aws/autostop.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.harness.slurm_cluster import DAEMONS

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
ROOT = Path(__file__).parents[2]
ALONE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def run_alone(module: str) -> dict[str, Any]:
    """Run a module of the harness; return the JSON document that it prints, and show it."""
    # Paths of sockets have a limit, which those of pytest's directories exceed.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        command = [*ALONE, sys.executable, "-m", f"tests.harness.{module}", directory]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    print(done.stdout)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_heterogeneous_job_grows_is_preempted_requeued_and_cancelled_on_slurm() -> None:
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm's daemons: {', '.join(missing)} (Debian: slurmctld, slurmd)")
    seen = run_alone("slurm_cluster")
    assert seen["nodes"] == ["A100-40-0", "A10G-0"], "each group is a node type"
    assert seen["deaths_by_preemption"] == 0, "a preemption is a notice"
    assert seen["steps_lost_by_the_limit"] == 0
    assert seen["steps_after_the_last_checkpoint"] == 0, "scancel stores a checkpoint"


def test_autostop_takes_a_head_with_a_job_for_used_and_an_idle_one_not() -> None:
    """Wrong: a dashboard that does not answer means that no job runs."""
    assert run_alone("idle_head") == {
        "without Ray": False,
        "idle": False,
        "submitted": True,
        "running": True,
        "running, and no dashboard answers": True,
        "stopped": False,
        "stopped, and no dashboard answers": False,
    }
