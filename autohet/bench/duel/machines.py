"""Machines of the duel on this one, and how they leave."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from autohet.bench.duel.task import NUM_WORKERS, DuelTask, steps_in

DOCUMENT: Mapping[str, Any] = {
    "cluster_name": "duel",
    "max_workers": NUM_WORKERS,
    "provider": {"type": "fake_multinode"},
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 4, "GPU": 0}, "node_config": {}, "max_workers": 0},
        "node": {
            "resources": {"CPU": 1, "GPU": 1},
            "labels": {
                "autohet.io/gpu-type": "A10G",
                "autohet.io/gpu-memory-gib": "22.5",
                "autohet.io/intra-node-gbps": "256",
                "autohet.io/inter-node-gbps": "10",
                "autohet.io/usd-per-hour": "1.006",
            },
            "node_config": {},
            "min_workers": NUM_WORKERS,
            "max_workers": NUM_WORKERS,
        },
    },
}
"""Emulated Ray cluster: equal machines, which the other trainers need."""
DEADLINE_S = 600.0
POLL_S = 0.05


class LeavingMachines(Protocol):
    """How a trainer's machines are warned, killed and replaced; `index`: the machine's."""

    def notice(self, index: int) -> None: ...

    def kill(self, index: int) -> None: ...

    def replace(self, index: int) -> None: ...


def take_away(
    task: DuelTask, log: Path, machines: LeavingMachines, is_over: Callable[[], bool]
) -> None:
    """Take machines away at the task's steps; return when the last has left, or training is over.

    Call it in the main thread: a node of Ray starts nowhere else.
    """
    for index, step in enumerate(task.leaving):
        wait_for(lambda step=step: is_over() or newest_step(log) >= step, f"step {step}")  # type: ignore[misc]
        if is_over():
            return
        machines.notice(index)
        time.sleep(task.notice_s)
        machines.kill(index)
        machines.replace(index)


def newest_step(log: Path) -> int:
    """Return the newest recorded step; -1 if there is none."""
    return max((each["step"] for each in steps_in(log)), default=-1)


def wait_for(is_done: Callable[[], bool], what: str) -> None:
    """Wait until `is_done`.

    Raises:
        RuntimeError: it did not come within ten minutes.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not is_done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the duel waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(POLL_S)
