"""`autohet train` on a machine where no Ray cluster runs: it starts one, says so, trains and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(330)]
AUTOHET = Path(sys.executable).parent / "autohet"
README = Path(__file__).parents[2] / "README.md"
# Other people's clusters on this machine are found by their processes; in a process namespace of its own there are none.
ALONE = ["unshare", "--fork", "--pid", "--kill-child", "--mount-proc"]


def alone() -> bool:
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


def shortest_job(directory: Path) -> Path:
    """The README's shortest job, letter for letter but for the number of steps."""
    (block,) = re.findall(r"shortest job that trains:\n\n```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    document = yaml.safe_load(block)
    document["training"]["steps"] = 2
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.skipif(not alone(), reason="a process namespace needs root")
def test_the_readmes_shortest_job_trains_by_one_command(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")}
    command = [*ALONE, str(AUTOHET), "train", "--job", str(shortest_job(tmp_path)), "--json"]
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # Ray's sockets lie there, and their paths have a limit
        environment |= {"RAY_TMPDIR": short, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert (summary["ok"], summary["steps"], summary["steps_lost"]) == (True, 2, 0)
    assert len(summary["losses"]) == 2
    assert summary["losses"][1] < summary["losses"][0] < 12
    assert done.stderr.count("No Ray cluster runs here, so one is started on this machine") == 1
    assert (tmp_path / "runs" / "job" / "checkpoints" / "step-00000002").is_dir()
