"""A start beside another distribution whose package has the name of one of ours."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOREIGN = {
    "another package": 'from planner.constants import LIMITS\n__version__ = "0.5.1"\n',
    "one that cannot be imported": "import a_module_that_is_not_here\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder as pip makes it of our wheel."""
    for name in ("autohet", "recovery"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "planner", tmp_path / "planner")
    return tmp_path


def start(site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *command], cwd=site, env=environment, capture_output=True, text=True
    )


def install(site: Path, content: str) -> None:
    """Lay a distribution `planner` over the folder, with its record of files."""
    (site / "planner/__init__.py").write_text(content)
    (site / "planner/constants.py").write_text("LIMITS = ()\n")
    facts = site / "planner-0.5.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: planner\nVersion: 0.5.1\n")
    (facts / "top_level.txt").write_text("planner\n")
    (facts / "RECORD").write_text("planner/__init__.py,,\nplanner/constants.py,,\n")


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_package_over_ours_is_named_with_the_remedy(site: Path, content: str) -> None:
    """Wrong: it fails in an import deep inside, or trains with half of two packages."""
    assert start(site, "-m", "autohet.cli.main", "--version").returncode == 0
    install(site, content)
    refused = start(site, "-m", "autohet.cli.main", "plan", "--help")
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert "pip uninstall planner, then pip install --force-reinstall" in line

    library = start(site, "-c", "import autohet; autohet.ElasticTrainer")
    assert library.stderr.splitlines()[-1] == f"ImportError: {line.removeprefix('autohet: ')}"


def test_a_package_that_lost_its_files_with_the_other_is_installed_again(site: Path) -> None:
    (site / "planner/__init__.py").unlink()
    refused = start(site, "-m", "autohet.cli.main", "--version")
    assert refused.returncode == 2
    assert "pip install --force-reinstall --no-deps autohet" in refused.stderr
    assert "uninstall" not in refused.stderr
