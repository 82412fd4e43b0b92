"""Worker actors of a job: one process for each GPU in use, placed on its node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autohet.control.values.observation import Loss
from autohet.driver.ray.environment import forwarded_environment
from autohet.driver.ray.observer import RayObserver
from autohet.driver.ray.run_actors import WORKER, Charge, actor_options
from autohet.driver.ray.tracked_nodes import TrackedNode
from autohet.driver.ray.worker_actor import WorkerActor
from autohet.runtime.messages import (
    GenerationOrder,
    PreparationOrder,
    WorkerPlace,
    split_orders,
)
from autohet.runtime.process.log import RunRecord
from planner.inputs.fleet import node_of


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a run's processes: CPU threads of a worker, and where their logs go.

    outlives: processes outlive their driver, and the next one takes them over.
    """

    threads: int
    record: RunRecord | None = None
    outlives: bool = False


class RayWorkers:
    """Implements `Workers` over Ray; the observer keeps the handles."""

    def __init__(self, observer: RayObserver, charge: Charge, settings: WorkerSettings) -> None:
        self._observer = observer
        self._charge = charge
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
            if not self._charge.is_mine:
                return
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
        options = actor_options(observer.run_id, WORKER, worker, outlives=self._settings.outlives)
        placed = actor_class.options(num_gpus=1, scheduling_strategy=on_node(tracked), **options)
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
                self._charge.kill([handle])

    def kill_processes(self, workers: Sequence[str]) -> None:
        """Kill these workers' processes without telling the controller (rehearsals)."""
        handles = self._observer.workers
        self._charge.kill([handles[worker] for worker in workers if worker in handles])

    def prepare(self, orders: Mapping[str, PreparationOrder]) -> None:
        (order, *_) = orders.values()
        shared = ray.put(self._observer.rendezvous.with_secret(order))
        self._send(tuple(orders), "prepare", shared)

    def withdraw(self, workers: Sequence[str], generation: int) -> None:
        self._send(workers, "withdraw", generation)

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        observer = self._observer
        # The orders were written with these inventories; the next ones need new inventories.
        observer.inventories.drop()
        common, own = split_orders(orders)
        shared = ray.put(observer.rendezvous.with_secret(common))
        for worker, fields in own.items():
            self._send([worker], "begin", shared, fields)

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        self._send(workers, "request_stop", checkpoint)

    def request_checkpoint(self, worker: str) -> None:
        self._send([worker], "request_checkpoint")

    def interrupt(self, workers: Sequence[str], generation: int, *, keep: bool = False) -> None:
        self._send(workers, "interrupt", generation, keep)

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        self._send(workers, "roll_forward", generation, vote)

    def _send(self, workers: Sequence[str], method: str, *arguments: Any) -> None:
        """Send the command to those of these workers that have a process."""
        for worker in workers:
            handle = self._observer.workers.get(worker)
            if handle is not None:
                handle.command.remote(self._charge.epoch, method, *arguments)

    def note_losses(self, workers: Sequence[str]) -> None:
        """Note the loss of those of these workers that have no process."""
        observer = self._observer
        now = observer.clock()
        for worker in workers:
            if worker not in observer.workers:
                reason = "its process ended while no driver was there"
                observer.losses[worker] = Loss(worker, reason, now, now)

    def adopt(self, workers: Mapping[str, Any]) -> None:
        """Take over workers' actors that outlived an earlier driver."""
        observer = self._observer
        for worker, handle in workers.items():
            handle.adopt.remote(observer.worker_reports.expect(worker))
            observer.worker_reports.watch(worker, handle.until_end.remote)
            observer.workers[worker] = handle


def on_node(tracked: TrackedNode) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(tracked.ray_node.node_id, soft=False)
