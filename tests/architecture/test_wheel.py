"""The wheel holds everything that the commands need, outside the source tree."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.harness.wheel import install_wheel

ROOT = Path(__file__).parents[2]


PROGRAM = """
import autohet, contextlib, sys
from autohet.cli.main import main
print(autohet.__file__, file=sys.stderr)
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
    main(["--help"])
sys.exit(main())
"""


def test_the_wheel_declares_types_and_help_and_plan_run_from_it(tmp_path: Path) -> None:
    packages = install_wheel(tmp_path)
    for package in ("autohet", "planner", "recovery"):
        assert (packages / package / "py.typed").exists()
    assert not (packages / "tests").exists()
    (metadata,) = packages.glob("autohet-*.dist-info/entry_points.txt")
    assert "autohet = autohet.cli.main:main" in metadata.read_text()

    directory = tmp_path / "elsewhere"
    directory.mkdir()
    job = ROOT / "cluster_configs/jobs/gpt2.yaml"
    cluster = ROOT / "cluster_configs/aws-cheap-spot.yaml"
    options = ["--job", str(job), "--cluster", str(cluster), "--strategy", "megatron", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "plan", *options],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(packages) in done.stderr, "the source tree ran instead of the wheel"
    assert "train a job on a Ray cluster" in done.stderr
    assert json.loads(done.stdout)
