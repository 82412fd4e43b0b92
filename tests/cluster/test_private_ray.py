"""Two runs on one workstation, each with a Ray of its own: neither joins the other's, nor is hurt
by its end. And two jobs on one cluster: the second waits and names the first.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.test_driver_restart import nodes_without_names
from tests.cluster.test_one_machine import shortest_job
from tests.harness.waits import HANG_S, wait_until

pytestmark = pytest.mark.cluster
AUTOHET = str(Path(sys.executable).parent / "autohet")
PACED = {"relative_speed_by_gpu_type": {"A10G": 1.0}, "block_forward_s": 0.02}
"""The first job leaves the machine to the second, which starts meanwhile."""


@contextmanager
def training(
    directory: Path, steps: int, *more: str, **sections: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run `autohet train` of a job of that many steps, named like its directory."""
    directory.mkdir()
    path = shortest_job(directory)
    document = yaml.safe_load(path.read_text())
    document["name"] = directory.name
    document["training"] |= {"steps": steps, "device": "cpu"}
    document |= sections
    path.write_text(yaml.safe_dump(document))
    hidden = ("RAY_ADDRESS", "RAY_AUTH_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "RAY_raylet_start_wait_time_s": "120"}
    storage = ["--storage", str(directory / "kept")]
    command = [AUTOHET, "train", "--job", str(path), "--json", *storage, *more]
    with (
        (directory / "out").open("w") as out,
        (directory / "err").open("w") as errors,
        subprocess.Popen(
            command, cwd=directory, env=environment, stdout=out, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            process.wait(HANG_S)


def kinds(directory: Path) -> list[str]:
    """Return the kinds of the events of a run so far."""
    found = []
    for path in directory.glob("runs/**/events.jsonl"):
        found += [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    return found


def ended(process: subprocess.Popen[str], directory: Path) -> dict[str, Any]:
    assert process.wait(HANG_S) == 0, (directory / "err").read_text()[-3000:]
    return dict(json.loads((directory / "out").read_text()))


@pytest.mark.slow
def test_two_runs_side_by_side_train_whichever_ends_first(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with training(one, 100_000) as first:
        wait_until(lambda: "step" in kinds(one) or first.poll() is not None)
        with training(two, 80) as second:
            wait_until(lambda: "step" in kinds(two) or second.poll() is not None)
            assert first.poll() is None, "both train at one time"
            first.send_signal(signal.SIGTERM)
            first.wait(HANG_S)
            assert ended(second, two)["steps"] == 80
    for directory in (one, two):
        said = (directory / "err").read_text()
        assert "No Ray cluster runs here, so one is started on this machine" in said
        assert "death" not in kinds(directory)


def test_the_second_of_two_jobs_on_a_cluster_waits_and_names_the_first(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with nodes_without_names(1) as cluster:
        address = ("--address", str(cluster.address))
        with training(one, 10**6, *address, emulation=PACED) as first:
            wait_until(lambda: "step" in kinds(one) or first.poll() is not None)
            assert first.poll() is None, (one / "err").read_text()[-3000:]
            with training(two, 3, *address, emulation=PACED) as second:
                said = two / "err"
                wait_until(lambda: "job 'one' uses the GPUs of" in said.read_text())
                assert first.poll() is None
                first.terminate()
                assert ended(second, two)["steps"] == 3
