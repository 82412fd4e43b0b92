"""Detection of stopped and ended processes of this node, from /proc, without asking them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

STOPPED = "T"
ENDED = "XZ"


@dataclass(frozen=True)
class ProcessState:
    """State of a process, read once from /proc.

    `state` is /proc's letter: R runs or is runnable, S and D wait, T was stopped by a signal, t by
    a debugger, Z and X have ended. `cpu_ticks` is its processor time since it started at
    `started_ticks`.

    If two reads are equal and `stopped`, the process has not run in between. A process that is
    merely slow shows R; one whose interpreter is blocked shows R or S. Neither is ever `stopped`.
    """

    state: str
    cpu_ticks: int
    started_ticks: int

    @property
    def stopped(self) -> bool:
        return self.state == STOPPED

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def process_states(process_ids: Collection[int]) -> dict[int, ProcessState]:
    """Return the state of each of these processes; {} if the system has no /proc."""
    found: dict[int, ProcessState] = {}
    if not Path("/proc/self/stat").exists():
        return found
    for process_id in process_ids:
        try:
            text = Path(f"/proc/{process_id}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            found[process_id] = ProcessState(ENDED[0], 0, 0)
            continue
        # The second field, the name, may hold anything; behind it comes the third of proc(5).
        _, _, rest = text.rpartition(")")
        fields = rest.split()
        user_ticks = int(fields[11])
        system_ticks = int(fields[12])
        found[process_id] = ProcessState(
            state=fields[0],
            cpu_ticks=user_ticks + system_ticks,
            started_ticks=int(fields[19]),
        )
    return found
