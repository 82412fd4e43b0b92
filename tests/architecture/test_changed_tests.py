"""`scripts/changed_tests.py` names every test that a change can break."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from changed_tests import affected_files  # noqa: E402


def test_a_module_names_tests_that_import_it_through_others() -> None:
    found = affected_files([Path("recovery/state/layout.py")])
    assert "tests/recovery/test_restore.py" in found  # by recovery.transfer
    assert "tests/planner/test_cost.py" not in found


def test_a_conftest_names_the_tests_of_its_directory() -> None:
    """Wrong: a fixture that every test gets is changed, and nothing runs."""
    found = affected_files([Path("tests/recovery/conftest.py")])
    assert "tests/recovery/test_restore.py" in found
    assert not [path for path in found if not path.startswith("tests/recovery/")]


def test_the_nearest_tests_are_first() -> None:
    """`scripts/test quick` runs the first of them: wrong if its own test is not among these."""
    found = affected_files([Path("planner/plans/plan.py")])
    assert found[0].startswith("tests/planner/")
    assert "tests/planner/test_plan.py" in found[:60]
    assert found.index("tests/planner/test_plan.py") < found.index("tests/cli/test_bench.py")
    assert len(found) > 200


def test_the_script_runs_as_a_contributor_runs_it() -> None:
    """Wrong: it finds `tests` only where PYTHONPATH names the root."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "scripts/changed_tests.py", "--most", "1", "HEAD"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import changed_tests as c; c.import_distances(['planner.plans.plan'])",
        ],
        cwd=ROOT / "scripts",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert loaded.returncode == 0, loaded.stderr


def test_a_document_names_no_test() -> None:
    assert affected_files([Path("README.md")]) == []


@pytest.mark.parametrize("path", ["scripts/demo", "cluster_configs/jobs/gpt2.yaml"])
def test_what_is_no_module_names_all(path: str) -> None:
    """Wrong: a job file that tests read is changed, and nothing runs."""
    assert affected_files([Path(path)]) == ["tests"]
