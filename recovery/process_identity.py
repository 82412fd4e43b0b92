"""Identity of a process beyond its id.

Process ids are reused, and other machines and containers have ids of their own.
"""

import os
from pathlib import Path


def boot_id() -> str:
    """Name the running system and this process's id namespace; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(process_id: int) -> str:
    """Return the start time of a process of this machine in kernel ticks; "" if there is none."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
