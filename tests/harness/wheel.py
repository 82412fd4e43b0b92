"""Builds the product's wheel and unpacks it, as an installation without its dependencies."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.harness.waits import HANG_S

ROOT = Path(__file__).parents[2]
SOURCES = ("autohet", "planner", "recovery", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


def install_wheel(directory: Path) -> Path:
    """Build the wheel from a copy of the sources and return the folder that holds its packages."""
    source = directory / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, source / name, ignore=ignored)
        else:
            shutil.copy(path, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(directory)]
    # torch brings the setuptools that the build asks for. An isolated build fetches another copy
    # from an index: a network, and three times the processor time.
    build.append("--no-build-isolation")
    subprocess.run([*build, str(source)], check=True, timeout=HANG_S)
    (wheel,) = directory.glob("autohet-*.whl")
    packages = directory / "packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return packages
