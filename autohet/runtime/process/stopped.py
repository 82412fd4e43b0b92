"""Whether a process of this node stands still because somebody stopped it: read from /proc, so
without asking the process.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

STOPPED = "T"


@dataclass(frozen=True)
class ProcessState:
    """One look at a process: `state` is /proc's letter (R runs or wants to, S and D wait, T was
    stopped by a signal, t by a debugger), `cpu_ticks` what it has had of the processors since it
    started at `started_ticks`.

    Two equal looks with `stopped` are a process that has not run in between. A process that is
    merely slow shows R, one whose interpreter is held up R or S: neither is ever `stopped`.
    """

    state: str
    cpu_ticks: int
    started_ticks: int

    @property
    def stopped(self) -> bool:
        return self.state == STOPPED


def process_states(process_ids: Collection[int]) -> dict[int, ProcessState]:
    """Of each of these processes; without those that are not there. {} where the system has no
    /proc.
    """
    found = {}
    for process_id in process_ids:
        try:
            text = Path(f"/proc/{process_id}/stat").read_text()
        except OSError:
            continue
        # The second field, the name, may hold anything; behind it comes the third of proc(5).
        fields = text.rpartition(")")[2].split()
        found[process_id] = ProcessState(
            fields[0], int(fields[11]) + int(fields[12]), int(fields[19])
        )
    return found
