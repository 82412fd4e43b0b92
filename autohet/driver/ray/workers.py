"""Worker actors of a job: one process for each GPU in use, placed on its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autohet.driver.ray.environment import forwarded_environment
from autohet.driver.ray.observer import RayObserver
from autohet.driver.ray.tracked_nodes import TrackedNode
from autohet.driver.ray.worker_actor import WorkerActor
from autohet.runtime.messages import GenerationOrder, PreparationOrder, WorkerPlace
from autohet.runtime.process.log import RunRecord
from planner.inputs.fleet import node_of


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a run's processes: CPU threads of a worker, and where their logs go."""

    threads: int
    record: RunRecord | None = None


class RayWorkers:
    """Implements `Workers` over Ray; the observer keeps the handles."""

    def __init__(self, observer: RayObserver, settings: WorkerSettings) -> None:
        self._observer = observer
        self._settings = settings

    def hire(self, workers: Sequence[str]) -> None:
        observer = self._observer
        now = observer.clock()
        for worker in workers:
            tracked = observer.nodes.get(node_of(worker))
            if tracked is None:
                continue
            if tracked.view.node.name in observer.busy:
                # In Ray's queue it would take the GPU of another job's worker that dies.
                self.dismiss([worker])
                continue
            if worker in observer.workers:
                loss = observer.losses.get(worker)
                if loss is None or now - loss.seen_at < observer.timeouts.heartbeat_s:
                    continue
                # An idle worker that died, or one that never came up: try again.
                self.dismiss([worker])
            self.start_worker(worker, tracked)

    def start_worker(self, worker: str, tracked: TrackedNode) -> None:
        """Start a worker's actor on its node, and forget an earlier loss of it."""
        observer = self._observer
        observer.losses.pop(worker, None)
        node = tracked.view.node
        memory, disk = tracked.snapshot_directories(observer.job.checkpoint)
        place = WorkerPlace(worker, node.name, node.node_type.gpu_type, memory, disk)
        address = observer.worker_reports.expect(worker)

        actor_class: Any = WorkerActor
        placed = actor_class.options(num_gpus=1, scheduling_strategy=on_node(tracked))
        handle = placed.remote(
            place,
            observer.job,
            self._settings.threads,
            forwarded_environment(),
            self._settings.record,
            address,
        )
        # Watch it first: a worker that is not watched is not kept, and is started again.
        observer.worker_reports.watch(worker, handle.until_end.remote)
        observer.workers[worker] = handle

    def dismiss(self, workers: Sequence[str]) -> None:
        for worker in workers:
            handle = self._observer.workers.pop(worker, None)
            if handle is not None:
                self._observer.worker_reports.remove(worker)
                ray.kill(handle)

    def kill_processes(self, workers: Sequence[str]) -> None:
        """Kill these workers' processes without telling the controller (rehearsals)."""
        self._send(workers, lambda handle: ray.kill(handle))

    def prepare(self, orders: Mapping[str, PreparationOrder]) -> None:
        observer = self._observer
        for worker, order in orders.items():
            handle = observer.workers.get(worker)
            if handle is not None:
                handle.prepare.remote(observer.rendezvous.with_secret(order))

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        observer = self._observer
        # The orders were written with these inventories; the next ones need new inventories.
        observer.inventories.drop()
        for worker, order in orders.items():
            handle = observer.workers[worker]
            handle.begin.remote(observer.rendezvous.with_secret(order))

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        self._send(workers, lambda handle: handle.request_stop.remote(checkpoint))

    def request_checkpoint(self, worker: str) -> None:
        self._send([worker], lambda handle: handle.request_checkpoint.remote())

    def interrupt(self, workers: Sequence[str], generation: int, *, keep: bool = False) -> None:
        self._send(workers, lambda handle: handle.interrupt.remote(generation, keep))

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        self._send(workers, lambda handle: handle.roll_forward.remote(generation, vote))

    def _send(self, workers: Sequence[str], call: Callable[[Any], Any]) -> None:
        """Make the call on the workers that have a process."""
        for worker in workers:
            handle = self._observer.workers.get(worker)
            if handle is not None:
                call(handle)


def on_node(tracked: TrackedNode) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(tracked.ray_node.node_id, soft=False)
