"""Where a recorded result comes from."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """{"commit", "machine"} of this checkout, now; the machine's load is of the last minute."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    machine = {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    return {"commit": head.stdout.strip(), "machine": machine | {"load": os.getloadavg()[0]}}
