"""The wheel holds everything that the commands need, outside the source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.wheel import install_wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def run_installed(packages: Path, arguments: list[str], directory: Path) -> str:
    """Run `autohet` from the wheel's packages in an empty directory and return what it prints."""
    program = "import autohet, sys; from autohet.cli.main import main; "
    program += "print(autohet.__file__, file=sys.stderr); sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(packages) in done.stderr, "the source tree ran instead of the wheel"
    return done.stdout


def test_the_wheel_declares_types_and_carries_no_tests(packages: Path) -> None:
    for package in ("autohet", "planner", "recovery"):
        assert (packages / package / "py.typed").exists()
    assert not (packages / "tests").exists()
    (metadata,) = packages.glob("autohet-*.dist-info/entry_points.txt")
    assert "autohet = autohet.cli.main:main" in metadata.read_text()


def test_help_and_plan_run_from_the_wheel(packages: Path, tmp_path: Path) -> None:
    assert "train a job on a Ray cluster" in run_installed(packages, ["--help"], tmp_path)
    job = ROOT / "cluster_configs/jobs/gpt2.yaml"
    cluster = ROOT / "cluster_configs/aws-cheap-spot.yaml"
    options = ["--job", str(job), "--cluster", str(cluster), "--strategy", "megatron"]
    planned = json.loads(run_installed(packages, ["plan", *options, "--json"], tmp_path))
    assert planned
