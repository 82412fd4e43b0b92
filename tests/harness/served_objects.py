"""What the processes of a fleet serve: the product's worker and agent, without Ray around them."""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from autohet.runtime.job import Job
from autohet.runtime.messages import WorkerPlace
from tests.harness.fault_points import FaultPoint, Gate, install
from tests.harness.history import keep_history
from tests.harness.ray_stand_in import stand_in_where_missing

BACK_END = "AUTOHET_TEST_BACK_END"
"""In a worker's environment: "deferred" gives it groups with CUDA's semantics, "one GPU" lets all
workers share this machine's card over NCCL.
"""

STEP_PAUSE_S = "AUTOHET_TEST_STEP_PAUSE_S"
"""In a worker's environment: seconds that it waits in each step, so that a run lasts for a while
on a fast machine, too.
"""


def pause_in_steps(seconds: float) -> Callable[[str, int], None]:
    """Return a hook for the trainer's phases that waits once in each step."""

    def hook(phase: str, step: int) -> None:
        if phase == "gradient_sync":
            time.sleep(seconds)

    return hook


class ServedWorker:
    """A worker's process: the product's worker, and at most one place where it stops and says
    so.
    """

    def __init__(
        self,
        tell: Callable[[Any], None],
        place: WorkerPlace,
        job: Job,
        points: tuple[FaultPoint, ...],
        clock_offset_s: float,
        environment: Mapping[str, str],
    ) -> None:
        os.environ.update(environment)
        if clock_offset_s:
            true_time = time.time
            time.time = lambda: true_time() + clock_offset_s
        from tests.harness import toy_model  # noqa: F401

        keep_history()
        if environment.get(BACK_END) == "deferred":
            from autohet.runtime.groups.generation import BACK_ENDS
            from tests.harness.deferred_group import DeferredGroup

            BACK_ENDS["cpu"] = DeferredGroup

        if environment.get(BACK_END) == "one GPU":
            from scripts.benchmarks.gpu.part import share_gpu

            share_gpu(os.environ, place.worker)

        mine = [point for point in points if point.worker == place.worker]
        self._gates = {point: Gate(point, tell) for point in mine}
        hooks = [install(point, gate.arrive) for point, gate in self._gates.items()]
        if STEP_PAUSE_S in environment:
            hooks.append(pause_in_steps(float(environment[STEP_PAUSE_S])))
        from autohet.runtime.worker import Worker

        self._worker = Worker(place, job, phase_hook=next((hook for hook in hooks if hook), None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def request_stop(self, checkpoint: bool) -> None:
        self._worker.request_stop(checkpoint=checkpoint)

    def withdraw(self, generation: int) -> None:
        self._worker._next.withdraw(generation)

    def open_gate(self, point: FaultPoint) -> None:
        self._gates[point].open()

    def save_alone(self) -> None:
        """What the process does at its end, when no driver has come for long."""
        from autohet.runtime.process.unattended import Unattended

        # All begin within this, also where fifteen processes share two cores.
        Unattended(self._worker, settle_s=4.0).save(lambda: True)

    def hold_interpreter(self, seconds: float) -> None:
        """No other thread of this process runs Python meanwhile: as under an extension that keeps
        the interpreter's lock.
        """
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def resources(self) -> tuple[int, int]:
        """Open files, and threads."""
        return len(os.listdir("/proc/self/fd")), threading.active_count()


def served_agent(tell: Callable[[Any], None], place: tuple[str, ...], *arguments: Any) -> Any:
    """The product's agent, without the Ray around it. place: the fields of `AgentPlace`."""
    stand_in_where_missing()
    from autohet.driver.ray.agents.agent_actor import AgentActor, AgentPlace

    return AgentActor.__ray_metadata__.modified_class(AgentPlace(*place), *arguments)  # type: ignore[attr-defined]
