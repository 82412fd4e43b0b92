"""Identity of a process beyond its id.

Process ids are reused, and other machines and containers have ids of their own.
"""

import os
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Process of the running system that `boot` names.

    `started` tells the process from others of the same id.
    """

    boot: str
    process_id: int
    started: str

    @property
    def is_dead(self) -> bool:
        """True if the process is known to have ended, which only its own system can tell."""
        is_of_this_system = self.boot == boot_id() != ""
        # Another process may have the same id by now: it was started at another time.
        return is_of_this_system and process_start(self.process_id) != self.started


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
