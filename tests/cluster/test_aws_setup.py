"""cluster_configs/aws/setup.sh where nothing is installed yet: what it fetches and installs, by a
curl and a uv that write down how they are called. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "cluster_configs" / "aws" / "setup.sh"
UV = """#!/bin/sh
echo "$@" >> "$HOME/uv.log"
[ "$1" != "$(cat "$HOME/fails" 2> /dev/null)" ] || exit 1
[ "$1" != venv ] || mkdir -p "$5"
"""
CURL = f"""#!/bin/sh
echo "$@" >> "$HOME/curl.log"
cat <<'INSTALLER'
mkdir -p ~/.local/bin
cat > ~/.local/bin/uv <<'END'
{UV}END
chmod +x ~/.local/bin/uv
INSTALLER
"""
NVIDIA_SMI = """#!/bin/sh
[ "$1" = -L ] && echo "GPU 0: NVIDIA A10G" || echo {driver}
"""


class Node:
    """A home, and programs that stand in for those of the image."""

    def __init__(self, home: Path, driver: str = "580.105.08") -> None:
        self.home, self.programs = home, home / "programs"
        self.programs.mkdir()
        self.add("curl", CURL)
        self.add("nvidia-smi", NVIDIA_SMI.format(driver=driver))

    def add(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def set_up(self) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.home), "PATH": f"{self.programs}:{os.defpath}"}
        return subprocess.run(
            [str(SETUP)], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def calls(self, name: str) -> list[str]:
        log = self.home / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []


def test_a_fresh_node_gets_one_python_and_the_pins_and_runs_the_sources_that_are_synced(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    done = node.set_up()
    assert done.returncode == 0, done.stderr
    (fetched,) = node.calls("curl")
    assert re.fullmatch(
        r"--proto =https -LsSf https://astral\.sh/uv/\d+\.\d+\.\d+/install\.sh", fetched
    )
    environment = tmp_path / "autohet-env"
    venv, install = node.calls("uv")
    assert re.fullmatch(rf"venv --clear --python 3\.11\.\d+ {environment}", venv)
    constraints = f"-c {ROOT}/constraints-cuda.txt -c {ROOT}/constraints.txt"
    assert install == f"pip install -q --python {environment}/bin/python {constraints} -e {ROOT}", (
        "not editable: after `git pull` and `ray up`, or from a baked image, old code would run"
    )
    assert (
        (tmp_path / ".bashrc")
        .read_text()
        .startswith('export PATH="$HOME/autohet-env/bin:$PATH" RAY_AUTH_MODE=token\n')
    )


def test_the_same_pins_are_installed_once_and_others_anew(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.set_up()
    assert "nothing to install" in node.set_up().stdout
    assert len(node.calls("uv")) == 2
    (tmp_path / "autohet-env" / ".autohet-pins").write_text("of another checkout\n")
    assert node.set_up().returncode == 0
    assert len(node.calls("uv")) == 4
    assert len(node.calls("curl")) == 1
    assert (tmp_path / ".bashrc").read_text().count("RAY_AUTH_MODE") == 1


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_an_installation_that_fails_is_not_taken_for_done(tmp_path: Path, step: str) -> None:
    node = Node(tmp_path)
    (tmp_path / "fails").write_text(step)
    assert node.set_up().returncode != 0
    (tmp_path / "fails").unlink()
    done = node.set_up()
    assert done.returncode == 0
    assert "nothing to install" not in done.stdout


def test_a_driver_that_is_too_old_is_refused_in_one_sentence(tmp_path: Path) -> None:
    node = Node(tmp_path, driver="570.86.10")
    done = node.set_up()
    assert done.returncode == 1
    assert (
        "the NVIDIA driver here is 570.86.10, but torch's CUDA 13.0 build needs 580.65.06 or newer"
        in done.stderr
    )
    assert not node.calls("uv")
