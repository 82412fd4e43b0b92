"""What is free of a machine's memory, before state is moved there:

Linux gives more than there is, and kills somebody later.
"""

from __future__ import annotations

from pathlib import Path

import torch

MACHINE, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
RESERVE_BYTES = 256 << 20
"""Left to whatever else the node's processes take meanwhile."""


def require_host_memory(num_bytes: int) -> None:
    """Raises OutOfMemoryError where so many bytes are not free: who asks fails, with a reason,
    instead of any process of the node.
    """
    free = free_bytes()
    if free is not None and num_bytes > max(free - RESERVE_BYTES, 0):
        raise torch.OutOfMemoryError(
            f"no room in host memory for {num_bytes:,} bytes of state that has to leave its device:"
            f" {max(free, 0):,} are free, of which {RESERVE_BYTES:,} stay so"
        )


def free_bytes() -> int | None:
    """Of the machine, or of the container where that has less; what the page cache would give back
    counts. None: nobody says.
    """
    known = [free for free in (_of_machine(), _of_container()) if free is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in MACHINE.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _of_container() -> int | None:
    """A control group (version 2) that has a limit; "max" is none."""
    try:
        limit, used = (
            int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current")
        )
        cached = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        return limit - used + int(cached["inactive_file"])
    except (OSError, KeyError, ValueError):
        return None
