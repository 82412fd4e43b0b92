"""`autohet train` on a machine where no Ray cluster runs: it starts one, says so, trains and leaves
nothing behind.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.harness.waits import HANG_S
from tests.harness.wheel import install_wheel

pytestmark = pytest.mark.cluster
AUTOHET = Path(sys.executable).parent / "autohet"
README = Path(__file__).parents[2] / "README.md"
# Other people's clusters on this machine are found by their processes; in a process namespace of
# its own there are none.
ALONE = ["unshare", "--fork", "--pid", "--kill-child", "--mount-proc"]


def alone() -> bool:
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


def shortest_job(directory: Path) -> Path:
    """The README's shortest job, but two steps of a small model: a GPT-2 takes minutes on a CPU."""
    (block,) = re.findall(
        r"shortest job that trains:\n\n```yaml\n(.*?)```", README.read_text(), re.DOTALL
    )
    document = yaml.safe_load(block)
    document["model"]["config"] |= {"n_layer": 2, "n_head": 4, "n_embd": 64}
    document["training"]["steps"] = 2
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run_alone(
    command: list[str], directory: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RAY_ADDRESS", "RAY_AUTH_MODE", "CUDA_VISIBLE_DEVICES")
    }
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as short:  # Ray's sockets lie there, and their paths have a limit
        environment |= {
            "RAY_TMPDIR": short,
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_raylet_start_wait_time_s": "120",
        } | (variables or {})
        return subprocess.run(
            [*ALONE, *command],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )


@pytest.mark.slow
@pytest.mark.skipif(not alone(), reason="a process namespace needs root")
def test_the_readmes_shortest_job_trains_by_one_command(tmp_path: Path) -> None:
    done = run_alone(
        [str(AUTOHET), "train", "--job", str(shortest_job(tmp_path)), "--json"], tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert (summary["ok"], summary["steps"], summary["steps_lost"]) == (True, 2, 0)
    assert len(summary["losses"]) == 2
    assert summary["losses"][1] < summary["losses"][0] < 12
    assert done.stderr.count("No Ray cluster runs here, so one is started on this machine") == 1
    storage = tmp_path / "runs" / "job" / "checkpoints"
    assert (storage / "step-00000002").is_dir()
    (kept,) = (storage / "runs").iterdir()  # what outlives the machine
    assert '"kind": "finished"' in (kept / "events.jsonl").read_text()
    assert {path.name for path in kept.iterdir()} == {
        "events.jsonl",
        "logs",
        "report.html",
        "timeline.json",
    }
    assert "driver generation 1 INFO autohet: " in (kept / "logs" / "driver.log").read_text()


@pytest.mark.skipif(not alone(), reason="a process namespace needs root")
def test_the_readmes_python_trains_from_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (block,) = re.findall(r"### From Python.*?```python\n(.*?)```", README.read_text(), re.DOTALL)
    short = block.replace('"steps": 20', '"steps": 2').replace(
        "/tmp/autohet-runs", str(tmp_path / "kept")
    )
    assert short.count('"steps": 2,') == 1
    again = (
        "again = autohet.ElasticTrainer(job, run_config=run).fit()\nassert again.checkpoint.path =="
        " result.checkpoint.path\n"
    )
    packages = install_wheel(tmp_path)
    installed = f"assert autohet.__file__.startswith({str(packages)!r})\n"
    command = [sys.executable, "-c", short + again + installed]
    done = run_alone(command, tmp_path / "empty", {"PYTHONPATH": str(packages)})
    assert done.returncode == 0, done.stderr[-3000:]
    loss, checkpoint, losses = re.fullmatch(r"(\S+) (\S+) \[(.*)\]\n", done.stdout).groups()
    assert checkpoint == str(tmp_path / "kept" / "tiny" / "step-00000002")
    first, last = map(float, losses.split(", "))
    assert (
        4.0 < last == float(loss) < first < 6.0
    )  # of this Python's library by bytes: hardly trained
