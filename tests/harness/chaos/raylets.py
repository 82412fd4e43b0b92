"""Strikes on the raylets of a real Ray cluster on this machine, under the exact model's job.

Ray kills the workers and the agent of a node whose raylet was killed. Of a raylet that was frozen
for longer than Ray's health check allows, Ray says that its node died while its workers still run.
"""

import functools
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

from autohet.control.values.observation import Observation
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.events.event_log import EventLog
from autohet.driver.job.job_run import JobRun, Machines
from autohet.driver.ray import cluster as ray_cluster
from tests.harness.chaos.lives import Life, StruckJob, chaos_job
from tests.harness.chaos.places import Places
from tests.harness.chaos.striker import ABSENCE_S, Striker, workers_of
from tests.harness.chaos.strikes import Strike
from tests.harness.exact_job import NODES
from tests.harness.local_fleet import cluster_document, cluster_of, node_type
from tests.harness.waits import HANG_S

RAYLET_WEIGHTS = {"raylet_kill": 3, "raylet_freeze": 2}
"""Kinds of strikes, and how often each is drawn relative to the other."""
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "emulation": {"block_forward_s": 0.01},
}
"""A job lasts until its strikes have come."""


class RayNodes(EmulatedFleet):
    """Ray nodes on this machine whose raylets can be struck; their directories outlive them."""

    def has(self, name: str) -> bool:
        """Return whether the raylet of the node that was last started by this name still lives."""
        node = self.nodes.get(name)
        if node is not None and self.raylet_of(name).poll() is not None:
            assert self.cluster is not None
            self.cluster.remove_node(node.ray_node, allow_graceful=False)
            del self.nodes[name]
        return name in self.nodes

    def start_node(self, name: str) -> None:
        hook = {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: f"{__name__}.{prepare_worker.__name__}"}
        self.add(f"of{NODES[name]}", name, environment=hook)

    def is_up(self, name: str) -> bool:
        return self.has(name)

    def strike_raylet(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self.raylet_of(name).pid, number)

    def raylet_of(self, name: str) -> Any:
        (raylet,) = self.nodes[name].ray_node.all_processes["raylet"]
        return raylet.process


@dataclass
class RayletStriker(Striker):
    """Strikes raylets; call it after each tick."""

    patience_s: float = 60.0
    frozen: set[int] = field(default_factory=set)
    """Process ids of raylets that were frozen and not thawed."""

    def _node(self, strike: Strike, run: Any, seen: Observation) -> str | None:
        """Return a node whose workers train; None while the job is smaller than two nodes."""
        names = {worker.rsplit("/", 1)[0] for worker in run.controller.memory.members}
        if len(names) < 2:
            return None
        training = tuple(name for name in strike.nodes if name in names)
        return super()._node(replace(strike, nodes=training), run, seen)

    def _strike_node(self, strike: Strike, run: Any, seen: Observation) -> bool:
        name = self._node(strike, run, seen)
        if name is None:
            return False
        self._note(strike, run, name)
        self._hide(seen, workers_of(seen, name))
        self._absence_s[name] = strike.lasts_s / 2
        if strike.kind == "raylet_kill":
            run.fleet.strike_raylet(name, signal.SIGKILL)
        else:
            self._freeze_raylet(strike, run, name, workers_of(seen, name))
        return True

    def _freeze_raylet(self, strike: Strike, run: Any, name: str, workers: tuple[str, ...]) -> None:
        process_id = run.fleet.raylet_of(name).pid
        os.kill(process_id, signal.SIGSTOP)
        self.frozen.add(process_id)
        struck = {worker: self._struck[worker] for worker in workers if worker in self._struck}

        def thaw() -> None:
            self.thaw(process_id)
            self._forget_thawed(struck)

        self._after(strike.lasts_s, thaw)

    def thaw(self, process_id: int) -> None:
        self.frozen.discard(process_id)
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGCONT)

    def _bring_back(self, run: Any, now: float) -> None:
        """Start a node by the name of each whose raylet is gone, some time after that."""
        for name in NODES:
            if run.fleet.has(name):
                self._absent.pop(name, None)
                continue
            until = self._absent.setdefault(name, now + self._absence_s.pop(name, ABSENCE_S))
            if now >= until:
                run.fleet.start_node(name)


def prepare_worker() -> None:
    """Register the exact model in a Ray worker's process before anything runs there."""
    from autohet.runtime.worker import Worker
    from tests.harness import toy_model  # noqa: F401
    from tests.harness.history import keep_history
    from tests.harness.served_objects import STEP_PAUSE_S, pause_in_steps

    keep_history()
    if STEP_PAUSE_S in os.environ:
        hook = pause_in_steps(float(os.environ[STEP_PAUSE_S]))
        Worker.__init__ = functools.partialmethod(Worker.__init__, phase_hook=hook)  # type: ignore


def strike_raylets(
    places: Places, shared: Path, steps: int, strikes: Sequence[Strike]
) -> StruckJob:
    """Run the exact model's job on a Ray cluster to its end while its raylets are struck."""
    job = chaos_job(places, shared, steps, **SECTIONS)
    directory = places.root / "life-0"
    directory.mkdir()
    began = time.monotonic()
    fleet = RayNodes(cluster_of_nodes())
    striker = RayletStriker(places, list(strikes))
    try:
        _start_nodes(fleet)
        events = EventLog(directory / "events-0.jsonl")
        result = _run(JobRun(job, Machines(cluster_of(fleet), fleet), events), striker, began)
    finally:
        for process_id in list(striker.frozen):
            striker.thaw(process_id)
        fleet.close()
    (directory / "result.json").write_text(json.dumps(result))
    return StruckJob(places, [Life(directory, 0, None)], time.monotonic() - began)


def cluster_of_nodes() -> dict[str, Any]:
    """Return a cluster file with a node type for each number of GPUs of the exact job."""
    document = cluster_document()
    head = document["available_node_types"]["head"]
    kinds = {f"of{count}": node_type("A10G", count) for count in set(NODES.values())}
    document["available_node_types"] = {"head": head, **kinds}
    return document


def _start_nodes(fleet: RayNodes) -> None:
    ray_cluster.quieten()
    address = fleet.start({})
    for name in NODES:
        fleet.start_node(name)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    deadline = time.monotonic() + HANG_S
    while sum(node["Alive"] for node in ray.nodes()) <= len(NODES):
        assert time.monotonic() < deadline, "a Ray node did not start"
        time.sleep(0.1)


def _run(run: JobRun, striker: RayletStriker, began: float) -> dict[str, Any]:
    """Return how the run ended; a machine that is too busy to start it proves nothing of it."""
    try:
        run.start()
        while run.controller.ended is None and time.monotonic() < began + HANG_S:
            striker(run, run.tick())
            late = time.monotonic() >= began + HANG_S
            assert run.controller.memory.ledger.committed_steps or not late, (
                f"no step within {HANG_S:.0f} s: this machine is too busy"
            )
        ended = run.controller.ended
    finally:
        run.close()
        run.events.close()
    if ended is None:
        return {"ok": False, "reason": f"no end after {HANG_S:.0f} s"}
    return {"ok": ended.ok, "reason": ended.reason}
