"""README.md's lines for a cluster, as they are written there, for a shell in which nothing was
activated.
"""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUCKET = "my-bucket"
"""The README's."""
SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of such a shell."""


def readme_commands() -> list[str]:
    """The commands of "On a cluster", one for each line (a continued one is one)."""
    part = (ROOT / "README.md").read_text().split("### On a cluster", 1)[1]
    block = re.search(r"(?:^    .*\n)+", part, re.MULTILINE)
    assert block is not None
    return textwrap.dedent(block.group()).replace("\\\n", " ").splitlines()


def environment_missing() -> str | None:
    """Why the first line, scripts/setup, would do more here than look: it must find this checkout's
    own .venv, never another's.
    """
    environment = ROOT / ".venv"
    if environment.is_symlink() or not (environment / "bin" / "autohet").exists():
        return "this checkout has no .venv of its own: scripts/setup"
    return None
