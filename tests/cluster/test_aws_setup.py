"""cluster_configs/aws/setup.sh where nothing is installed yet: what it fetches and installs, by a
curl and a uv that write down how they are called. Nothing is downloaded.
"""

import os
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.harness.waits import HANG_S

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "cluster_configs" / "aws" / "setup.sh"
UV = """#!/bin/sh
echo "$@" >> "$HOME/uv.log"
[ "$1" != "$(cat "$HOME/fails" 2> /dev/null)" ] || exit 1
[ "$1" != venv ] || mkdir -p "$5"
"""
CURL = """#!/bin/sh
echo "$@" >> "$HOME/curl.log"
cp "$HOME/served.whl" "$5"
"""
CHECK = """#!/bin/sh
[ "$1" = --check ] || exec /usr/bin/sha256sum "$@"
cat >> "$HOME/checked.log"
[ ! -e "$HOME/forged" ]
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
        self.add("sha256sum", CHECK)
        with zipfile.ZipFile(home / "served.whl", "w") as wheel:
            wheel.writestr("uv-0.0.data/scripts/uv", UV)
        self.add("nvidia-smi", NVIDIA_SMI.format(driver=driver))

    def add(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def set_up(self) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.home), "PATH": f"{self.programs}:{os.defpath}"}
        return subprocess.run(
            [str(SETUP)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def calls(self, name: str) -> list[str]:
        log = self.home / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []


def test_a_fresh_node_gets_one_python_pins_and_synced_sources(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    done = node.set_up()
    assert done.returncode == 0, done.stderr
    (fetched,) = node.calls("curl")
    wheel = r"--proto =https -fsSL -o \S+/uv\.whl https://files\.pythonhosted\.org/\S+\.whl"
    assert re.fullmatch(wheel, fetched)
    assert re.fullmatch(r"[0-9a-f]{64}  \S+/uv\.whl", node.calls("checked")[0])
    environment = tmp_path / "autohet-env"
    venv, install, editable = node.calls("uv")
    assert re.fullmatch(rf"venv --clear --python 3\.11\.\d+ {environment}", venv)
    into = f"pip install -q --python {environment}/bin/python"
    assert install == f"{into} --require-hashes -r {ROOT}/cluster_configs/requirements.lock"
    assert editable == f"{into} --no-deps --no-build-isolation -e {ROOT}", (
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
    assert len(node.calls("uv")) == 3
    (tmp_path / "autohet-env" / ".autohet-pins").write_text("of another checkout\n")
    assert node.set_up().returncode == 0
    assert len(node.calls("uv")) == 6
    assert len(node.calls("curl")) == 1
    assert (tmp_path / ".bashrc").read_text().count("RAY_AUTH_MODE") == 1


def test_a_forged_installer_is_not_run(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "forged").touch()
    assert node.set_up().returncode != 0
    assert not node.calls("uv")
    assert not (tmp_path / ".local" / "bin" / "uv").exists()


def test_no_script_pipes_a_download_into_a_shell() -> None:
    files = [*ROOT.glob("scripts/**/*"), *ROOT.glob("cluster_configs/**/*"), ROOT / "README.md"]
    for path in files:
        if path.is_file() and path.suffix not in (".json", ".parquet", ".lock", ".pyc"):
            for line in path.read_text(errors="replace").splitlines():
                assert not re.search(r"(curl|wget)\b.*\|\s*(sudo )?(ba)?sh\b", line), path


def test_the_lock_agrees_with_the_pins_and_has_hashes() -> None:
    """scripts/lock writes it; a dependency that is new or has another pin wants it anew."""
    text = (ROOT / "cluster_configs" / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))
    assert len(locked) == len(re.findall(r"^\S+==\S+ \\\n    --hash=sha256:", text, re.MULTILINE))
    pins: dict[str, str] = {}
    for name in ("constraints.txt", "constraints-cuda.txt"):
        found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE)
        pins |= dict(found)
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    assert {name: pins[name] for name in locked if name in pins} == {
        name: version for name, version in locked.items() if name in pins
    }
    product = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {re.match(r"[A-Za-z0-9._-]+", line).group().lower() for line in product}
    assert wanted <= locked.keys()


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
