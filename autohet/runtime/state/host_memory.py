"""Check for free host memory before state is moved there.

Linux grants more memory than there is, and kills a process later.
"""

from pathlib import Path

import torch

MACHINE = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
RESERVE_BYTES = 256 << 20
"""Bytes kept free for other allocations of the node's processes meanwhile."""


def require_host_memory(num_bytes: int) -> None:
    """Check that `num_bytes` of host memory are free.

    Raises:
        OutOfMemoryError: they are not. The caller then fails with a reason, before the kernel kills
        an arbitrary process of the node.
    """
    free = free_bytes()
    if free is not None and num_bytes > max(free - RESERVE_BYTES, 0):
        raise torch.OutOfMemoryError(
            f"no room in host memory for {num_bytes:,} bytes of state that has to leave its device:"
            f" {max(free, 0):,} are free, of which {RESERVE_BYTES:,} stay so"
        )


def free_bytes() -> int | None:
    """Return the free bytes of the machine, or of the container if it has less; None if unknown.

    Reclaimable page cache counts as free.
    """
    known = [free for free in (_of_machine(), _of_container()) if free is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        for line in MACHINE.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                kibibytes = int(value.split()[0])
                return kibibytes * 1024
    except (OSError, IndexError, ValueError):
        return None
    return None


def _of_container() -> int | None:
    """Return the free bytes of a control group (version 2); None if it has no limit ("max")."""
    try:
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        statistics = (CONTAINER / "memory.stat").read_text()
        cached = dict(line.split() for line in statistics.splitlines())
        return limit - used + int(cached["inactive_file"])
    except (OSError, KeyError, ValueError):
        return None
